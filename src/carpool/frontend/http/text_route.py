"""Text of pictures as a model writes it: `/read`, `/caption` and `/models/{model}/predict` for clients that
want events. Without that wish, these routes answer as all picture routes do.

An event for each piece, `{"text": "To", "index": 0}`, and one for the whole answer, with `"done": true`. A
model that answers at once has one piece. An error after the first piece is an event, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import orjson

from carpool.config.model import Task
from carpool.errors import CarpoolError, without_stack
from carpool.frontend.calls.packing import AT_ONCE, LONG_PICTURE
from carpool.frontend.http.event_stream import Writer, Written
from carpool.frontend.http.exchange import Exchange, Start, answer_error, status_of
from carpool.frontend.http.http_service import HttpService, Starter
from carpool.frontend.http.image_reading import read_image_head
from carpool.frontend.http.image_route import ImageRoute, ImageTarget
from carpool.frontend.http.parsing import HttpHead
from carpool.frontend.pictures.workers import stopping
from carpool.wire.v2 import encode_error

Found = TypeVar("Found")
TEXT_TASKS = (Task.READ, Task.CAPTION)
_TIMES = ("decode_ms", "queue_ms", "infer_ms", "post_ms")


def start_text(task: str) -> Starter:
    """Returns the starter for a route that names a task whose answer is text."""

    def starter(service: HttpService, head: HttpHead, _variables: Mapping[str, str]) -> Start:
        return _kind(head)(service, head, task).begin

    return starter


def start_predict(service: HttpService, head: HttpHead, variables: Mapping[str, str]) -> Start:
    return _kind(head)(service, head, None, variables["model"]).begin


def _kind(head: HttpHead) -> type[ImageRoute]:
    return EventRoute if read_image_head(head).events else ImageRoute


def read_aside(
    service: HttpService,
    exchange: Exchange,
    body: bytes | bytearray,
    read: Callable[..., Found],
    then: Callable[[Found], None],
    *more: object,
) -> None:
    """Reads the body and `more` with `read`: long ones in a thread, and very long ones in another process.
    What is wrong with them, or comes of `then`, is told."""

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


class EventWords:
    """Represents an event for each piece, and one for the whole answer."""

    streams = True

    def head(self) -> Sequence[bytes]:
        return ()

    def piece(self, text: str, number: int) -> Sequence[bytes]:
        return [orjson.dumps({"text": text, "index": number})]

    def last(self, written: Written) -> Sequence[bytes]:
        timing = {name: round(took, 3) for name, took in zip(_TIMES, written.times, strict=False)}
        return [orjson.dumps({"done": True, **written.document, "timing": timing})]

    def whole(self, written: Written) -> bytes:
        raise NotImplementedError

    def error(self, error: CarpoolError) -> bytes:
        return encode_error(error)[:-1] + b',"status":%d}' % status_of(error)


class EventRoute(ImageRoute):
    writes = True

    def writer(self, target: ImageTarget) -> Writer | None:
        """What is no text is one document in any case."""
        return EventWords() if target.model.task in TEXT_TASKS and target.drawn is None else None
