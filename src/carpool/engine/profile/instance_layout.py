"""How many instances with how many threads each: on a CPU the two share the cores, and only trying tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from carpool.backends.backend import Backend
from carpool.clock import now as monotonic
from carpool.core.capacity import slo_capacity
from carpool.core.curve import BatchCurve
from carpool.core.numerals import numeral
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.types import Signature

_CLEARLY_FASTER = 0.8
_ABOUT_AS_MUCH = 0.9
_SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one
_HARDLY = 1e-6
_TRIAL_LOAD_S = 2.0
_TRIAL = Effort(seconds=0.1, warm_up=0.3, total=0.5)


@dataclass(frozen=True, slots=True)
class Layout:
    instances: int
    threads: int

    def __str__(self) -> str:
        instances = "1 instance" if self.instances == 1 else f"{self.instances} instances"
        return f"{instances} × {self.threads} {'thread' if self.threads == 1 else 'threads'}"


@dataclass(slots=True)
class Chosen:
    """`backends` were loaded for the trial; they are all there are, or none."""

    layout: Layout
    reason: str = ""
    backends: Sequence[Backend] = ()


@dataclass(frozen=True, slots=True)
class _Trial:
    layout: Layout
    backends: Sequence[Backend]
    rate: float  # images per second that can be promised
    shortest: float  # seconds of a single image
    loading: float  # seconds, for one instance


Open = Callable[[Layout], Sequence[Backend]]
Clock = Callable[[], float]


def even_layouts(cores: int) -> list[Layout]:
    """Every core busy with one thread: one instance with all of them, one for each core, and one between."""
    counts = {1, cores, cores // 2} if cores >= 4 else {1, cores}
    return [Layout(count, cores // count) for count in sorted(counts)]


def choose_by_capacity(
    cores: int, slo: float, signature: Signature, open_all: Open, now: Clock = monotonic
) -> Chosen:
    """The layout that can promise most; where several are about as good, the one with the fastest answer."""
    trials: list[_Trial] = []
    chosen = Chosen(Layout(1, cores))
    try:
        alone = _try(Layout(1, 1), slo, signature, open_all, now)
        trials.append(alone)
        if alone.shortest < _SHORT_S:
            chosen = Chosen(alone.layout, _too_short(alone.shortest), alone.backends)
            return chosen
        for layout in even_layouts(cores):
            own_weights = layout.threads > 1  # those with one thread share theirs
            if not own_weights or layout.instances * alone.loading < _TRIAL_LOAD_S:
                trials.append(_try(layout, slo, signature, open_all, now))
        chosen = _best(trials[1:])
        return chosen
    finally:
        for trial in trials:
            if trial.backends is not chosen.backends:
                _close(trial.backends)


def _best(trials: Sequence[_Trial]) -> Chosen:
    most = max(trial.rate for trial in trials)
    good = [trial for trial in trials if trial.rate >= _ABOUT_AS_MUCH * most]
    best = min(good, key=lambda trial: trial.shortest)
    others = [trial for trial in trials if trial is not best]
    against = ", ".join(f"{_rate(other.rate)} with {other.layout}" for other in others)
    shortest = numeral(best.shortest * 1e3)
    close = f"; about as many, but one image takes only {shortest} ms" if len(good) > 1 else ""
    return Chosen(
        best.layout, f"{_rate(best.rate)} within the promise, against {against}{close}", best.backends
    )


def _too_short(seconds: float) -> str:
    return f"one image takes {seconds * 1e3:.2g} ms, too short to be worth a second thread"


def _rate(rate: float) -> str:
    return f"{numeral(rate)} images/s" if rate >= _HARDLY * 1e3 else "nothing sure"


def choose_threads(
    instances: int, shared: int, signature: Signature, open_all: Open, now: Clock = monotonic
) -> Chosen:
    """Several threads for one run only where they clearly shorten it: small models only pay for them."""
    times = []
    for threads in (1, shared):
        opened = open_all(Layout(1, threads))
        try:
            times.append(Measuring(opened, signature, _TRIAL, now=now).point(1).seconds)
        finally:
            _close(opened)
        if times[0] < _SHORT_S:
            return Chosen(Layout(instances, 1), _too_short(times[0]))
    alone, together = times
    threaded = f"one image takes {numeral(together * 1e3)} ms with {shared} threads"
    compared = f"{threaded}, {numeral(alone * 1e3)} ms with one"
    return Chosen(Layout(instances, shared if together < _CLEARLY_FASTER * alone else 1), compared)


def _try(layout: Layout, slo: float, signature: Signature, open_all: Open, now: Clock) -> _Trial:
    began = now()
    opened = open_all(layout)
    loading = (now() - began) / layout.instances
    try:
        measuring = Measuring(opened, signature, _TRIAL, now=now)
        largest = max(1, signature.max_batch)
        alone = measuring.point(1)
        points = [(1, alone.seconds)]
        size = largest
        while size > 1 and size * alone.seconds > slo / 2:
            size //= 2
        if size > 1:  # the largest that surely fits: what batching brings shows there
            points.append((size, measuring.point(size).seconds))
    except BaseException:
        _close(opened)
        raise
    curve = BatchCurve.measured(points, largest)
    # One that can promise nothing comes last, and is compared with its like by what it does at all.
    rate = layout.instances * (slo_capacity(curve, slo) or _HARDLY * curve.throughput(1))
    return _Trial(layout, opened, rate, alone.seconds, loading)


def _close(opened: Sequence[Backend]) -> None:
    for backend in opened:
        backend.close()
