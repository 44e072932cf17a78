"""Text of pictures as a model writes it: `/read`, `/caption` and `/models/{model}/predict` for clients that
want events. Without that wish, these routes answer as all picture routes do.

An event for each piece, `{"text": "To", "index": 0}`, and one for the whole answer, with `"done": true`. A
model that answers at once has one piece. An error after the first piece is an event, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import orjson

from carpool.config.model import Task
from carpool.errors import Cancelled, CarpoolError, InvalidInput, without_stack
from carpool.frontend.calls.packing import AT_ONCE, LONG_PICTURE
from carpool.frontend.http.event_stream import EventStream
from carpool.frontend.http.exchange import BodyPlan, Exchange, answer_error, status_of
from carpool.frontend.http.http_service import Service, Start, Starter
from carpool.frontend.http.image_reading import Sent, read_image_head
from carpool.frontend.http.image_route import ImageRequest, ImageRoute, ImageTarget, Outcome
from carpool.frontend.http.parsing import RequestHead as HttpHead
from carpool.frontend.pictures.workers import stopping
from carpool.observe.columns import BYTES_SENT
from carpool.wire.v2 import encode_error

Found = TypeVar("Found")
TEXT_TASKS = (Task.READ, Task.CAPTION)
_TIMES = ("decode_ms", "queue_ms", "infer_ms", "post_ms")


def start_text(task: str) -> Starter:
    """For a route that names a task whose answer is text."""

    def starter(service: Service, head: HttpHead, _variables: Mapping[str, str]) -> Start:
        return _kind(head)(service, head, task).begin

    return starter


def start_predict(service: Service, head: HttpHead, variables: Mapping[str, str]) -> Start:
    return _kind(head)(service, head, None, variables["model"]).begin


def _kind(head: HttpHead) -> type[ImageRoute]:
    return EventRoute if read_image_head(head).events else ImageRoute


def read_aside(
    service: Service,
    exchange: Exchange,
    body: bytes | bytearray,
    read: Callable[..., Found],
    then: Callable[[Found], None],
    *more: object,
) -> None:
    """With `read`, of the body and `more`: long ones in a thread, and very long ones in another process. What
    is wrong with them, or comes of `then`, is told."""

    def go_on(work: asyncio.Future[Found]) -> None:
        if not exchange.pending:
            return
        exchange.on_disconnect = None
        error = stopping() if work.cancelled() else work.exception()
        try:
            if error is not None:
                raise error
            then(work.result())
        except CarpoolError as wrong:
            service.fair.tell(exchange, wrong)
        except Exception as failed:
            service.log.exception("request-failed", path=exchange.head.path)
            answer_error(exchange, CarpoolError("the server failed on this request"))
            without_stack(failed)

    if len(body) > AT_ONCE:
        exchange.on_disconnect = _nothing
        work = partial(service.long_json.read, read, body, *more, at_most=LONG_PICTURE)
        asyncio.get_running_loop().run_in_executor(service.threads, work).add_done_callback(go_on)
        return
    try:
        then(read(body, *more))
    except CarpoolError as error:
        service.fair.tell(exchange, error)


def _nothing() -> None:
    """The client left while its request was read: `pending` says so."""


class StreamedRequest(ImageRequest):
    """One picture, whose text is sent as it comes. The head of the answer goes out with the first of it."""

    __slots__ = ("_stream", "pieces")

    def __init__(self, route: ImageRoute, exchange: Exchange, target: ImageTarget) -> None:
        super().__init__(route, exchange, target)
        self._stream: EventStream | None = None
        self.pieces = 0

    def part(self, text: str) -> None:
        if text:
            self._say(self._piece(text))
            self.pieces += 1

    def _begin(self, sent: Sent, size: int) -> None:
        if sent.several:
            raise InvalidInput("text of several pictures comes in one document: send one at a time")
        super()._begin(sent, size)

    def _send(self, fields: bytes, body: bytes, *, compressible: bool = True) -> None:
        """The end: all that there is, for a model that answers at once."""
        document: dict[str, Any] = orjson.loads(body)
        with suppress(Cancelled):  # who reads too slowly was cut off, and this is the end anyway
            if not self.target.entry.decoupled:
                self.part(document["text"])
            self._say(self._last(document))
            self._end()

    def _tell(self, error: CarpoolError, more_fields: bytes = b"") -> None:
        if self._stream is None:
            super()._tell(error, more_fields)
        elif self.exchange.pending:
            with suppress(Cancelled):
                self._say([self._error(error)])
                self._end()

    def _say(self, events: Sequence[bytes]) -> None:
        if self._stream is None:
            events = [*self._opening(), *events]
            self._stream = EventStream(self.exchange)
        self.service.server_row.add(BYTES_SENT, sum(map(len, events)))
        self._stream.send(events)

    def _end(self) -> None:
        assert self._stream is not None
        self._stream.end()

    # ── in which words ──

    def _opening(self) -> Sequence[bytes]:
        return ()

    def _piece(self, text: str) -> Sequence[bytes]:
        return [orjson.dumps({"text": text, "index": self.pieces})]

    def _last(self, document: dict[str, Any]) -> Sequence[bytes]:
        times = cast(Outcome, self._outcomes[0]).times if self._outcomes else ()
        timing = {name: round(took, 3) for name, took in zip(_TIMES, times, strict=False)}
        return [orjson.dumps({"done": True, **document, "timing": timing})]

    def _error(self, error: CarpoolError) -> bytes:
        return encode_error(error)[:-1] + b',"status":%d}' % status_of(error)


class EventRoute(ImageRoute):
    def _plan(self, exchange: Exchange, target: ImageTarget) -> BodyPlan:
        """What is no text is one document in any case."""
        streams = target.model.task in TEXT_TASKS and target.drawn is None
        self.makes = StreamedRequest if streams else ImageRequest
        return super()._plan(exchange, target)
