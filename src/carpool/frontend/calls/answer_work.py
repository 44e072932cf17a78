"""Does what is left to do with the outputs of an answer before it is sent: the classes that were asked for
are found, the outputs for pictures become documents, and what a client wants in its own memory is written
there. What takes long is done in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from carpool.errors import CarpoolError, without_stack
from carpool.frontend.calls.request_facts import OVER, RequestFacts, RequestService
from carpool.frontend.calls.thread_errors import explained, stopping
from carpool.link.engine_client import Answer
from carpool.observe.columns import POST_SECONDS
from carpool.types import Tensor
from carpool.wire.classes import any_takes_long, with_classes
from carpool.wire.v2 import Placed

if TYPE_CHECKING:
    from carpool.frontend.pictures.sent_pictures import SentPictures


class AnswerWork:
    """Represents the work on one answer. `then` gets the answer once, also when its client has left
    meanwhile."""

    __slots__ = ("_answer", "_request", "_service", "_then")

    def __init__(
        self,
        service: RequestService,
        request: RequestFacts,
        answer: Answer,
        then: Callable[[Answer], None],
    ) -> None:
        self._service = service
        self._request = request
        self._answer = answer
        self._then = then

    def go_on(self) -> None:
        """Does what is left. Never raises."""
        request, answer = self._request, self._answer
        pictures, traits = request.pictures, request.entry.traits
        try:
            for output in request.head.outputs:
                if output.classification and answer.error is None and self._finds_classes():
                    return
            if traits.decoupled and traits.in_parts(request.refuses_many):
                if pictures is not None and answer.error is None:
                    pictures.conclude()
                self._then(answer)
            elif pictures is None or answer.error is not None:
                self._put()
            else:
                self._compose(pictures)
        except Exception as fault:
            self._failed("request-failed", fault)

    def _failed(self, event: str, fault: BaseException) -> None:
        """A bug. It is answered, like any other error."""
        request, answer = self._request, self._answer
        self._service.log.error(event, exc_info=fault, **request.reply.facts(request))
        answer.error = CarpoolError(f"the server failed on this request: {type(fault).__name__}")
        without_stack(fault)
        self._then(answer)

    # ── classes ──

    def _finds_classes(self) -> bool:
        """Finds the classes in a thread, if there are many values to look through: numpy does it while the
        loop goes on. Returns whether that is so."""
        request, outputs = self._request, self._answer.outputs
        entry, asked = request.entry, request.head.outputs
        if not any_takes_long(asked, outputs):
            return False
        batched = entry.signature.max_batch > 0
        work = partial(with_classes, asked, outputs, entry.published.labels, batched=batched)
        request.thread_work = in_thread = self._service.fair_threads.begin(request.client, work)
        in_thread.done.add_done_callback(self._found_classes)
        return True

    def _found_classes(self, work: asyncio.Future[list[Tensor]]) -> None:
        request, answer = self._request, self._answer
        request.thread_work = None
        error = stopping() if work.cancelled() else work.exception()
        if error is None:
            answer.outputs = work.result()
        elif not isinstance(error, CarpoolError):
            self._failed("classes-failed", error)
            return
        else:
            answer.error = without_stack(error)
        if request.state == OVER:
            self._then(answer)
        else:
            self.go_on()

    # ── pictures ──

    def _compose(self, pictures: SentPictures) -> None:
        """Makes of the outputs what they mean."""
        request, answer, service = self._request, self._answer, self._service.pictures
        service.ran(request.entry, answer.timing)
        if not pictures.composes:
            self._put()
        elif pictures.quick:
            try:
                answer.outputs, seconds = pictures.compose(answer.outputs)
            except Exception as error:
                answer.error = explained(error, request.entry.name)
            else:
                assert request.row is not None
                request.row.observe(POST_SECONDS, seconds)
            if request.outlets is None:
                self._then(answer)
            else:
                self._put()
        else:
            request.reply.takes_long()
            service.workers.finish(partial(pictures.compose, answer.outputs), self._composed)

    def _composed(self, made: tuple[Sequence[Tensor], float] | None, error: BaseException | None) -> None:
        request, answer = self._request, self._answer
        if made is None:
            answer.error = explained(error, request.entry.name)
        else:
            answer.outputs, seconds = made
            assert request.row is not None
            request.row.observe(POST_SECONDS, seconds)
        self._put()

    # ── the client's own memory ──

    def _put(self) -> None:
        """Writes the outputs that are wanted there."""
        request, answer = self._request, self._answer
        outlets = request.outlets
        if outlets is None or answer.error is not None or request.state == OVER:
            self._then(answer)
        elif outlets.put(answer.outputs, request.entry, self._service.threads, self._was_put):
            request.reply.takes_long()

    def _was_put(self, placed: Callable[[], Mapping[str, Placed]] | None) -> None:
        """They are there, or are not: `placed` raises why. None: the server stops."""
        request, answer = self._request, self._answer
        if request.state != OVER:
            try:
                request.placed = _stopped() if placed is None else placed()
            except CarpoolError as error:
                answer.error = error
            except Exception as fault:
                self._failed("request-failed", fault)
                return
        self._then(answer)


def _stopped() -> Mapping[str, Placed]:
    raise stopping()
