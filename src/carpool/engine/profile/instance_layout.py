"""How many instances with how many threads each: on a CPU the two share the cores, and only trying tells.

They share them with front ends that read requests and decode pictures, too. Threads that work on one batch
wait for the slowest of them: whoever takes a core for a moment costs all of them that moment. So layouts are
tried while something else runs, as it will when they serve; but not those of a slow model, whose few requests
a second keep no front end busy. A start waits for all this, so that nothing is tried for longer than it takes
to tell the layouts apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
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
_QUICK = 0.15  # of the promise
_FEW_CORES = 4  # where so few share their caches and memory, that costs each of them next to nothing
_SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one
_HARDLY = 1e-6
_TRIAL_LOAD_S = 2.0
_TRIAL = Effort(least_runs=2, most_runs=6, seconds=0.04, warm_up=0.05)
_PASSES = 2  # in turns: what else disturbs the machine for a while disturbs all of them
_FAR_APART = 1.5  # times the rate of the next best: another pass would find the same
_BATCH_S = 0.05  # batches that take longer show nothing that shorter ones do not
_SLOW_S = 0.25  # of a single image
_SURELY_LONG_S = 20 * _SHORT_S  # even for a first run
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

    @property
    def promises(self) -> bool:
        return self.rate >= _HARDLY * 1e3

    def __str__(self) -> str:
        """One that takes more than half of the promise can promise nothing here, and perhaps in service."""
        if self.promises:
            return f"{numeral(self.rate)} images/s"
        return f"one image in {numeral(self.shortest * 1e3)} ms"


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


@dataclass(frozen=True, slots=True)
class Trying:
    """What layouts are tried with. `turn` is held while times are taken, not while the model is opened."""

    signature: Signature
    open: Callable[[Layout], Sequence[Backend]]
    now: Callable[[], float] = monotonic
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    beside: Callable[[int], AbstractContextManager[None]] = other_work

    def measuring(self, opened: Sequence[Backend]) -> Measuring:
        return Measuring(opened, self.signature, _TRIAL, now=self.now)


def even_layouts(cores: int) -> list[Layout]:
    """Every core busy with one thread: one instance with all of them, one for each core, and one between."""
    counts = {1, cores, cores // 2} if cores >= 4 else {1, cores}
    return [Layout(count, cores // count) for count in sorted(counts)]


def choose_by_capacity(cores: int, slo: float, trying: Trying) -> Chosen:
    """The layout that can promise most; where several are about as good, one that answers fast enough."""
    trials: list[_Trial] = []
    chosen = Chosen(Layout(1, cores))

    def open_trial(layout: Layout) -> _Trial:
        trials.append(_Trial(layout, trying.open(layout)))
        return trials[-1]

    try:
        began = trying.now()
        alone = open_trial(Layout(1, 1))
        loading = trying.now() - began
        with trying.turn:
            shortest = _single(trying.measuring(alone.backends))
            if shortest < _SHORT_S:
                chosen = Chosen(alone.layout, _too_short(shortest), alone.backends)
                return chosen
            if cores <= _FEW_CORES and shortest <= _QUICK * slo:
                quick = open_trial(Layout(cores, 1))
                chosen = Chosen(quick.layout, _quick_enough(shortest), quick.backends)
                return chosen
            for layout in even_layouts(cores):
                own_weights = layout.threads > 1  # those with one thread share theirs
                if not own_weights or layout.instances * loading < _TRIAL_LOAD_S:
                    open_trial(layout)
            chosen = _compare(trials[1:], cores, slo, trying, slow=shortest > _SLOW_S)
            return chosen
    finally:
        for trial in trials:
            if trial.backends is not chosen.backends:
                _close(trial.backends)


def _compare(trials: Sequence[_Trial], cores: int, slo: float, trying: Trying, *, slow: bool) -> Chosen:
    with nullcontext() if slow else trying.beside(-(-cores // _CORES_FOR_ONE)):
        for _ in range(1 if slow else _PASSES):
            for trial in trials:
                _try(trial, slo, trying, once=slow)
            rates = sorted(trial.rate for trial in trials)
            if len(rates) == 1 or rates[-1] > _FAR_APART * rates[-2]:
                break
    return _best(trials, slo, "" if slow else " beside other work")


def _single(measuring: Measuring) -> float:
    """Seconds of one image. One run tells of most models that they are not short."""
    first = measuring.once(1)
    return first if first > _SURELY_LONG_S else measuring.point(1).seconds


def _best(trials: Sequence[_Trial], slo: float, how: str) -> Chosen:
    """Where a single image takes next to nothing of the promise, threads that need nobody's help are best."""
    most = max(trial.rate for trial in trials)
    good = [trial for trial in trials if trial.rate >= _ABOUT_AS_MUCH * most]
    quick = [trial for trial in good if trial.shortest <= _QUICK * slo]
    if quick:
        best = min(quick, key=lambda trial: trial.layout.threads)
    else:
        best = min(good, key=lambda trial: trial.shortest)
    others = [trial for trial in trials if trial is not best]
    against = ", ".join(f"{other} with {other.layout}" for other in others)
    shortest = numeral(best.shortest * 1e3)
    close = f"; about as many, and one image takes only {shortest} ms" if len(good) > 1 else ""
    within = " within the promise" if best.promises else ""
    return Chosen(best.layout, f"{best}{within}{how}, against {against}{close}", best.backends)


def _too_short(seconds: float) -> str:
    return f"one image takes {seconds * 1e3:.2g} ms, too short to be worth a second thread"


def _quick_enough(seconds: float) -> str:
    takes = f"one image takes {numeral(seconds * 1e3)} ms with one thread, little of the promise"
    return f"{takes}, and threads that wait for nobody carry most"


def choose_threads(instances: int, shared: int, trying: Trying) -> Chosen:
    """Several threads for one run only where they clearly shorten it: small models only pay for them."""
    times = []
    for threads in (1, shared):
        opened = trying.open(Layout(1, threads))
        try:
            with trying.turn:
                times.append(trying.measuring(opened).point(1).seconds)
        finally:
            _close(opened)
        if times[0] < _SHORT_S:
            return Chosen(Layout(instances, 1), _too_short(times[0]))
    alone, together = times
    threaded = f"one image takes {numeral(together * 1e3)} ms with {shared} threads"
    compared = f"{threaded}, {numeral(alone * 1e3)} ms with one"
    return Chosen(Layout(instances, shared if together < _CLEARLY_FASTER * alone else 1), compared)


def _try(trial: _Trial, slo: float, trying: Trying, *, once: bool) -> None:
    """Once more. What disturbs a try only makes it slower, so the better one counts."""
    measuring = trying.measuring(trial.backends)
    largest = max(1, trying.signature.max_batch)
    alone = measuring.once(1) if once else measuring.point(1).seconds
    points = [(1, alone)]
    size = largest
    while size > 1 and size * alone > min(slo / 2, _BATCH_S):
        size //= 2
    if size > 1:  # the largest that surely fits: what batching brings shows there, and what other work takes
        points = [(size, measuring.point(size).seconds)]
    curve = BatchCurve.measured(points, largest)
    # One that can promise nothing comes last, and is compared with its like by what it does at all.
    rate = trial.layout.instances * (slo_capacity(curve, slo) or _HARDLY * curve.throughput(1))
    trial.rate = max(trial.rate, rate)
    trial.shortest = min(trial.shortest, alone)


def _close(opened: Sequence[Backend]) -> None:
    for backend in opened:
        backend.close()
