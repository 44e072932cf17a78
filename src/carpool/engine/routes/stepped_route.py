"""Implements what the routes of ensembles and of pipelines have in common: the models of the steps as they
are now, one SLO for all of them, and a gate that lets a request into all steps or into none.

What goes from step to step differs, and with it the place where a request runs: tensors stay in the engine
(ensemble_route.py), pictures in the front end that decoded them (pipeline_route.py keeps their bookings).
DECISIONS.md says why these are two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from carpool.core.job import INFINITY, Job
from carpool.core.remaining import Booking, Remaining, Step
from carpool.engine.run.batch import Route, Work
from carpool.errors import Unavailable
from carpool.observe.statistics import VersionCounters
from carpool.types import Signature, Timing


class ServedStep(Protocol):
    """Represents a served version, as far as what it is a step of has to know it."""

    name: str
    signature: Signature
    labels: Mapping[str, Sequence[str]]
    counters: VersionCounters

    @property
    def hosted(self) -> bool: ...

    @property
    def promises(self) -> bool: ...

    @property
    def runs_nothing(self) -> bool: ...

    @property
    def able(self) -> bool: ...

    @property
    def why_not(self) -> str: ...

    def answers_digest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GraphStep:
    """`number` is its place in the settings, `after` are the numbers of the steps whose tensors it reads."""

    number: int
    model: str
    version: int
    inputs: tuple[tuple[str, str], ...]  # the model's name, the ensemble's
    outputs: tuple[tuple[str, str], ...]
    after: tuple[int, ...]


class BoundStep(NamedTuple):
    """Describes a step of an ensemble, and the model that runs it now. `first` is its place among all models
    that run something, of which a nested ensemble has several."""

    step: GraphStep
    key: int
    served: ServedStep
    route: Route
    first: int


class Binding(NamedTuple):
    """Describes the models as they are now: those that run something, in an order in which each comes after
    those that it waits for, and with them the ensembles between."""

    leaves: tuple[Step, ...]
    models: tuple[ServedStep, ...]
    steps: tuple[BoundStep, ...] = ()  # of an ensemble


class SteppedRun(Protocol):
    """Represents a request that is under way through the models of a binding."""

    binding: Binding


class Stepped(Protocol):
    """Defines the route of what is made of several models: a `SteppedRoute` with requests."""

    slo: float
    closed: str

    @property
    def binding(self) -> Binding: ...

    @property
    def under_way(self) -> Collection[SteppedRun]: ...

    def rebind(self) -> None: ...

    def submit(self, works: Sequence[Work]) -> None: ...

    def ready(self, work: Work) -> None: ...

    def cancel(self, work: Work) -> None: ...


class SteppedRoute:
    """Implements the part of `Route` that is about all steps together. Used in the loop's thread."""

    def __init__(
        self,
        name: str,
        bind: Callable[[], Binding],
        answered: Callable[[int, Timing], None],
        *,
        slo: float = INFINITY,
    ) -> None:
        """`bind` finds the models as they are now, and raises where one is missing. `answered` gets the
        images and the times of every request that was answered."""
        self.name = name
        self.slo = slo
        self.answered = answered
        self.closed = ""  # why no request is let in any more
        self._bind = bind
        self._binding: Binding | None = None
        self._remaining = Remaining(())

    def rebind(self) -> None:
        """A model was loaded, or has gone."""
        self._binding = None

    @property
    def binding(self) -> Binding:
        """Raises what is missing."""
        if self._binding is None:
            self._binding = binding = self._bind()
            known, leaves = self._remaining, binding.leaves
            if [one.scheduler for one in known.steps] != [one.scheduler for one in leaves]:
                self._remaining = Remaining(leaves)
        return self._binding

    @property
    def remaining(self) -> Remaining:
        """Returns what is known of the way of requests through these models."""
        _ = self.binding
        return self._remaining

    def check_open(self) -> None:
        if self.closed:
            raise Unavailable(self.closed, reason="unloading")

    def let_in(self, work: Work, now: float, *, alone: bool = False) -> Booking:
        """Raises what the gate says to a request: all steps together have to be within the SLO, with `alone`
        the first. From here on its deadline is that of the whole."""
        remaining, probe = self.remaining, False
        work.deadline = min(work.deadline, work.arrived + self.slo)
        if self.slo == INFINITY:
            return remaining.enters()
        for number, step in enumerate(remaining.steps):
            if step.after:
                continue
            images = min(work.images, step.scheduler.policy.max_images)
            job = Job(
                work.arrived,
                work.deadline,
                images,
                None,
                work.options.priority,
                work.origin.source,
                outside=work.outside,
            )
            refusal = remaining.refuses(number, job, self.slo, now, alone=alone)
            if refusal is not None:
                from carpool.core.refusal_words import turned_away

                raise turned_away(self.name, work, refusal, fixed=False)
            probe = probe or job.course.probe
        return remaining.enters(self.slo, work.deadline, probe=probe)
