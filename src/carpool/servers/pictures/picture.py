"""One picture's way: a slot, a thread that decodes into it, the door, a thread that makes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import orjson

from carpool.engine.work import Timing
from carpool.errors import CarpoolError, DeadlineExceeded, Unavailable
from carpool.observe.columns import DECODE_SECONDS, POST_SECONDS, REQUEST_SECONDS
from carpool.observe.failures import count_failure
from carpool.observe.logs import logger
from carpool.servers.door import Answer, Call, Slot
from carpool.servers.pictures.models import PictureModel
from carpool.servers.pictures.service import PictureService, promised
from carpool.servers.server_timing import Times, times_of
from carpool.types import Tensor
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
    source: str


class Outcome(NamedTuple):
    """How a picture ended: an answer as bytes, or an error."""

    body: bytes
    error: CarpoolError | None
    times: Times


class Picture:
    """`done` gets the outcome, once and never within `start`, unless the client has left."""

    __slots__ = (
        *("_answer", "_asked", "_call", "_data", "_done", "_geometry", "_left", "_model", "_offered"),
        *("_post_at", "_row", "_service", "_slot", "_threaded"),
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
        self._geometry: Geometry
        self._answer: Answer
        self._offered = self._post_at = asked.arrived
        self._threaded = False  # a thread works for it, and may touch the slot or the outputs
        self._left = False

    def start(self) -> None:
        """Raises, counted, what stands in the way of beginning at all."""
        service, entry, asked = self._service, self._model.entry, self._asked
        try:
            refusal = service.workers.refuses(
                entry.name, promised(entry, asked.arrived, asked.deadline), monotonic()
            )
            if refusal is not None:
                raise refusal
            self._slot = service.door.slot(self._model.bytes)
            if self._slot is None:
                raise Unavailable("all memory for requests is in use", reason="no-slots")
        except CarpoolError as error:
            count_failure(self._row, error, monotonic() - asked.arrived)
            service.door.turned_away(entry, error, asked.arrived, source=asked.source)
            raise
        self._threaded = True
        service.workers.begin(self._prepare, self._prepared)

    # ── decoding ──

    def _prepare(self) -> tuple[Geometry, float]:
        """In a thread: the picture into the slot; the seconds that took."""
        asked, slot = self._asked, self._slot
        started = monotonic()
        if self._left:
            raise _LEFT
        if started > promised(self._model.entry, asked.arrived, asked.deadline):
            waited = (started - asked.arrived) * 1e3
            raise DeadlineExceeded(
                f"{self._model.entry.name}: the deadline passed after {waited:.0f} ms, "
                "before the picture's turn to be decoded"
            )
        assert slot is not None
        geometry = self._model.prepare(self._data, slot.view)
        return geometry, monotonic() - started

    def _prepared(self, prepared: tuple[Geometry, float] | None, error: BaseException | None) -> None:
        self._threaded = False
        if self._asked.drawn is None:
            self._data = b""
        slot = self._slot
        assert slot is not None
        if self._left or prepared is None:
            self._release()
            if not self._left:
                why, asked = told(error, self._model.entry.name), self._asked
                self._service.door.turned_away(self._model.entry, why, asked.arrived, source=asked.source)
                self._fail(why)
            return
        self._geometry, seconds = prepared
        self._row.observe(DECODE_SECONDS, seconds)
        self._offered = monotonic()
        try:
            self._infer(slot)
        except CarpoolError as refused:
            self._release()
            self._fail(refused)

    def _infer(self, slot: Slot) -> None:
        asked, model = self._asked, self._model
        self._call = self._service.door.infer(
            model.entry,
            model.head,
            slot,
            0,
            self._inferred,
            arrived=asked.arrived,
            deadline=asked.deadline,
            source=asked.source,
        )
        self._slot = None

    # ── the answer ──

    def _inferred(self, answer: Answer) -> None:
        self._answer = answer
        self._post_at = monotonic()
        if answer.error is not None:
            self._release()
            self._fail(answer.error, answer.timing)
            return
        self._threaded = True
        self._service.workers.finish(self._compose, self._composed)

    def _compose(self) -> tuple[bytes, float]:
        """In a thread: the answer as it leaves; the seconds that took."""
        started = monotonic()
        asked, model = self._asked, self._model
        outputs = model.of_one(self._answer.outputs, 0)
        if asked.drawn is None:
            body = document(model, self._answer.outputs, 0, self._geometry, asked.options)
        else:  # decoded again, in full: to keep the pixels while the model runs could take any memory
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
            model = self._model
            tracer.answered(model.entry, model.head, timing, asked.arrived, self._offered, now)
        self._done(Outcome(body, None, self._times(timing, now - self._post_at)))

    # ── the end ──

    def leave(self) -> None:
        """The client has gone: nothing more is done for it than has been begun."""
        if self._left:
            return
        self._left = True
        if not self._threaded:  # else the thread's slot or outputs are released when it is done
            call, self._call = self._call, None
            if call is not None:
                call.cancel()
            self._release()
        count_failure(self._row, _LEFT, monotonic() - self._asked.arrived)

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
        self._done(Outcome(b"", error, times))

    def _times(self, timing: Timing, post: float) -> Times:
        return times_of(timing, self._offered - self._asked.arrived, post)


def told(error: BaseException | None, model: str) -> CarpoolError:
    """What a client may know of a thread's failure; what nobody expected is a bug, and is logged."""
    if isinstance(error, CarpoolError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Unavailable("the server is stopping", reason="stopping")
    if isinstance(error, MemoryError):
        return Unavailable("there is not enough memory for this picture now", reason="no-memory")
    try:
        raise error or RuntimeError("nothing came back")
    except BaseException as unexpected:
        log.exception("picture-failed", model=model)
        return CarpoolError(f"the server failed on this picture: {type(unexpected).__name__}")


def document(
    model: PictureModel, outputs: Sequence[Tensor], number: int, geometry: Geometry, options: Options
) -> bytes:
    """The answer to one picture of a batch, as JSON."""
    entry = model.entry
    answer = model.answers.answer(model.of_one(outputs, number), geometry, options)
    return orjson.dumps({"model": entry.name, "version": entry.version, **answer})
