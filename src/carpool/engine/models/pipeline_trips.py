"""Requests on their way through pipelines, as one front end tells of them: the engine's end.

A front end says of each request which trip and which step it belongs to (`STEP`), and between the steps where
the trip is (`TRIP`). A trip begins with its first step, if the gate lets all of it in. It ends when the front
end says so or when its link is gone; whichever it is, it is counted out of what is on its way to the later
steps, once. What is said of a trip that is over, or was refused, is not heard; what can only be a lie costs
the link, as everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from carpool.config.pipeline_settings import MOST_CROPS
from carpool.core.job import OFFERED, READY, RUNNING, Reason
from carpool.core.refusal_words import replaced
from carpool.core.remaining import Trip
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import CarpoolError, Unavailable
from carpool.link.records import (
    ANSWERED,
    GIVEN_UP,
    REACHES,
    STEP_PART,
    TRIP_NEWS,
    ProtocolError,
)
from carpool.observe import columns
from carpool.observe.logs import logger
from carpool.types import StepTiming, Timing

if TYPE_CHECKING:
    from carpool.engine.models.pipeline_model import Pipeline

_log = logger("engine")

Done: TypeAlias = Callable[[Work, Outcome], None]


class OpenTrip:
    """One request. `left` has, by step, the images that its step has still to answer."""

    __slots__ = (
        *("_trip", "arrived", "binding", "deadline", "ended", "left", "live", "pipeline"),
        *("failed", "replaced", "source", "timings", "works"),
    )

    def __init__(self, pipeline: Pipeline, work: Work, now: float) -> None:
        """Raises what the gate says."""
        self._trip: Trip = pipeline.lets_in(work, now)
        self.pipeline = pipeline
        self.binding = pipeline.binding
        self.arrived, self.deadline = work.arrived, work.deadline
        self.source, self.live = work.source, work.latest
        self.works: dict[Work, int] = {}
        self.left: dict[int, int] = {}
        self.ended: dict[int, float] = {}  # by step: when
        self.timings: dict[int, Timing] = {}
        self.replaced = False
        self.failed: CarpoolError | None = None  # what every later step of it hears
        pipeline.open.add(self)

    def reaches(self, step: int, images: int) -> None:
        pipeline = self.pipeline
        if not 0 <= step < len(pipeline.settings.steps) or step in self.left or images > MOST_CROPS:
            raise ProtocolError(f"a trip that reaches step {step} with {images} images")
        self.left[step] = images
        self._trip.reaches(pipeline.place[step], images)
        if pipeline.graph.after[step] is not None:
            pipeline.rows[step].observe(columns.FAN_OUT, images)

    def asks(self, step: int, work: Work, now: float) -> None:
        """This is one of its requests to that step: with the deadline of the whole, less what is left to the
        later steps."""
        pipeline = self.pipeline
        if self.failed is not None:
            raise self.failed
        if self.left.get(step, 0) < work.images:
            raise ProtocolError(f"{work.images} images of a trip in step {step}, of {self.left.get(step, 0)}")
        if self.replaced:
            raise replaced(pipeline.name, self.source)
        work.deadline = self.deadline
        if step != pipeline.graph.base:
            before = pipeline.graph.after[step]
            if before is not None and before in self.ended:
                pipeline.rows[step].observe(columns.POST_SECONDS, now - self.ended[before])
            work.entered = now
            work.sent = None  # its age says nothing about who comes to the door
            work.latest = False
            if self.live:
                self._take_place(step)
        if pipeline.promises or step != pipeline.graph.base:
            later = self._trip.plan(pipeline.place[step], work, self.arrived, self.deadline, now)
            pipeline.show_later(step, later)
        self.works[work] = step
        work.done = partial(self._over, work.done)

    def _take_place(self, step: int) -> None:
        """A newer frame of a live source, which is there by now, takes the place of an older one that waits
        for the same step, whole."""
        waiting, key = self.pipeline.waiting, (step, self.source)
        older = waiting.get(key)
        if older is not None and older is not self and older.arrived <= self.arrived:
            older.gives_way(step)
        waiting[key] = self

    def gives_way(self, step: int) -> None:
        works = [work for work, at in self.works.items() if at == step]
        if not works or any(work.state >= RUNNING for work in works):
            return  # what runs is answered
        self.replaced = True
        for work in works:
            if work.state in (OFFERED, READY) and work.route is not None:
                work.route.cancel(work)

    def _over(self, done: Done, work: Work, outcome: Outcome) -> None:
        """One of its requests is over."""
        step = self.works.pop(work)
        error = outcome.error
        if self.replaced and error is not None:
            outcome = Outcome(error=replaced(self.pipeline.name, self.source), timing=outcome.timing)
        try:
            model = self.binding.models[self.pipeline.place[step]]
            model.count_asked(error, monotonic() - work.entered)
            self._count(step, work, outcome)
        except Exception:
            _log.exception("step-not-counted", model=self.pipeline.name)
        done(work, outcome)

    def _count(self, step: int, work: Work, outcome: Outcome) -> None:
        row = self.pipeline.rows[step]
        if self.replaced and outcome.error is not None:
            row.add(columns.SHED[Reason.REPLACED.value])
        elif outcome.error is None:
            timing = outcome.timing
            row.observe(columns.QUEUE_SECONDS, timing.queue)
            row.observe(columns.INFER_SECONDS, timing.infer)
            self.timings[step] = _longer(self.timings.get(step), timing)
            self.left[step] -= work.images
            if self.left[step] <= 0:
                self.ended[step] = now = monotonic()
                self._trip.ends(self.pipeline.place[step], now)
        elif outcome.error.reason in columns.SHED:
            row.add(columns.SHED[outcome.error.reason])

    def over(self, now: float, *, answered: bool) -> None:
        """The front end has answered, or nobody wants it any more."""
        pipeline = self.pipeline
        pipeline.open.discard(self)
        for step in self.left if self.live else ():
            key = step, self.source
            if pipeline.waiting.get(key) is self:
                del pipeline.waiting[key]
        try:
            self._learn(now, answered=answered)
        except Exception as bug:  # all is given back, and the front end waits for nothing
            _failed(pipeline.name, bug)

    def _learn(self, now: float, *, answered: bool) -> None:
        pipeline = self.pipeline
        whole = len(self.left) == len(pipeline.settings.steps)
        if answered and whole and not any(self.left.values()):
            self._trip.done(now)  # all the way: only from those something can be learnt
        else:
            self._trip.gone()
        if answered:
            names = [step.name for step in pipeline.settings.steps]
            steps = tuple((names[step], timing) for step, timing in sorted(self.timings.items()))
            pipeline.answered(summed(steps))
        else:
            for step in self.ended:
                pipeline.rows[step].add(columns.STEP_WASTED)


def _longer(before: Timing | None, timing: Timing) -> Timing:
    """Of several requests at once, the one that took longest."""
    if before is None or before.queue + before.infer < timing.queue + timing.infer:
        return timing
    return before


def summed(steps: tuple[tuple[str, Timing], ...]) -> StepTiming:
    each = [timing for _, timing in steps]
    return StepTiming(
        sum(timing.queue for timing in each),
        sum(timing.input for timing in each),
        sum(timing.infer for timing in each),
        sum(timing.output for timing in each),
        max((timing.batch for timing in each), default=0),
        steps,
    )


def _failed(pipeline: str, bug: Exception) -> CarpoolError:
    """What is said of a fault of ours: it costs one request, not the link."""
    _log.exception("pipeline-failed", model=pipeline)
    return CarpoolError(f"the engine failed on this request of {pipeline}: {type(bug).__name__}")


class LinkTrips:
    """Those of one front end."""

    def __init__(self, pipeline: Callable[[int], Pipeline | None], most: int) -> None:
        self._pipeline = pipeline
        self._most = most
        self._open: dict[int, OpenTrip] = {}

    def join(self, work: Work, payload: bytes, now: float) -> bytes:
        """A request that is a step; returns the rest of what it says. Raises the refusal of all of it, or of
        this step."""
        if len(payload) < STEP_PART.size:
            raise ProtocolError("a step that does not say of what")
        number, key, step = STEP_PART.unpack_from(payload)
        trip = self._open.get(number)
        if trip is None:
            pipeline = self._pipeline(key)
            if pipeline is None or step != pipeline.graph.base:
                raise Unavailable("the pipeline was unloaded meanwhile", reason="unloading")
            if len(self._open) >= self._most:
                raise ProtocolError(f"more than {self._most} trips")
            trip = self._begin(number, pipeline, work, now)
        try:
            trip.asks(step, work, now)
        except (CarpoolError, ProtocolError):
            raise
        except Exception as bug:
            raise _failed(trip.pipeline.name, bug) from None
        return payload[STEP_PART.size :]

    def _begin(self, number: int, pipeline: Pipeline, work: Work, now: float) -> OpenTrip:
        try:
            trip = OpenTrip(pipeline, work, now)
        except CarpoolError:
            raise
        except Exception as bug:
            raise _failed(pipeline.name, bug) from None
        try:
            trip.reaches(pipeline.graph.base, 1)
        except Exception as bug:
            trip.over(now, answered=False)
            raise _failed(pipeline.name, bug) from None
        self._open[number] = trip
        return trip

    def hear(self, number: int, payload: bytes, now: float) -> None:
        try:
            what, step, images = TRIP_NEWS.unpack(payload)
        except struct.error:
            raise ProtocolError("news of a trip that are none") from None
        trip = self._open.get(number)
        if trip is None:
            return
        if what == REACHES:
            try:
                trip.reaches(step, images)
            except ProtocolError:
                raise
            except Exception as bug:
                trip.failed = _failed(trip.pipeline.name, bug)
        elif what in (ANSWERED, GIVEN_UP):
            del self._open[number]
            trip.over(now, answered=what == ANSWERED)
        else:
            raise ProtocolError(f"a trip that does {what}")

    def end(self) -> None:
        """The front end is gone; its requests are cancelled by who has them."""
        trips, self._open = self._open, {}
        now = monotonic()
        for trip in trips.values():
            trip.over(now, answered=False)
