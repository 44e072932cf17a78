"""One request with pictures: all of them sent through the door, and the one answer when the last is done."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from carpool.errors import CarpoolError, InvalidInput, Refused, without_stack
from carpool.frontend.http.body_slots import larger_slot
from carpool.frontend.http.compressing import WORTH_COMPRESSING, answer_compressed
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_refusals import status_of
from carpool.frontend.http.http_service import log
from carpool.frontend.http.image_body import Sent, read_pictures
from carpool.frontend.http.infer_answer import TIMING
from carpool.frontend.http.packing import AT_ONCE
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.pictures.picture import Asked, Outcome, Picture
from carpool.frontend.server_timing import Times
from carpool.link.asked_fields import LATEST
from carpool.link.door import Slot
from carpool.memory.slot_files import FILE_AT, write_length
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.observe.counters import count_failure
from carpool.vision.formats import MOST_PIXELS_AT_ONCE, Buffer, pixels_of_request
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options
from carpool.wire.v2 import encode_error

if TYPE_CHECKING:
    from carpool.frontend.http.image_route import ImageRoute, Target

_AT_ONCE_UNDER_WAY = 16
"""Of one request: enough to fill batches, and no client takes all the slots."""

_LEFT = asyncio.CancelledError("the client left")
_JSON_ANSWER = JSON_FIELDS + b"Vary: Accept\r\n" + TIMING
_DRAWN_ANSWER = b"Content-Type: image/%b\r\nVary: Accept\r\n" + TIMING


class ImageRequest:
    __slots__ = (
        *("_arrived", "_asked", "_exchange", "_held", "_outcomes", "_pixels", "_pixels_held", "_route"),
        *("_several", "_target", "_under_way", "_waiting", "slot"),
    )

    def __init__(self, route: ImageRoute, exchange: Exchange, target: Target) -> None:
        self._route = route
        self._exchange = exchange
        self._target = target
        self._arrived = 0.0
        self._held = 0
        self._pixels: Sequence[int] = (0,)  # of each picture, as its head says
        self._pixels_held = 0
        self._several = False
        self._asked: Asked
        self._outcomes: list[Outcome | None] = []
        self._under_way: dict[int, Picture] = {}
        self._waiting: deque[tuple[int, Buffer]] = deque()
        self.slot: Slot | None = None  # the body comes into it
        exchange.on_disconnect = self._left

    # ── the request ──

    def received(self, body: bytes | bytearray, at: float) -> None:
        self._arrived = at
        route = self._route
        service = route.service
        service.server_row.add(BYTES_RECEIVED, self._exchange.head.content_length or len(body))
        try:
            self._target = route.current()  # what serves may have changed while the body came
            if not service.pictures.hold(len(body)):
                raise _too_many()
            self._held = len(body)
            if route.asked.layout.kind == "raw" or len(body) <= AT_ONCE:
                self._begin(read_pictures(body, route.asked.layout))
                return
        except CarpoolError as error:
            self._fail(error)
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(service.threads, read_pictures, body, route.asked.layout)
        work.add_done_callback(self._read)

    def more(self, received: int) -> memoryview | None:
        """The slot is full, and the picture is longer."""
        slot, self.slot = self.slot, None
        door = self._route.service.door
        assert slot is not None
        size = FILE_AT + (self._exchange.head.content_length or 0) + 1
        try:
            self.slot = larger_slot(door, self._exchange, slot, FILE_AT + received, size)
        except CarpoolError as error:
            self._arrived = self._exchange.head_at
            self._fail(error)
            return None
        return self.slot.view[FILE_AT:]

    def received_in_slot(self, at: float) -> None:
        """The body is in the slot. If the device cannot take it from there, it goes the way of all others."""
        slot, size = self.slot, self._exchange.head.content_length or 0
        assert slot is not None
        picture = slot.view[FILE_AT : FILE_AT + size]
        try:
            target = self._target = self._route.current()
            geometry = target.model.seen_as_file(picture)
            options, drawn = self._route.read_options(target, {}, several=False)
        except CarpoolError as error:
            self._arrived = at
            self._fail(error)
            return
        if geometry is None or drawn is not None:
            body = bytes(picture)
            self._drop_slot()
            self.received(body, at)
            return
        self._arrived = at
        self._route.service.server_row.add(BYTES_RECEIVED, size)
        write_length(slot.view, size)
        self._ask(options, None, 1)
        self.slot = None
        self._start(0, b"", slot, geometry)
        self._go_on()

    def _read(self, work: asyncio.Future[Sent]) -> None:
        """A long body was taken apart in a thread."""
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or not self._exchange.pending:
            self._let_go()
            return
        try:
            if error is not None:
                raise error
            self._begin(work.result())
        except CarpoolError as known:
            self._fail(known)
        except Exception as unknown:
            log.exception("request-failed", path=self._exchange.head.path)
            self._fail(CarpoolError(f"the server failed on this request: {type(unknown).__name__}"))
            without_stack(unknown)

    def _begin(self, sent: Sent) -> None:
        if self._route.asked.sender.latest and sent.several:
            raise InvalidInput(f"with {LATEST} send one picture at a time", field=LATEST)
        options, drawn = self._route.read_options(self._target, sent.fields, several=sent.several)
        self._several = sent.several
        self._pixels = pixels_of_request(sent.pictures)
        self._hold_pixels(sum(self._pixels))
        self._ask(options, drawn, len(sent.pictures))
        self._waiting.extend(enumerate(sent.pictures))
        self._go_on()

    def _hold_pixels(self, pixels: int) -> None:
        if not self._route.service.pictures.hold_pixels(pixels):
            raise _too_many()
        self._pixels_held = pixels

    def _ask(self, options: Options, drawn: str | None, pictures: int) -> None:
        asked = self._route.asked
        deadline = self._exchange.head_at + asked.budget
        self._asked = Asked(options, drawn, self._arrived, deadline, asked.sender, self._exchange.unread)
        self._outcomes = [None] * pictures

    def _go_on(self) -> None:
        """Start what may be under way; answer when nothing is any more."""
        while self._waiting and self._may_start(self._waiting[0][0]):
            self._start(*self._waiting.popleft())
        if not self._under_way:
            self._answer()

    def _may_start(self, number: int) -> bool:
        """Large ones come one after the other, so that pictures of other requests are decoded in between."""
        under_way = sum(self._pixels[other] for other in self._under_way)
        fits = under_way + self._pixels[number] <= MOST_PIXELS_AT_ONCE
        return len(self._under_way) < _AT_ONCE_UNDER_WAY and (fits or not self._under_way)

    def _start(
        self, number: int, data: Buffer, slot: Slot | None = None, geometry: Geometry | None = None
    ) -> None:
        """With a slot that holds the picture's file, and how the device will see it."""

        def done(outcome: Outcome) -> None:
            del self._under_way[number]
            self._outcomes[number] = outcome
            self._go_on()

        picture = Picture(self._route.service.pictures, self._target.model, data, self._asked, done)
        try:
            if slot is None or geometry is None:
                picture.start()
            else:
                picture.start_in(slot, geometry)
        except CarpoolError as error:
            self._outcomes[number] = Outcome(b"", without_stack(error), Times())
        else:
            self._under_way[number] = picture

    # ── the answer ──

    def _answer(self) -> None:
        self._let_go()
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        slowest = outcomes[0] if len(outcomes) == 1 else max(outcomes, key=_time_taken)
        if self._several:
            listed = [_listed(outcome) for outcome in outcomes]
            self._send(_JSON_ANSWER % slowest.times, b'{"results":[%b]}' % b",".join(listed))
        elif slowest.error is not None:
            self._tell(slowest.error, TIMING % slowest.times)
        elif self._asked.drawn is None:
            self._send(_JSON_ANSWER % slowest.times, slowest.body)
        else:
            fields = _DRAWN_ANSWER % (self._asked.drawn.encode(), *slowest.times)
            self._send(fields, slowest.body, compressible=False)

    def _send(self, fields: bytes, body: bytes, *, compressible: bool = True) -> None:
        service, encoding = self._route.service, self._route.asked.encoding
        if compressible and encoding is not None and len(body) >= WORTH_COMPRESSING:
            answer_compressed(service, self._exchange, fields, body, encoding)
            return
        service.server_row.add(BYTES_SENT, len(body))
        self._exchange.respond(200, fields, body)

    def _fail(self, error: CarpoolError) -> None:
        """Before there was any picture."""
        self._drop_slot()
        self._let_go()
        self._tell(error)
        count_failure(self._target.row, error, monotonic() - self._arrived)

    def _tell(self, error: CarpoolError, more_fields: bytes = b"") -> None:
        route = self._route
        source = route.asked.sender.source
        route.service.fair.tell(self._exchange, error, self._target.entry, source, more_fields)

    def _left(self) -> None:
        """No answer is wanted any more."""
        self._drop_slot()
        begun = list(self._under_way.values())
        self._waiting.clear()
        self._under_way.clear()
        for picture in begun:
            picture.leave()
        self._let_go()
        if not begun:
            count_failure(self._target.row, _LEFT, 0.0)

    def _drop_slot(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()

    def _let_go(self) -> None:
        held, self._held = self._held, 0
        pixels, self._pixels_held = self._pixels_held, 0
        pictures = self._route.service.pictures
        pictures.let_go(held)
        pictures.let_pixels_go(pixels)


def _too_many() -> Refused:
    return Refused("too many pictures are under way", reason="queue-full", retry_after_s=1.0)


def _time_taken(outcome: Outcome) -> float:
    return sum(outcome.times[:4])


def _listed(outcome: Outcome) -> bytes:
    """An answer, or an error with the status that it would have had alone."""
    if outcome.error is None:
        return outcome.body
    return encode_error(outcome.error)[:-1] + b',"status":%d}' % status_of(outcome.error)
