"""How many instances with how many threads each: on a CPU the two share the cores, and only trying tells.

They share them with front ends that read requests and decode pictures, too. Threads that work on one batch
wait for the slowest of them: whoever takes a core for a moment costs all of them that moment. So layouts are
tried while something else runs, as it will when they serve.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf
from threading import Event, Thread

from carpool.backends.backend import Backend
from carpool.clock import now as monotonic
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.numerals import numeral
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.types import Signature

_CLEARLY_FASTER = 0.8
_ABOUT_AS_MUCH = 0.9
_QUICK = 0.1  # of the promise
_SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one
_HARDLY = 1e-6
_TRIAL_LOAD_S = 2.0
_TRIAL = Effort(seconds=0.1, warm_up=0.3, total=0.5)
_PASSES = 2  # in turns: what else disturbs the machine for a while disturbs all of them
_CORES_FOR_ONE = 4  # that serve a model: about one more is kept busy by reading and decoding
_HASHED = bytes(1 << 20)  # long enough that other Python threads run meanwhile


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


@dataclass(slots=True)
class _Trial:
    layout: Layout
    backends: Sequence[Backend]
    rate: float = 0.0  # images per second that can be promised
    shortest: float = inf  # seconds of a single image


Open = Callable[[Layout], Sequence[Backend]]
Clock = Callable[[], float]
OtherWork = Callable[[int], AbstractContextManager[None]]


@contextmanager
def other_work(cores: int) -> Iterator[None]:
    """Meanwhile so many threads are busy with something that needs no memory to speak of."""
    over = Event()

    def work() -> None:
        while not over.is_set():
            hashlib.sha256(_HASHED)

    threads = [Thread(target=work, daemon=True) for _ in range(cores)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def even_layouts(cores: int) -> list[Layout]:
    """Every core busy with one thread: one instance with all of them, one for each core, and one between."""
    counts = {1, cores, cores // 2} if cores >= 4 else {1, cores}
    return [Layout(count, cores // count) for count in sorted(counts)]


def choose_by_capacity(
    cores: int,
    slo: float,
    signature: Signature,
    open_all: Open,
    now: Clock = monotonic,
    beside: OtherWork = other_work,
) -> Chosen:
    """The layout that can promise most; where several are about as good, one that answers fast enough."""
    trials: list[_Trial] = []
    chosen = Chosen(Layout(1, cores))

    def open_trial(layout: Layout) -> _Trial:
        trials.append(_Trial(layout, open_all(layout)))
        return trials[-1]

    try:
        began = now()
        alone = open_trial(Layout(1, 1))
        loading = now() - began
        _try(alone, slo, signature, now)
        if alone.shortest < _SHORT_S:
            chosen = Chosen(alone.layout, _too_short(alone.shortest), alone.backends)
            return chosen
        for layout in even_layouts(cores):
            own_weights = layout.threads > 1  # those with one thread share theirs
            if not own_weights or layout.instances * loading < _TRIAL_LOAD_S:
                open_trial(layout)
        with beside(-(-cores // _CORES_FOR_ONE)):
            for trial in _PASSES * trials[1:]:
                _try(trial, slo, signature, now)
        chosen = _best(trials[1:], slo)
        return chosen
    finally:
        for trial in trials:
            if trial.backends is not chosen.backends:
                _close(trial.backends)


def _best(trials: Sequence[_Trial], slo: float) -> Chosen:
    """Where a single image takes next to nothing of the promise, threads that need nobody's help are best."""
    most = max(trial.rate for trial in trials)
    good = [trial for trial in trials if trial.rate >= _ABOUT_AS_MUCH * most]
    quick = [trial for trial in good if trial.shortest <= _QUICK * slo]
    if quick:
        best = min(quick, key=lambda trial: trial.layout.threads)
    else:
        best = min(good, key=lambda trial: trial.shortest)
    others = [trial for trial in trials if trial is not best]
    against = ", ".join(f"{_rate(other.rate)} with {other.layout}" for other in others)
    shortest = numeral(best.shortest * 1e3)
    close = f"; about as many, and one image takes only {shortest} ms" if len(good) > 1 else ""
    promised = f"{_rate(best.rate)} within the promise beside other work"
    return Chosen(best.layout, f"{promised}, against {against}{close}", best.backends)


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


def _try(trial: _Trial, slo: float, signature: Signature, now: Clock) -> None:
    """Once more. What disturbs a try only makes it slower, so the better one counts."""
    measuring = Measuring(trial.backends, signature, _TRIAL, now=now)
    largest = max(1, signature.max_batch)
    alone = measuring.point(1)
    points = [(1, alone.seconds)]
    size = largest
    while size > 1 and size * alone.seconds > slo / 2:
        size //= 2
    if size > 1:  # the largest that surely fits: what batching brings shows there, and what other work takes
        points = [(size, measuring.point(size).seconds)]
    curve = BatchCurve.measured(points, largest)
    # One that can promise nothing comes last, and is compared with its like by what it does at all.
    rate = trial.layout.instances * (slo_capacity(curve, slo) or _HARDLY * curve.throughput(1))
    trial.rate = max(trial.rate, rate)
    trial.shortest = min(trial.shortest, alone.seconds)


def _close(opened: Sequence[Backend]) -> None:
    for backend in opened:
        backend.close()
