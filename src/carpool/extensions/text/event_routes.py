"""Text of pictures as a model writes it: `/read`, `/caption` and `/models/{model}/predict` for clients that
want events. Without that wish, the server's own routes answer.

An event for each piece, `{"text": "To", "index": 0}`, and one for the whole answer, with `"done": true`. A
model that answers at once has one piece. An error after the first piece is an event, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import orjson

from carpool.config.model import Task
from carpool.errors import CarpoolError
from carpool.frontend.http.event_stream import as_event
from carpool.frontend.http.exchange import (
    Exchange,
    HttpHead,
    Start,
    status_of,
)
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.image_route import ImageRoute, ImageTarget
from carpool.frontend.http.text_answer import TextAnswer, Written
from carpool.vision.tasks.written import TEXT_TASKS
from carpool.wire.v2 import encode_error

_TIMES = ("decode_ms", "queue_ms", "infer_ms", "post_ms")


class EventWords:
    """Represents an event for each piece, and one for the whole answer."""

    streams = True

    def head(self) -> Sequence[bytes]:
        return ()

    def piece(self, text: str, number: int) -> Sequence[bytes]:
        return [as_event(orjson.dumps({"text": text, "index": number}))]

    def last(self, written: Written) -> Sequence[bytes]:
        timing = {name: round(took, 3) for name, took in zip(_TIMES, written.times, strict=False)}
        return [as_event(orjson.dumps({"done": True, **written.document, "timing": timing}))]

    def whole(self, written: Written) -> bytes:
        raise NotImplementedError

    def error(self, error: CarpoolError) -> Sequence[bytes]:
        return [as_event(encode_error(error)[:-1] + b',"status":%d}' % status_of(error))]


class EventRoute(ImageRoute):
    in_parts = True

    def parts(self, exchange: Exchange, target: ImageTarget) -> TextAnswer | None:
        """What is no text is one document in any case."""
        if target.model.task not in TEXT_TASKS or target.drawn is not None:
            return None
        return TextAnswer(exchange, EventWords(), self.service.server_row)


def _start(task: str, service: HttpService, head: HttpHead, _variables: Variables) -> Start:
    return EventRoute(service, head, task).begin


start_read, start_caption = partial(_start, Task.READ), partial(_start, Task.CAPTION)


def start_predict(service: HttpService, head: HttpHead, variables: Variables) -> Start:
    return EventRoute(service, head, None, variables["model"]).begin
