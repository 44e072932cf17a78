"""Says how far an image in tiles is: /detect, /segment and /pose for clients that want events.

An event for each step, `{"tiles": {"done": 24, "of": 191}}`, where there are more than 64 parts; and one for
the whole answer, with `"done": true`. An error after the first event is an event, too. Requests without tiles
have one document, whatever they want.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import orjson

from carpool.config.model import Task
from carpool.errors import Cancelled, CarpoolError
from carpool.extensions.tiles.tiled_model import TiledModel
from carpool.frontend.http.event_stream import EventStream
from carpool.frontend.http.exchange import Exchange, HttpHead, Start, status_of
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.image_route import ImageRoute, ImageTarget, PictureOutcome
from carpool.observe.columns import BYTES_SENT
from carpool.observe.counters import Row
from carpool.wire.v2 import encode_error


class Progress:
    """Implements `AnswerInParts`. The head goes out with the first event."""

    def __init__(self, exchange: Exchange, row: Row) -> None:
        self._exchange = exchange
        self._row = row
        self._stream: EventStream | None = None

    def part(self, text: str) -> None:
        self._say(text.encode())

    def end(self, fields: bytes, body: bytes, outcome: PictureOutcome | None) -> None:
        with suppress(Cancelled):  # a client that reads too slowly was cut off, and this is the end anyway
            self._end(orjson.dumps({"done": True, **orjson.loads(body)}))

    def fail(self, error: CarpoolError) -> bool:
        if self._stream is None:
            return False
        if self._exchange.pending:
            with suppress(Cancelled):
                self._end(encode_error(error)[:-1] + b',"status":%d}' % status_of(error))
        return True

    def _say(self, event: bytes) -> None:
        if self._stream is None:
            self._stream = EventStream(self._exchange)
        self._row.add(BYTES_SENT, len(event))
        self._stream.send([event])

    def _end(self, event: bytes) -> None:
        self._say(event)
        assert self._stream is not None
        self._stream.end()


def _start(task: str, service: HttpService, head: HttpHead, _variables: Variables) -> Start:
    def progress(exchange: Exchange, target: ImageTarget) -> Progress | None:
        if not isinstance(target.model, TiledModel) or target.drawn is not None:
            return None
        return Progress(exchange, service.server_row)

    route = ImageRoute(service, head, task)
    route.in_parts, route.writer = True, progress
    return route.begin


start_detect = partial(_start, Task.DETECT)
start_segment = partial(_start, Task.SEGMENT)
start_pose = partial(_start, Task.POSE)
