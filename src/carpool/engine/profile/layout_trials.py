"""Tries layouts of instances and threads on the CPU, which share its cores, and chooses the one that can
promise most.

They share them with front ends that read requests and decode pictures, too. Threads that work on one batch
wait for the slowest of them: a process that takes a core for a moment costs all of them that moment. So
layouts are tried while something else runs, as it will when they serve; but not those of a slow model, whose
few requests a second keep no front end busy. A start waits for all this, so that nothing is tried for longer
than it takes to distinguish the layouts.

Every start should come to the same choice. What disturbs a machine only makes runs longer: the least
disturbed ones are compared, and a layout is tried until it did as well twice. One that is only as much better
as the passes differ, or as others may have taken, is not better: then the layout of an earlier start stays,
or the simplest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf

from carpool.backends.backend import Backend
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.numerals import numeral
from carpool.engine.profile.contention import contention
from carpool.engine.profile.layouts import SHORT_S, Chosen, Layout, Trying, close_all, too_short
from carpool.engine.profile.measuring import Measuring, Watches

_ABOUT_AS_MUCH = 0.9
_QUICK = 0.15  # of the promise
_FEW_CORES = 4  # where so few share their caches and memory, that costs each of them next to nothing
_HARDLY = 1e-6
_TRIAL_LOAD_S = 2.0
_PASSES, _SLOW_PASSES = 8, 4  # at most, in turns: what else disturbs a machine for a while disturbs all
_SAME = 1.05  # times: so near to the best, another pass has found the same
_FEW_RUNS = 0.15  # so much more doubt where each pass is a single run
_BATCH_S = 0.05  # batches that take longer show nothing that shorter ones do not
_SLOW_S = 0.25  # of a single image
_SURELY_LONG_S = 20 * SHORT_S  # even for a first run
_COLD = 6.0  # times as long as the next, at most: a first run that others disturb, too
_CORES_FOR_ONE = 4  # that serve a model: about one more is kept busy by reading and decoding


@dataclass(slots=True)
class _Trial:
    layout: Layout
    backends: Sequence[Backend]
    rates: list[float] = field(default_factory=list)  # of each pass
    shortest: float = inf  # seconds of a single image

    @property
    def rate(self) -> float:
        """Returns images per second that can be promised. What disturbs a pass only makes it slower: the best
        counts."""
        return max(self.rates, default=0.0)

    @property
    def is_sure(self) -> bool:
        return _found_twice(self.rates)

    @property
    def spread(self) -> float:
        """How far the second best pass is behind the best."""
        best = sorted(self.rates)[-2:]
        return 1 - best[0] / best[-1] if best else 0.0

    @property
    def promises(self) -> bool:
        return self.rate >= _HARDLY * 1e3

    def __str__(self) -> str:
        """One that takes more than half of the promise can promise nothing here, and perhaps in service."""
        if self.promises:
            return f"{numeral(self.rate)} images/s"
        return f"one image in {numeral(self.shortest * 1e3)} ms"


def even_layouts(cores: int) -> list[Layout]:
    """Returns layouts with every core busy with one thread: one instance with all of them, one for each core,
    and one between."""
    counts = {1, cores, cores // 2} if cores >= 4 else {1, cores}
    return [Layout(count, cores // count) for count in sorted(counts)]


def choose_by_capacity(cores: int, slo: float, trying: Trying) -> Chosen:
    """Returns the layout that can promise most; where several are about as good, one that answers fast
    enough."""
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
            shortest = _single(trying.measuring(alone.backends), _QUICK * slo, trying.watch())
            if shortest < trying.limit(SHORT_S, alone.layout):
                chosen = Chosen(alone.layout, too_short(shortest), alone.backends)
                return chosen
            each = Layout(cores, 1)
            if cores <= _FEW_CORES and shortest <= trying.limit(_QUICK * slo, each):
                quick = open_trial(each)
                chosen = Chosen(each, _quick_enough(shortest), quick.backends)
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
                close_all(trial.backends)


def _compare(trials: Sequence[_Trial], cores: int, slo: float, trying: Trying, *, slow: bool) -> Chosen:
    """In passes, until each layout did twice what it can do: a try that others disturbed is seldom done twice
    alike. One that is behind the best is tried more often, since they may have disturbed it each time."""
    watched = trying.watch()
    passes = _SLOW_PASSES if slow else _PASSES
    with nullcontext() if slow else trying.beside(-(-cores // _CORES_FOR_ONE)):
        for _ in range(passes if len(trials) > 1 else 1):
            most = max(trial.rate for trial in trials)
            for trial in trials:
                behind = trial.rate < _ABOUT_AS_MUCH * most and len(trial.rates) < passes // 2
                if behind or not trial.is_sure:
                    _try(trial, slo, trying, once=slow)
        taken = watched.read()
    doubt = min(1.0, taken.steal + taken.others) if contention(taken).why else 0.0
    best, good = _best(trials, slo, trying.earlier, doubt + (_FEW_RUNS if slow else 0.0))
    how = "" if slow else " beside other work"
    why = _compared(best, trials, how) + (_close(best, good, trying.earlier) if len(good) > 1 else "")
    return Chosen(best.layout, why, best.backends)


def _single(measuring: Measuring, quick: float, watched: Watches) -> float:
    """Returns the seconds of one image, as they would be without others. For most models one run shows that
    they are neither short nor quick, though a first one may take several times as long as the next; others
    are measured until two runs agree."""
    found = [measuring.once(1)]
    calm = found[0] * (1 - contention(watched.read()).waited)
    if calm > max(_SURELY_LONG_S, min(_COLD * quick, _SLOW_S)):
        return calm
    while len(found) < _PASSES and not _found_twice([1 / seconds for seconds in found]):
        found.append(measuring.shortest(1))
    return min(found) * (1 - contention(watched.read()).waited)


def _found_twice(rates: Sequence[float]) -> bool:
    """Returns whether the best of them is no luck, and not the only one that nothing disturbed."""
    best = sorted(rates)[-2:]
    return len(best) == 2 and best[1] <= _SAME * best[0]


def _best(
    trials: Sequence[_Trial], slo: float, earlier: Layout | None, doubt: float
) -> tuple[_Trial, list[_Trial]]:
    """Returns the chosen trial, and those that are about as good: the best is ahead of them by no more than a
    tenth, the spread of the passes, and the share of the cores that others took. Of these it chooses what an
    earlier start chose; else, where a single image takes next to nothing of the promise, the fewest threads;
    else the fewest instances that answer one image about as fast as any."""
    most = max(trials, key=lambda trial: trial.rate)
    ahead = (1 + most.spread + doubt) / _ABOUT_AS_MUCH
    good = [trial for trial in trials if most.rate <= (ahead + trial.spread) * trial.rate]
    for trial in good:
        if trial.layout == earlier:
            return trial, good
    quick = [trial for trial in good if trial.shortest <= _QUICK * slo]
    if quick:
        return min(quick, key=lambda trial: trial.layout.threads), good
    fastest = min(trial.shortest for trial in good) / _ABOUT_AS_MUCH
    fast = [trial for trial in good if trial.shortest <= fastest]
    return min(fast, key=lambda trial: trial.layout.instances), good


def _compared(best: _Trial, trials: Sequence[_Trial], how: str) -> str:
    others = [trial for trial in trials if trial is not best]
    against = ", against " + ", ".join(f"{other} with {other.layout}" for other in others) if others else ""
    within = " within the SLO" if best.promises else ""
    return f"{best}{within}{how}{against}"


def _close(best: _Trial, good: Sequence[_Trial], earlier: Layout | None) -> str:
    """Returns why this one of several, in words."""
    if best.layout == earlier:
        return "; no other is clearly better, so it stays as an earlier start chose"
    about = best.rate >= _ABOUT_AS_MUCH * max(trial.rate for trial in good)
    many = "about as many" if about else "not clearly fewer on a machine that was busy"
    return f"; {many}, and one image takes only {numeral(best.shortest * 1e3)} ms"


def _quick_enough(seconds: float) -> str:
    takes = f"one image takes {numeral(seconds * 1e3)} ms with one thread, a small part of the SLO"
    return f"{takes}, and independent threads give the highest throughput"


def _try(trial: _Trial, slo: float, trying: Trying, *, once: bool) -> None:
    """Tries a layout once more."""
    measuring = trying.measuring(trial.backends)
    largest = max(1, trying.signature.max_batch)
    alone = measuring.once(1) if once else measuring.shortest(1)
    points = [(1, alone)]
    size = largest
    while size > 1 and size * alone > min(slo / 2, _BATCH_S):
        size //= 2
    if size > 1:  # the largest that surely fits: what batching brings shows there, and what other work takes
        points = [(size, measuring.shortest(size))]
    curve = BatchCurve.measured(points, largest)
    # One that can promise nothing comes last, and is compared with its like by what it does at all.
    rate = trial.layout.instances * (slo_capacity(curve, slo) or _HARDLY * curve.throughput(1))
    trial.rates.append(rate)
    trial.shortest = min(trial.shortest, alone)
