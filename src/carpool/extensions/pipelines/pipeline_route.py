"""Implements the route of a pipeline over pictures: the engine's part of requests that front ends carry.

A booking is a group of requests (`engine_link.LinkGroups`). However it ends, it is counted out of what is on
its way to the later steps, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TypeAlias

from carpool.core.job import GONE, INFINITY, OFFERED, READY, RUNNING, Reason
from carpool.core.refusal_words import replaced
from carpool.engine.routes.stepped_route import Binding, SteppedRoute
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import CarpoolError, Unsupported
from carpool.extensions.pipelines.picture_graph import PictureGraph
from carpool.extensions.pipelines.settings import MOST_CROPS, WITHOUT
from carpool.link.records import ProtocolError
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.logs import logger
from carpool.types import StepTiming, Timing

_log = logger("engine")

Done: TypeAlias = Callable[[Work, Outcome], None]


class PipelineRoute(SteppedRoute):
    """Implements `Route` for requests that no front end has taken apart, all of which it refuses."""

    def __init__(
        self,
        name: str,
        graph: PictureGraph,
        bind: Callable[[], Binding],
        answered: Callable[[int, Timing], None],
        rows: Sequence[Row],
        *,
        slo: float = INFINITY,
    ) -> None:
        """Makes a route whose `rows` count what becomes of each step."""
        super().__init__(name, bind, answered, slo=slo)
        self.graph = graph
        self.place = {number: place for place, number in enumerate(graph.order)}
        self.rows = rows
        self.under_way: set[OpenBooking] = set()
        self.waiting: dict[tuple[int, str], OpenBooking] = {}  # by step and live source: which came last

    def submit(self, works: Sequence[Work]) -> None:
        why = f"{self.name} is a pipeline over images: only the front ends of a server can run it"
        for work in works:
            work.state = GONE
            work.done(work, Outcome(error=Unsupported(why)))

    def opened(self, step: int, work: Work, now: float) -> OpenBooking | None:
        return OpenBooking(self, work, now) if step == self.graph.base else None

    def ready(self, work: Work) -> None:
        """Nothing is ever taken."""

    def cancel(self, work: Work) -> None:
        """Nothing is ever taken."""


class OpenBooking:
    """Represents one request. `left` has, by step, the images that its step has still to answer."""

    __slots__ = (
        *("_booking", "arrived", "binding", "deadline", "left", "live", "route"),
        *("failed", "replaced", "source", "timings", "works"),
    )

    def __init__(self, route: PipelineRoute, work: Work, now: float) -> None:
        """Raises what the gate says. With `if_late = "without"` the first step alone has to be in time."""
        route.check_open()
        graph = route.graph
        self._booking = route.let_in(work, now, alone=graph.settings.if_late == WITHOUT)
        self.route = route
        self.binding = route.binding
        self.arrived, self.deadline = work.arrived, work.deadline
        self.source, self.live = work.origin.source, work.options.latest
        self.works: dict[Work, int] = {}
        self.left: dict[int, int] = {}
        self.timings: dict[int, Timing] = {}
        self.replaced = False
        self.failed: CarpoolError | None = None  # what every later step of it hears
        route.under_way.add(self)
        try:
            self.reaches(graph.base, 1)
        except BaseException:
            self.over(now, answered=False)
            raise

    def reaches(self, step: int, images: int) -> None:
        route = self.route
        if not 0 <= step < len(route.graph.steps) or step in self.left or images > MOST_CROPS:
            raise ProtocolError(f"a booking that reaches step {step} with {images} images")
        self.left[step] = images
        self._booking.reaches(route.place[step], images)
        if route.graph.after[step] is not None:
            route.rows[step].observe(columns.FAN_OUT, images)

    def asks(self, step: int, work: Work, now: float) -> None:
        """This is one of its requests to that step: with the deadline of the whole, less what is left to the
        later steps."""
        route = self.route
        if self.failed is not None:
            raise self.failed
        if self.left.get(step, 0) < work.images:
            raise ProtocolError(f"{work.images} images of a step {step}, which has {self.left.get(step, 0)}")
        if self.replaced:
            raise replaced(route.name, self.source)
        work.deadline = self.deadline
        if step != route.graph.base:
            before = route.graph.after[step]
            ended = None if before is None else self._booking.ended.get(route.place[before])
            if ended is not None:
                route.rows[step].observe(columns.POST_SECONDS, now - ended)
            work.own_course().entered = now
            work.sent = None  # its age says nothing about new requests to the engine
            work.options = work.options._replace(latest=False)
            if self.live:
                self._take_place(step)
        if route.slo < INFINITY or step != route.graph.base:
            later = self._booking.plan(route.place[step], work, self.arrived, self.deadline, now)
            route.rows[step].set(columns.STEP_LATER, later)
        self.works[work] = step
        work.done = partial(self._over, work.done)

    def _take_place(self, step: int) -> None:
        """A newer frame of a live source, which is there by now, takes the place of an older one that waits
        for the same step, whole."""
        waiting, key = self.route.waiting, (step, self.source)
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
            outcome = Outcome(error=replaced(self.route.name, self.source), timing=outcome.timing)
        try:
            model = self.binding.models[self.route.place[step]]
            model.counters.asked(error, monotonic() - max(work.arrived, work.course.entered))
            self._count(step, work, outcome)
        except Exception:
            _log.exception("step-not-counted", model=self.route.name)
        done(work, outcome)

    def _count(self, step: int, work: Work, outcome: Outcome) -> None:
        row = self.route.rows[step]
        if self.replaced and outcome.error is not None:
            row.add(columns.SHED[Reason.REPLACED.value])
        elif outcome.error is None:
            timing = outcome.timing
            row.observe(columns.QUEUE_SECONDS, timing.queue)
            row.observe(columns.INFER_SECONDS, timing.infer)
            self.timings[step] = _longer(self.timings.get(step), timing)
            self.left[step] -= work.images
            if self.left[step] <= 0:
                self._booking.ends(self.route.place[step], monotonic())
        elif outcome.error.reason in columns.SHED:
            row.add(columns.SHED[outcome.error.reason])

    def over(self, now: float, *, answered: bool) -> None:
        """Notes that the front end has answered, or that the client has left."""
        route = self.route
        route.under_way.discard(self)
        for step in self.left if self.live else ():
            key = step, self.source
            if route.waiting.get(key) is self:
                del route.waiting[key]
        try:
            self._learn(now, answered=answered)
        except Exception:  # all is given back, and the front end waits for nothing
            _log.exception("pipeline-failed", model=route.name)

    def _learn(self, now: float, *, answered: bool) -> None:
        route = self.route
        whole = len(self.left) == len(route.graph.steps)
        if answered and whole and not any(self.left.values()):
            self._booking.done(now)  # all the way: only from those something can be learnt
        else:
            self._booking.gone()
        if answered:
            steps = route.graph.steps
            timings = ((steps[step].name, timing) for step, timing in sorted(self.timings.items()))
            route.answered(1, StepTiming.of(timings))
        else:
            for place in self._booking.ended:
                route.rows[route.graph.order[place]].add(columns.STEP_WASTED)


def _longer(before: Timing | None, timing: Timing) -> Timing:
    """Returns, of several requests at once, the one that took longest."""
    if before is None or before.queue + before.infer < timing.queue + timing.infer:
        return timing
    return before
