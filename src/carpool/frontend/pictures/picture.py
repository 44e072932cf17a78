"""One picture's way: the door, a slot and a thread that decodes into it, a thread that makes the answer.

Where the model's device decodes, an ordinary JPEG goes into the slot as it is. What takes no longer than to
wake a thread is done in the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

import orjson

from carpool.errors import CarpoolError, Unavailable, without_stack
from carpool.frontend.pictures.picture_decoding import Decoding, weight_of
from carpool.frontend.pictures.picture_models import PictureModel
from carpool.frontend.pictures.picture_service import PictureService, promised
from carpool.frontend.server_timing import Times, times_of
from carpool.link.asked_fields import Sender
from carpool.link.door import Answer, Call, Slot
from carpool.memory.slot_files import FILE_AT, write_file
from carpool.observe.columns import DECODE_SECONDS, POST_SECONDS, REQUEST_SECONDS
from carpool.observe.counters import count_failure
from carpool.observe.logs import logger
from carpool.types import Tensor, Timing
from carpool.vision import draw
from carpool.vision.decode import decode
from carpool.vision.formats import Buffer
from carpool.vision.geometry import Geometry
from carpool.vision.options import Options

log = logger("pictures")

_LEFT = asyncio.CancelledError("the client left")


class Asked(NamedTuple):
    """What a request wants of each of its pictures. Times are `time.monotonic()`."""

    options: Options
    drawn: str | None  # the format of the picture to answer with, instead of JSON
    arrived: float
    deadline: float  # the client's own
    sender: Sender
    unread: float = 0.0  # seconds that it lay in its socket


class Outcome(NamedTuple):
    """How a picture ended: an answer as bytes, or an error."""

    body: bytes
    error: CarpoolError | None
    times: Times


class Picture:
    """`done` gets the outcome, once and never within `start`, unless the client has left."""

    __slots__ = (
        *("_answer", "_asked", "_call", "_data", "_decoding", "_done", "_geometry", "_head", "_left"),
        *("_model", "_offered", "_post_at", "_row", "_service", "_slot", "_threaded"),
    )

    def __init__(
        self,
        service: PictureService,
        model: PictureModel,
        data: Buffer,
        asked: Asked,
        done: Callable[[Outcome], None],
    ) -> None:
        self._service = service
        self._model = model
        self._data = data
        self._asked = asked
        self._done = done
        self._row = service.row(model.entry)
        self._slot: Slot | None = None
        self._call: Call | None = None
        self._head = model.head
        self._geometry: Geometry
        self._answer: Answer
        self._offered = self._post_at = asked.arrived
        self._decoding: Decoding[tuple[Geometry, float]] | None = None
        self._threaded = False  # a thread works for it, and may touch the outputs
        self._left = False

    def start(self) -> None:
        """Raises, counted, what stands in the way of beginning at all."""
        geometry = self._model.seen_as_file(self._data)
        try:
            if geometry is None:
                self._start_decoding()
            else:
                slot = self._room(FILE_AT + len(self._data))
                write_file(slot.view, self._data)
                self._offer_file(slot, geometry)
        except CarpoolError as error:
            self._not_begun(error)
            raise

    def start_in(self, slot: Slot, geometry: Geometry) -> None:
        """As `start`, for a file that is in the slot already, which is the picture's from here on."""
        try:
            self._slot = slot
            self._offer_file(slot, geometry)
        except CarpoolError as error:
            self._not_begun(error)
            raise

    def _not_begun(self, error: CarpoolError) -> None:
        self._release()
        asked, entry = self._asked, self._model.entry
        count_failure(self._row, error, monotonic() - asked.arrived)
        self._service.door.turned_away(entry, error, asked.arrived, source=asked.sender.source)

    def _offer_file(self, slot: Slot, geometry: Geometry) -> None:
        if self._asked.drawn is None:
            self._data = b""
        self._geometry = geometry
        self._head = self._model.file_head
        self._offered = monotonic()
        self._service.offers(self._model.entry, self._offered)
        self._infer(slot)

    def _room(self, size: int) -> Slot:
        self._slot = slot = self._service.door.slot(size)
        if slot is None:
            raise Unavailable("all memory for requests is in use", reason="no-slots")
        return slot

    # ── decoding ──

    def _start_decoding(self) -> None:
        """Offered at once, decoded when it is let in."""
        service, entry, asked = self._service, self._model.entry, self._asked
        weight = weight_of(self._data)
        refusal = service.refuses_now(entry, asked.deadline, asked.arrived, asked.sender, weight)
        if refusal is not None:
            raise refusal
        until = promised(entry, asked.arrived, asked.deadline)
        slot = self._room(self._model.bytes)
        work = partial(self._prepare, slot)
        decoding = Decoding(service.workers, slot, work, self._prepared, until, weight)
        self._infer(slot, decoding)
        self._decoding = decoding

    def _prepare(self, slot: Slot) -> tuple[Geometry, float]:
        """In a thread: the picture into the slot; the seconds that took."""
        started = monotonic()
        geometry = self._model.prepare(self._data, slot.view)
        return geometry, monotonic() - started

    def _prepared(self, prepared: tuple[Geometry, float] | None, error: BaseException | None) -> None:
        """The call has the slot now; without a tensor in it, it was cancelled."""
        self._decoding = None
        if self._asked.drawn is None:
            self._data = b""
        if prepared is None:
            self._call = None
            self._fail(told(error, self._model.entry.name))
            return
        self._geometry, seconds = prepared
        self._row.observe(DECODE_SECONDS, seconds)
        self._offered = monotonic()

    def _infer(self, slot: Slot, decoding: Decoding[tuple[Geometry, float]] | None = None) -> None:
        asked, model = self._asked, self._model
        self._call = self._service.door.infer(
            model.entry,
            self._head,
            slot,
            0,
            self._inferred,
            arrived=asked.arrived,
            deadline=asked.deadline,
            sender=asked.sender,
            ready_in=None if decoding is None else decoding.ready_in,
            admitted=None if decoding is None else decoding.admitted,
        )
        self._slot = None
        if decoding is not None:
            decoding.call = self._call

    # ── the answer ──

    def _inferred(self, answer: Answer) -> None:
        self._answer = answer
        self._post_at = monotonic()
        self._stop_decoding()  # refused, or given up, before it was decoded
        if answer.error is not None:
            self._release()
            self._fail(answer.error, answer.timing)
            answer.left(self._asked.unread)
            return
        self._service.ran(self._model.entry, answer.timing)
        if self._model.quick and self._asked.drawn is None:
            self._compose_here()
            return
        self._threaded = True
        self._service.workers.finish(self._compose, self._composed)

    def _compose_here(self) -> None:
        try:
            composed = self._compose()
        except Exception as error:
            self._composed(None, error)
        else:
            self._composed(composed, None)

    def _compose(self) -> tuple[bytes, float]:
        """In a thread: the answer as it leaves; the seconds that took."""
        started = monotonic()
        asked, model = self._asked, self._model
        if asked.drawn is None:
            body = document(model, self._answer.outputs, 0, self._geometry, asked.options)
        else:  # decoded again, in full: to keep the pixels while the model runs could take any memory
            outputs = model.of_one(self._answer.outputs, 0)
            pixels = decode(self._data).pixels
            drawn = model.answers.draw(pixels, outputs, self._geometry, asked.options)
            body = draw.encode(drawn, asked.drawn)
        return body, monotonic() - started

    def _composed(self, composed: tuple[bytes, float] | None, error: BaseException | None) -> None:
        self._threaded = False
        self._release()
        if self._left:
            return
        if composed is None:
            self._fail(told(error, self._model.entry.name), self._answer.timing)
            return
        body, seconds = composed
        now = monotonic()
        row, timing, asked = self._row, self._answer.timing, self._asked
        row.observe(POST_SECONDS, seconds)
        row.observe(REQUEST_SECONDS, now - asked.arrived)
        tracer = self._service.tracer
        if tracer.on:
            tracer.answered(self._model.entry, self._head, timing, asked.arrived, self._offered, now)
        self._done(Outcome(body, None, self._times(timing, now - self._post_at)))
        if asked.drawn is None:  # who wants a drawing waits for that: it says nothing of the others
            self._answer.left(asked.unread)

    # ── the end ──

    def leave(self) -> None:
        """The client has gone: nothing more is done for it than has been begun."""
        if self._left:
            return
        self._left = True
        self._stop_decoding()
        if not self._threaded:  # else the thread's outputs are released when it is done
            call, self._call = self._call, None
            if call is not None:
                call.cancel()
            self._release()
        count_failure(self._row, _LEFT, monotonic() - self._asked.arrived)

    def _stop_decoding(self) -> None:
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            decoding.stop()

    def _release(self) -> None:
        call, self._call = self._call, None
        slot, self._slot = self._slot, None
        if call is not None:
            call.release()
        if slot is not None:
            slot.release()

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        now = monotonic()
        count_failure(self._row, error, now - self._asked.arrived)
        if timing is None:
            times = Times(decode=(now - self._asked.arrived) * 1e3)
        else:
            times = self._times(timing, now - self._post_at)
        self._done(Outcome(b"", without_stack(error), times))

    def _times(self, timing: Timing, post: float) -> Times:
        return times_of(timing, self._offered - self._asked.arrived, post)


def told(error: BaseException | None, model: str) -> CarpoolError:
    """What a client may know of a thread's failure; what nobody expected is a bug, and is logged."""
    if isinstance(error, CarpoolError):
        return without_stack(error)
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("the server is stopping", reason="stopping")
    if isinstance(error, MemoryError):
        return Unavailable("there is not enough memory for this picture now", reason="no-memory")
    try:
        raise error or RuntimeError("nothing came back")
    except BaseException as unexpected:
        log.exception("picture-failed", model=model)
        without_stack(unexpected)
        return CarpoolError(f"the server failed on this picture: {type(unexpected).__name__}")


def document(
    model: PictureModel, outputs: Sequence[Tensor], number: int, geometry: Geometry, options: Options
) -> bytes:
    """The answer to one picture of a batch, as JSON."""
    entry = model.entry
    answer = model.answers.answer(model.of_one(outputs, number), geometry, options)
    return orjson.dumps({"model": entry.name, "version": entry.version, **answer})
