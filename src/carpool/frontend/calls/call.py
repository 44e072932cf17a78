"""Leads one request from its head to its answer, whatever protocol it comes over.

A protocol reads a request, and says where its tensors lie: in the slot that its body came into
(`_offer_in_place`), in pieces (`_offer_pieces`), or still in pictures (`_offer_pictures`). It writes what
comes of it (`_write`, `_write_error`). Deadlines, counters, traces and times are here; what happens between
the content and the answer is in `placement`. Where a model has features (`frontend.features`), the request
goes through those instead, with its content, and the answer that comes back is ready to be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from carpool.cache.answer_store import Kept
from carpool.cache.cache_key import ANY
from carpool.cache.cache_status import CacheStatus
from carpool.errors import Cancelled, CarpoolError
from carpool.frontend.calls.asking import Infers, Made
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.placement import ANSWERING, OVER, READING, RUNNING, RequestPlacement, WherePlaced
from carpool.frontend.calls.routing import Split
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.frontend.pictures.workers import stopping
from carpool.frontend.traces.trace_context import Origin
from carpool.link.contents import Content, Pieces
from carpool.link.door import Answer, Ask, Sender
from carpool.link.step_times import Times
from carpool.observe.columns import REQUEST_SECONDS
from carpool.observe.counters import count_failure
from carpool.types import Timing
from carpool.wire.v2 import Buffer, Placed, RequestHead

LEFT = asyncio.CancelledError("the client left")


class ClientCall(RequestPlacement):
    """Implements `Hears` and `Asker`."""

    __slots__ = ("cache_status", "more_fields", "rollout", "wish")

    def __init__(self, service: CallService, sender: Sender, deadline: float, arrived: float = 0.0) -> None:
        super().__init__(service, sender, deadline, arrived)
        self.rollout: Split | None = None  # between two versions, one of which has been chosen
        self.wish = ANY  # what the request says about caches
        self.cache_status: CacheStatus | None = None  # what its answer says about them
        self.more_fields = b""  # for the head of the answer, over HTTP

    # ── what a protocol does ──

    form = ""  # of its answers, by which those of other protocols are told apart; empty: they are not kept
    siblings = b""  # tells requests that came as one from all others
    looked: object = None  # what was found where its answer was looked for already

    def _write(self, answer: Answer, placed: Mapping[str, Placed], kept: Kept | None = None) -> None:
        """Send the outputs; those in `placed` are in the client's memory already. Or what is `kept` of them,
        as the answer to this request. What goes on when this returns is marked as `Answer.taken`."""
        raise NotImplementedError

    def _say_part(self, answer: Answer) -> None:
        """Writes one of the answers of a decoupled model, in their order; then `_write` for the end, without
        any outputs, or `_write_error`. What this raises ends the request: who reads too slowly is cut off."""

    def encode(self, made: Made) -> Kept:
        """The outputs as `_write` sends them, without what belongs to this request alone."""
        raise NotImplementedError

    def _write_error(self, error: CarpoolError, times: Times | None) -> None:
        """`times` is None for a request that never came to the engine."""
        raise NotImplementedError

    def origin(self, error: CarpoolError | None) -> Origin:
        """Returns how it came, and how it was answered, for its span."""
        raise NotImplementedError

    @property
    def pictures(self) -> SentPictures | None:
        """Returns the pictures until it has been answered, and while observers are told."""
        return self._pictures

    @property
    def request_id(self) -> str:
        """Returns it as the client calls it; empty where it does not."""
        return self.head.id

    # ── the request ──

    def _offer_in_place(self, head: RequestHead, tail: int) -> None:
        """The tensors are in the slot, behind `tail` bytes."""
        if self.service.forward is not None:
            head = self._with_headers(head)
        slot = self._slot
        assert slot is not None
        features = self.service.features.get(self.entry.key)
        if features is not None:
            self._slot = self._outlets = None
            self._offer_to(features, head, Content(slot, tail))
            return
        self._enter(head)
        self._offer(head, slot, tail)

    def _offer_pieces(
        self, head: RequestHead, pieces: Sequence[Buffer], *, checked: bool
    ) -> asyncio.Future[Any] | None:
        """The tensors are here, or in the client's own memory. Without `checked`, it is still to be seen
        whether BYTES and BOOL are such. Returns what it waits for, if it is not offered yet."""
        if self.service.forward is not None:
            head = self._with_headers(head)
        features = self.service.features.get(self.entry.key)
        if features is None:
            return self.place_pieces(head, pieces, checked=checked)
        content = Pieces(pieces, checked=checked)
        self._offer_to(features, head, content)
        return content.checking

    def _offer_pictures(self, pictures: SentPictures) -> None:
        """One may lie in a slot already, which is the request's from here on."""
        features = self.service.features.get(self.entry.key)
        if features is None:
            self.place_pictures(pictures)
        else:
            self._offer_to(features, pictures.asked, pictures)

    def _offer_to(self, features: Infers, head: RequestHead, content: Content) -> None:
        """What was asked may be answered when this returns."""
        try:
            self._enter(head, gate=False)
            times = self.arrived, self.deadline
            ask = Ask(self.entry, head, None, 0, *times, self.sender, content=content, asker=self)
            call = features.infer(ask, self)
        except BaseException:
            content.drop()
            raise
        if self.state == READING:
            self.state = RUNNING
            self._call = call

    # ── the answer ──

    def _finish(self, answer: Answer, placed: WherePlaced | None = dict) -> None:
        """Answer, and give back what the door holds. Never raises, since others wait behind it."""
        call, self._call = self._call, None  # it knows us too
        taken = False
        try:
            if self.state == OVER:
                return  # the client left while a thread worked
            if isinstance(answer, Made):
                self._adopt(answer)
            else:
                answer.held = call
            if answer.error is not None or placed is None:
                heard = not isinstance(answer, Made) or answer.heard
                self._fail(answer.error or stopping(), answer.timing if heard else None)
            else:
                self._answer(answer, placed())
                taken = answer.taken
            if answer.outside is not None:  # how long its client waited beyond what the engine sees
                now = monotonic()
                answer.outside.seen(self.unread + now - answer.sent, now)
        except CarpoolError as error:
            self._fail(error, answer.timing)
        except Exception as fault:
            self._fail_unexpectedly(fault)
        finally:
            if call is not None and not taken:
                call.release()

    def _adopt(self, made: Made) -> None:
        """It came through features: another version may have answered."""
        if not made.heard:
            self.state = READING
        if made.entry is not None and made.entry is not self.entry:
            self.entry, self.row = made.entry, self.service.row(made.entry)
        self._pictures, self.cache_status, self.more_fields = made.pictures, made.cache_status, made.fields
        self._done_at = made.done_at or self._done_at
        self._offered_at = made.offered_at or self._done_at

    def _answer(self, answer: Answer, placed: Mapping[str, Placed], *, begun: bool = False) -> None:
        """Send it; then those hear of it who only look on. One that is long is only prepared here, and this
        is called again when it has `begun`."""
        if not begun:
            if isinstance(answer, Made):
                self._write(answer, answer.placed, answer.kept)
            else:
                self._write(answer, placed)
            if answer.taken:
                return
        self.state = OVER
        now = monotonic()
        times = self._offered_at, self._done_at, now
        for observer in self.service.observers:
            observer.answered(self, answer, times)
        self._outlets = self._pictures = None
        assert self.row is not None
        self.row.observe(REQUEST_SECONDS, now - self.arrived)

    def _times(self, timing: Timing) -> Times:
        """Returns the times with the front end's own seconds around those of the engine."""
        before, after = self._offered_at - self.arrived, monotonic() - self._done_at
        return Times(
            (before + timing.input) * 1e3,
            timing.queue * 1e3,
            timing.infer * 1e3,
            (after + timing.output) * 1e3,
            timing.batch,
        )

    # ── the other ends ──

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        """Answer with an error, and give back everything."""
        state, self.state = self.state, OVER
        if state == OVER:
            return
        self._let_go()
        now = monotonic()
        times: Times | None = None
        if timing is not None:
            times = self._times(timing)
        elif state != READING:
            times = Times(decode=(now - self.arrived) * 1e3)
        if self.row is not None:
            unheard = self.head.batch if times is None and not self.sender.again else 0
            if times is None:
                source = self.sender.source or self.head.options.source
                self.service.door.turned_away(self.entry, error, self.arrived, self.head.batch, source)
            count_failure(self.row, error, now - self.arrived, unheard)
        self._write_error(error, times)
        for observer in self.service.observers:
            observer.failed(self, error, timing, now)

    def leave(self) -> None:
        """The client has gone: no answer is wanted any more, and what has not begun is not done."""
        state, self.state = self.state, OVER
        if state == OVER:
            return
        if state != ANSWERING:  # else a thread has the outputs, and `_finish` releases them
            self._let_go()
            call, self._call = self._call, None
            if call is not None:
                call.cancel()
        now = monotonic()
        if self.row is not None:
            count_failure(self.row, LEFT, now - self.arrived if self.arrived else 0.0)
        for observer in self.service.observers:
            observer.failed(self, Cancelled("the client left"), None, now)
