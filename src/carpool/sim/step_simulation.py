"""Pipelines under the virtual clock: every step has the real scheduler, and all of them one promise."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate, count
from math import ceil, inf
from random import Random
from typing import Literal, TypeAlias

from carpool.core.arbiter import Arbiter
from carpool.core.curve import BatchCurve, CurveError
from carpool.core.instance import Batch
from carpool.core.job import Job, Reason
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.remaining import Booking, Remaining, Step
from carpool.core.scheduler import Scheduler
from carpool.errors import InvalidInput
from carpool.sim.arrivals import Arrival, Ride

_WIDEST = 4.75  # times the mean: so many images may one request bring
_SIMULATED = frozenset({"simulated"})
_SURE = 1e-4  # of a rate: bisected no further


_FORM = re.compile(
    r"(?P<curve>[^@\s]+)\s*(?:@\s*(?P<images>[0-9]{1,6}(?:\.[0-9]{1,6})?))?"
    r"\s*(?:after\s+(?P<after>[0-9, ]+))?"
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Describes one step: how long its batches take, how many images each request brings to it on average,
    and the numbers of the steps that it comes after. Steps that come after none begin when the request
    arrives."""

    curve: BatchCurve
    images: float = 1.0
    after: tuple[int, ...] = ()
    slo: float = 0.0  # of its model, where that is not the one of the whole


def read_steps(texts: Sequence[str], max_batch: int | None = None) -> tuple[StepPlan, ...]:
    """Each like `4+1`, `3+0.22@4.2` (so many images of each request) or `2+0.5 after 1` (the first is 1);
    without the last, a step comes after the one before it."""
    steps: list[StepPlan] = []
    for number, text in enumerate(texts, start=1):
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise InvalidInput(f"{text!r} must be like 4+1, 3+0.22@4.2 or '2+0.5 after 1'")
        after = [number - 1] if number > 1 else []
        if found["after"]:
            after = [int(part) for part in found["after"].replace(" ", "").split(",") if part]
        if not all(1 <= before < number for before in after):
            raise InvalidInput(f"{text!r} is step {number}: it can come only after steps before it")
        images = float(found["images"] or 1)
        if not 0 < images <= 1000:
            raise InvalidInput(f"{text!r}: a request brings above 0 and at most 1000 images on average")
        try:
            curve = BatchCurve.parse(found["curve"], max_batch)
        except CurveError as error:
            raise InvalidInput(str(error)) from None
        steps.append(StepPlan(curve, images, tuple(before - 1 for before in sorted(set(after)))))
    return tuple(steps)


def is_cascade(steps: Sequence[StepPlan]) -> bool:
    """Returns whether it is a cheap model, and a big one that gets some of its requests."""
    return [step.after for step in steps] == [(), (0,)] and steps[0].images == 1.0 and steps[1].images <= 1.0


class FanOut:
    """Draws how many images a request brings: always one, or spread like the objects in pictures, many with
    few and few with many, from none to some five times the mean. In a cascade, none or one."""

    def __init__(self, mean: float, *, at_most_one: bool = False) -> None:
        self._sums: list[float] = []
        if at_most_one:
            self._sums = [1.0 - mean, 1.0]
        elif mean != 1.0:
            most = max(1, ceil(_WIDEST * mean))
            low, high = 0.0, 4.0
            while high - low > _SURE / most:  # the ratio from one number to the next that gives this mean
                ratio = (low + high) / 2
                shares = [ratio**n for n in range(most + 1)]
                found = sum(n * share for n, share in enumerate(shares)) / sum(shares)
                low, high = (ratio, high) if found < mean else (low, ratio)
            self._sums = list(accumulate(low**n for n in range(most + 1)))

    def draw(self, random: Random) -> int:
        return bisect(self._sums, random.random() * self._sums[-1]) if self._sums else 1


@dataclass(slots=True)
class StepRide(Ride):
    """Describes a simulated request, and where it is on its way through the steps."""

    images: tuple[int, ...] = ()  # that each step gets
    booking: Booking | None = None
    jobs: dict[Job, int] = field(default_factory=dict)  # that are not over, each with its step
    over: set[int] = field(default_factory=set)  # steps
    probe: bool = False  # let in although it was not expected to be within the SLO
    degraded: bool = False  # answered by the cheap model of a cascade, for want of time


@dataclass(slots=True)
class StepRun:
    """Holds everything a simulated run produced."""

    rides: list[StepRide] = field(default_factory=list)
    batches: list[tuple[Batch, float, int]] = field(default_factory=list)  # batch, end, step
    seconds: float = 0.0


UnderLoad: TypeAlias = Literal["quick", "refuse"]
"""What a cascade does with a request that its big model has no time for."""

Seconds = Callable[[int, int, int, float, Random], float]
"""What a batch really takes: (step, images, instance, now, random)."""


class StepSimulation:
    """Feeds arrivals to the schedulers of all steps and plays the devices."""

    def __init__(
        self,
        steps: Sequence[StepPlan],
        settings: Promise | FixedBatching,
        seconds: Seconds,
        *,
        shared: bool = False,
        instances: int = 1,
        seed: int = 0,
        outside: float = 0.0,
        under_load: UnderLoad | None = None,
    ) -> None:
        """With `under_load` it is a cascade: the second step is the big model."""
        self._steps = steps
        self._seconds = seconds
        self._outside = outside
        self._random = Random(seed)
        if under_load is not None and not is_cascade(steps):
            raise ValueError("a cascade has two steps, and the second gets some of the requests of the first")
        cascade = under_load is not None
        self._fan_outs = [FanOut(step.images, at_most_one=cascade and bool(step.after)) for step in steps]
        self._quick = under_load == "quick"
        self._promise = isinstance(settings, Promise)
        self._slo = settings.slo if isinstance(settings, Promise) else inf
        self.schedulers = [Scheduler(step.curve, _settings(settings, step), instances) for step in steps]
        listed = zip(self.schedulers, steps, strict=True)
        self.remaining = Remaining(
            [Step(core, step.after, step.images, self._quick and bool(step.after)) for core, step in listed]
        )
        if shared:
            arbiter = Arbiter()
            for number, core in enumerate(self.schedulers):
                turn = arbiter.join(core, list(core.instances))
                if self._promise:
                    turn.step_of, turn.step = _SIMULATED, number
                if self._quick and steps[number].after:
                    turn.big_of = _SIMULATED
                elif self._quick:
                    turn.cheap_of = _SIMULATED
        self._running: list[tuple[float, int, int, Batch]] = []
        self._numbers = count()
        self.run = StepRun()

    def play(self, arrivals: Sequence[Arrival]) -> StepRun:
        look_again = inf
        for arrival in arrivals:
            look_again = self._advance(arrival.at, look_again)
            self._enter(arrival)
            look_again = self._act(arrival.at)
        self.run.seconds = arrivals[-1].at if arrivals else 0.0
        self._advance(inf, look_again)
        return self.run

    def _advance(self, until: float, look_again: float) -> float:
        """Play whatever the devices and the schedulers do before this time."""
        while True:
            ends = self._running[0][0] if self._running else inf
            at = min(ends, look_again)
            if at >= until or at == inf:
                return look_again
            if ends <= at:
                _, _, step, batch = heappop(self._running)
                self._finish(step, batch, at)
            look_again = self._act(at)

    def _act(self, now: float) -> float:
        """Runs until no scheduler has anything to do: what one begins changes what others on its device
        may."""
        look_again = inf
        acted = True
        while acted:
            acted, look_again = False, inf
            for step in reversed(range(len(self._steps))):
                decision = self.schedulers[step].decide(now)
                for gone in decision.given_up:
                    self._no_time(gone.job.payload, step, now)
                    gone.job.payload.replaced = gone.reason is Reason.REPLACED
                if decision.batch is None:
                    look_again = min(look_again, decision.look_again or inf)
                    continue
                batch, acted = decision.batch, True
                takes = self._seconds(step, batch.images, batch.instance.index, now, self._random)
                heappush(self._running, (now + takes, next(self._numbers), step, batch))
        return look_again

    # ---- one request --------------------------------------------------------------------------------------

    def _enter(self, arrival: Arrival) -> None:
        now = arrival.at
        images = [fan_out.draw(self._random) for fan_out in self._fan_outs]
        first = [number for number, step in enumerate(self._steps) if not step.after]
        for number in first:
            images[number] *= arrival.images
        ride = StepRide(arrival, images=tuple(images))
        self.run.rides.append(ride)
        if self._promise and any(self._refused_at_gate(ride, number, now) for number in first):
            ride.refused = True
            return
        deadline = arrival.at + self._slo - self._outside
        promise = self._slo if self._promise else 0.0
        ride.booking = self.remaining.enters(promise, deadline, probe=ride.probe)
        for number in first:
            if not ride.given_up:
                self._offer(ride, number, now)
        if ride.given_up:
            ride.refused = True

    def _refused_at_gate(self, ride: StepRide, step: int, now: float) -> bool:
        if not ride.images[step]:
            return False
        job = self._job(ride, ride.images[step])
        refused = self.remaining.refuses(step, job, self._slo, now) is not None
        ride.probe = ride.probe or job.course.probe
        return refused

    def _job(self, ride: StepRide, images: int) -> Job:
        arrival = ride.arrival
        return Job(
            arrival.at,
            images=images,
            source=arrival.source,
            priority=arrival.priority,
            outside=self._outside,
            payload=ride,
        )

    def _offer(self, ride: StepRide, step: int, now: float) -> None:
        """Offers a request as one job, or as several where no batch holds them all. With none it is over."""
        assert ride.booking is not None
        core, left = self.schedulers[step], ride.images[step]
        ride.booking.reaches(step, left)
        most = core.policy.max_images
        sizes = [most] * (left // most) + ([left % most] if left % most else [])
        jobs = [self._job(ride, size) for size in sizes]
        ride.jobs |= dict.fromkeys(jobs, step)
        for job in jobs:
            if self._promise:
                ride.booking.plan(step, job, job.arrived, job.deadline, now)
            if not ride.given_up and core.offer(job, now) is not None:
                self._no_time(ride, step, now)
        if not sizes:
            self._step_over(ride, step, now)

    def _finish(self, step: int, batch: Batch, now: float) -> None:
        self.run.batches.append((batch, now, step))
        for job in self.schedulers[step].finished(batch, now, now - batch.started):
            ride: StepRide = job.payload
            ride.jobs.pop(job, None)
            if ride.booking is not None and step not in ride.jobs.values():
                self._step_over(ride, step, now)

    def _step_over(self, ride: StepRide, step: int, now: float) -> None:
        assert ride.booking is not None
        ride.over.add(step)
        ride.booking.ends(step, now)
        if len(ride.over) == len(self._steps):
            self._end(ride, now, given_up=False)
            return
        for number, following in enumerate(self._steps):
            if step in following.after and ride.over.issuperset(following.after) and not ride.given_up:
                self._offer(ride, number, now)

    def _no_time(self, ride: StepRide, step: int, now: float) -> None:
        """Ends a request with a cascade's cheap answer, if that will do; else gives it up."""
        ride.degraded = self._quick and bool(self._steps[step].after)
        self._end(ride, now, given_up=not ride.degraded)

    def _end(self, ride: StepRide, now: float, *, given_up: bool) -> None:
        if ride.booking is None:
            return
        booking, ride.booking = ride.booking, None
        if given_up:
            ride.given_up = True
            booking.gone()
            for job, step in ride.jobs.items():  # what others of its steps have of it is of no use any more
                self.schedulers[step].cancel(job, now)
        else:
            ride.latency = now - ride.arrival.at + self._outside
            booking.done(now)
        ride.jobs.clear()


def _settings(settings: Promise | FixedBatching, step: StepPlan) -> Promise | FixedBatching:
    if isinstance(settings, Promise):
        return Promise(step.slo or settings.slo, step.curve.max_batch, settings.max_queue)
    most = 1 if settings.max_batch == 1 else step.curve.max_batch
    return replace(settings, max_batch=most, preferred=tuple(n for n in settings.preferred if n <= most))


# ---- closed forms: what the steps can carry within one promise ---------------------------------------------


def alone_through(steps: Sequence[StepPlan]) -> float:
    """Returns the seconds that a request takes with no other in its way."""
    return _way(steps, [min(max(1, round(step.images)), step.curve.max_batch) for step in steps], 1.0)


def capacity(steps: Sequence[StepPlan], slo: float, instances: int = 1, *, shared: bool = False) -> float:
    """Returns requests per second that can be promised: at each step one may have to wait for a batch of the
    size in use before it runs in its own."""
    return _most(steps, instances, shared, lambda _, sizes: _way(steps, sizes, 2.0) <= slo)


def bound(
    steps: Sequence[StepPlan], slo: float, rate: float, instances: int = 1, *, shared: bool = False
) -> float:
    """Returns the most requests per second that can be answered in time, as `fluid_bound` has it for one
    model: each batch takes time to gather, the first at the rate that is offered, the later ones at the rate
    that comes through. On one device the later ones run as soon as their images are there, and need not
    gather. Like that one it is an estimate: a scheduler that knows the future can beat it slightly."""

    def in_time(carried: float, sizes: Sequence[int]) -> bool:
        return _way(steps, sizes, 1.0, (rate, inf if shared else carried * instances)) <= slo

    return min(rate, _most(steps, instances, shared, in_time))


def _way(
    steps: Sequence[StepPlan], sizes: Sequence[int], times: float, rates: tuple[float, float] = (inf, inf)
) -> float:
    """Returns seconds of the longest way through all steps in batches of these sizes, each so many times.
    Requests come at these rates to the first steps and to the later ones: batches have to gather."""
    ends: list[float] = []
    for step, size in zip(steps, sizes, strict=True):
        begins = max((ends[before] for before in step.after), default=0.0)
        gathers = size / step.images / rates[1 if step.after else 0]
        ends.append(begins + gathers + times * step.curve.times[size])
    return max(ends)


def _most(
    steps: Sequence[StepPlan],
    instances: int,
    shared: bool,
    in_time: Callable[[float, Sequence[int]], bool],
) -> float:
    """Returns the highest rate that batches of some sizes carry, and that is in time with them."""
    if shared:
        return instances * max((rate for rate, sizes in _shared(steps) if in_time(rate, sizes)), default=0.0)
    low, high = 0.0, min(max(_rates(step)) for step in steps)
    rate = high * (1 - 1e-12)
    while high - low > _SURE * high:
        sizes = _smallest(steps, rate)
        low, high = (rate, high) if sizes is not None and in_time(rate, sizes) else (low, rate)
        rate = (low + high) / 2
    return instances * low


def _rates(step: StepPlan) -> list[float]:
    """Requests per second in batches of every size from 1 on."""
    return [step.curve.throughput(size) / step.images for size in range(1, step.curve.max_batch + 1)]


def _smallest(steps: Sequence[StepPlan], rate: float) -> list[int] | None:
    sizes = []
    for step in steps:
        enough = (n for n, carried in enumerate(_rates(step), start=1) if carried >= rate)
        found = next(enough, None)
        if found is None:
            return None
        sizes.append(found)
    return sizes


def _shared(steps: Sequence[StepPlan]) -> list[tuple[float, list[int]]]:
    """Returns what one device carries that runs all steps, in batches from the smallest to the largest: at
    each price of time, those that cost least."""
    found = []
    for number in range(200):
        price = 10 ** (6 - number / 20)  # of a second that a batch takes, in device time per request
        sizes = [
            min(
                range(1, step.curve.max_batch + 1),
                key=lambda size, step=step: step.curve.times[size] * (step.images / size + price),  # type: ignore[misc]
            )
            for step in steps
        ]
        takes = sum(
            step.images * step.curve.times[size] / size for step, size in zip(steps, sizes, strict=True)
        )
        found.append((1 / takes, sizes))
    return found
