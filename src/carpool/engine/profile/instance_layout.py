"""Chooses how many instances with how many threads each: on a CPU both share the cores, so layouts are tried.

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

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

from carpool import backends
from carpool.backends.backend import Backend, SharesDevice
from carpool.config.backend_kinds import kind_of
from carpool.config.model import InstanceKind, ModelConfig
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.instance import Instance
from carpool.core.intake import Intake
from carpool.core.numerals import numeral
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.profile.contention import contention
from carpool.engine.profile.measuring import Effort, Measuring, NotWatched, Watches
from carpool.engine.run.executor import LoopTime
from carpool.errors import CarpoolError, ConfigError, ModelError
from carpool.observe.logs import logger
from carpool.types import Signature

if TYPE_CHECKING:
    from carpool.core.arbiter import Arbiter, ModelTurn
    from carpool.core.background import BackgroundTurn

_CLEARLY_FASTER = 0.8
_ABOUT_AS_MUCH = 0.9
_QUICK = 0.15  # of the promise
_FEW_CORES = 4  # where so few share their caches and memory, that costs each of them next to nothing
_SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one
_HARDLY = 1e-6
_TRIAL_LOAD_S = 2.0
_TRIAL = Effort(least_runs=2, most_runs=6, seconds=0.04, warm_up=0.05)
_PASSES, _SLOW_PASSES = 8, 4  # at most, in turns: what else disturbs a machine for a while disturbs all
_SAME = 1.05  # times: so near to the best, another pass has found the same
_FEW_RUNS = 0.15  # so much more doubt where each pass is a single run
_STAYS = 1.25  # times a limit: so far beyond it the layout of an earlier start stays
_BATCH_S = 0.05  # batches that take longer show nothing that shorter ones do not
_SLOW_S = 0.25  # of a single image
_SURELY_LONG_S = 20 * _SHORT_S  # even for a first run
_COLD = 6.0  # times as long as the next, at most: a first run that others disturb, too
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


def close_all(opened: Iterable[Backend]) -> None:
    for backend in opened:
        backend.close()


@contextmanager
def closed_if_it_fails(opened: Iterable[Backend]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close_all(opened)
        raise


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
    """Holds what layouts are tried with. `turn` is held while times are taken, not while the model is
    opened."""

    signature: Signature
    open: Callable[[Layout], Sequence[Backend]]
    now: Callable[[], float] = monotonic
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    beside: Callable[[int], AbstractContextManager[None]] = other_work
    watch: Callable[[], Watches] = NotWatched
    earlier: Layout | None = None  # what an earlier start of the same model chose

    def limit(self, value: float, layout: Layout) -> float:
        """Returns the limit below which this layout is taken, and later on as long as that is not clearly
        wrong."""
        if self.earlier is None:
            return value
        return value * _STAYS if layout == self.earlier else value / _STAYS

    def measuring(self, opened: Sequence[Backend]) -> Measuring:
        return Measuring(opened, self.signature, _TRIAL, now=self.now)


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
            if shortest < trying.limit(_SHORT_S, alone.layout):
                chosen = Chosen(alone.layout, _too_short(shortest), alone.backends)
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


def _too_short(seconds: float) -> str:
    return f"one image takes {seconds * 1e3:.2g} ms, too short to be worth a second thread"


def _quick_enough(seconds: float) -> str:
    takes = f"one image takes {numeral(seconds * 1e3)} ms with one thread, a small part of the SLO"
    return f"{takes}, and independent threads give the highest throughput"


def choose_threads(instances: int, shared: int, trying: Trying) -> Chosen:
    """Chooses several threads for one run only where they clearly shorten it: small models only pay for
    them."""
    times = []
    for threads in (1, shared):
        opened = trying.open(Layout(1, threads))
        try:
            with trying.turn:
                times.append(trying.measuring(opened).shortest(1))
        finally:
            close_all(opened)
        if times[0] < _SHORT_S:
            return Chosen(Layout(instances, 1), _too_short(times[0]))
    alone, together = times
    threaded = f"one image takes {numeral(together * 1e3)} ms with {shared} threads"
    compared = f"{threaded}, {numeral(alone * 1e3)} ms with one"
    return Chosen(Layout(instances, shared if together < _CLEARLY_FASTER * alone else 1), compared)


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


log = logger("engine")

_MOST_STREAMS = 6  # instances on one GPU that are tried
_USUAL_STREAMS, _USUAL_DECODING_STREAMS = 2, 3
_WORTH_ANOTHER = 1.1  # times the rate without it: each takes memory, and makes single images slower
_GPU_TRIAL = Effort(seconds=0.3, warm_up=0.1)

OpenOne = Callable[[int], Backend]


def instance_count(config: ModelConfig) -> int:
    """Without a GPU, groups that ask for one run on the CPU: the counts add up."""
    return max(1, sum(group.count * max(1, len(group.gpus)) for group in config.instances))


def places(config: ModelConfig, devices: Sequence[int]) -> list[int]:
    """Returns the GPU of each instance that the settings ask for: one on each device, where they ask for
    nothing."""
    found: list[int] = []
    for group in config.instances:
        if group.kind is InstanceKind.CPU:
            raise ConfigError(
                f"{config.name}: its instances run on GPUs or on the CPU, not on both: change instances"
            )
        for gpu in group.gpus or devices:
            if gpu not in devices:
                raise ConfigError(
                    f"{config.name}: an instance asks for GPU {gpu}, and the model runs on "
                    f"{', '.join(map(str, devices))}"
                )
            found += [gpu] * group.count
    return found


def is_possible(layout: Layout, config: ModelConfig, cores: int, gpus: int) -> bool:
    """Returns whether this layout can have been chosen here, for so many places on GPUs: what a file says may
    be anything, and each instance takes memory and threads."""
    count, given = instance_count(config), any(group.given for group in config.instances)
    if gpus:
        most = gpus if given else _MOST_STREAMS * gpus
        return layout.instances <= most and layout.threads == 1
    told = config.onnxruntime.intra_op_threads or backends.default_threads(count, cores)
    return (
        layout.instances <= (count if given else max(count, cores))
        and layout.threads <= max(cores, told)
        and layout.instances * layout.threads <= max(cores, count * told)
    )


def choose_on_cpu(
    config: ModelConfig, cores: int, trying: Trying, tell: Callable[[str], None] = lambda _: None
) -> Chosen:
    """Chooses instances and threads, which share the cores."""
    count = instance_count(config)
    shared = backends.default_threads(count, cores)
    told = config.onnxruntime.intra_op_threads
    if not kind_of(config.backend).threaded or told or config.onnxruntime.providers or cores == 1:
        return Chosen(Layout(count, told or shared), f"threads as the settings say: {told}" if told else "")
    tell("trying instances and threads")
    policy = config.policy
    try:
        if isinstance(policy, Promise) and not any(group.given for group in config.instances):
            return choose_by_capacity(cores, policy.slo, trying)
        if shared > 1:
            return choose_threads(count, shared, trying)
    except CarpoolError:  # it cannot be tried on zeros; an error is reported later, if it matters
        log.debug("not-tried", model=config.name)
    return Chosen(Layout(count, shared))


def choose_on_gpus(
    config: ModelConfig,
    gpus: Sequence[int],
    slo: float,
    open_one: OpenOne,
    measuring: Callable[[Sequence[Backend], Effort], Measuring],
) -> Chosen:
    """Chooses as many as the settings say; else one more on every GPU for as long as that clearly brings
    more. The first ones are kept: an instance is slow to prepare."""
    if any(group.given for group in config.instances):
        return Chosen(Layout(len(gpus), 1))
    devices = len(gpus)
    opened: list[Backend] = []
    tried: list[tuple[int, float]] = []
    ended = ""
    with closed_if_it_fails(opened):
        for per_device in range(1, _MOST_STREAMS + 1):
            before = len(opened)
            try:
                opened.extend(open_one(number) for number in range(before, per_device * devices))
            except ModelError as error:
                if not tried:
                    raise
                close_all(opened[before:])
                del opened[before:]
                ended = f"; no more, since {error.message}"
                break
            rate = _capacity(measuring(opened, _GPU_TRIAL), len(opened), slo, config.max_batch or 1)
            tried.append((per_device * devices, rate))
            if len(tried) > 1 and rate < _WORTH_ANOTHER * tried[-2][1]:
                close_all(opened[before:])
                del opened[before:]
                break
    against = ", ".join(f"{numeral(rate)} images/s with {count}" for count, rate in tried)
    return Chosen(Layout(len(opened), 1), f"{against}{ended}", opened)


def usual_on_gpus(gpus: Sequence[int], open_one: OpenOne, *, decodes: bool) -> Chosen:
    """Returns two on every GPU, untried: the first answers matter more, and what sustains more may change
    when it is compiled. Three, where the GPU also `decodes` images; fewer, where there is no room."""
    opened: list[Backend] = []
    streams = _USUAL_DECODING_STREAMS if decodes else _USUAL_STREAMS
    what = "three streams on each GPU overlap decoding and" if decodes else "two streams on each GPU overlap"
    why = f"{what} copies with computing; others are tried where nothing is compiled"
    with closed_if_it_fails(opened):
        for number in range(streams * len(gpus)):
            try:
                opened.append(open_one(number))
            except ModelError as error:
                if number < len(gpus):
                    raise
                why = f"no more, since {error.message}"
                alike = number // len(gpus) * len(gpus)  # each GPU has as many
                close_all(opened[alike:])
                del opened[alike:]
                break
    return Chosen(Layout(len(opened), 1), why, opened)


def _capacity(measuring: Measuring, instances: int, slo: float, largest: int) -> float:
    """Returns images per second that all of them can promise together, or do at all: with the largest batch
    that takes no more than half of the promise while all of them run."""
    size = largest
    while True:
        rate = measuring.rate(size)
        if size == 1 or instances * size / rate <= slo / 2:
            return rate
        size //= 2


@dataclass(slots=True)
class _Member:
    """Describes a model, and where its instances are."""

    model: str
    scheduler: Scheduler
    weight: float
    wake: Callable[[], None]
    placed: dict[str, list[Instance]]  # by device
    turns: list[tuple[str, ModelTurn]] = field(default_factory=list)
    background: tuple[str, BackgroundTurn] | None = None


class Devices:
    """Holds the devices of one engine. A device is known by its name, and for as long as a model uses it.

    Models on processors take no turns. Only when a model has background work do its versions get an arbiter,
    which keeps that work out of the way of their requests.
    """

    def __init__(self) -> None:
        self._arbiters: dict[str, Arbiter] = {}
        self._users: dict[str, int] = {}
        self._members: dict[Scheduler, _Member] = {}
        self._intake = Intake()
        self.loop_time = LoopTime()

    def join(
        self,
        scheduler: Scheduler,
        backends: Sequence[object],
        weight: float,
        wake: Callable[[], None],
        model: str = "",
    ) -> None:
        """These are the instances of one model, until it leaves."""
        scheduler.entrance = self._intake.join()
        placed: dict[str, list[Instance]] = {}
        for instance, backend in zip(scheduler.instances, backends, strict=True):
            if isinstance(backend, SharesDevice) and backend.device:
                placed.setdefault(backend.device, []).append(instance)
        member = self._members[scheduler] = _Member(model, scheduler, weight, wake, placed)
        for device, instances in placed.items():
            self._take_place(member, device, instances)
        if not placed and _processors(model) in self._arbiters:
            self._take_place(member, _processors(model), list(scheduler.instances))

    def join_background(self, scheduler: Scheduler) -> None:
        """From now on this model may have background work, on the first device that it is on."""
        member = self._members[scheduler]
        if not member.placed:
            for other in self._members.values():
                if other.model == member.model and not other.turns:
                    self._take_place(other, _processors(member.model), list(other.scheduler.instances))
        device, turn = member.turns[0]
        arbiter = self._of(device)
        scheduler.background = arbiter.join_background(scheduler, turn.instances, member.wake)
        member.background = (device, scheduler.background)

    def _take_place(self, member: _Member, device: str, instances: list[Instance]) -> None:
        turn = self._of(device).join(member.scheduler, instances, member.weight, member.wake)
        member.turns.append((device, turn))

    def _of(self, device: str) -> Arbiter:
        self._users[device] = self._users.get(device, 0) + 1
        arbiter = self._arbiters.get(device)
        if arbiter is None:
            from carpool.core.arbiter import Arbiter  # of GPUs, and of background work

            takes_turns = not device.startswith(_processors(""))
            arbiter = self._arbiters[device] = Arbiter(exclusive=takes_turns)
        return arbiter

    def leave(self, scheduler: Scheduler) -> None:
        member = self._members.pop(scheduler, None)
        if member is None:
            return
        if member.background is not None:
            device, background = member.background
            self._arbiters[device].leave_background(background)
            scheduler.background = None
            self._drop(device)
        for device, turn in member.turns:
            self._arbiters[device].leave(turn)
            self._drop(device)

    def _drop(self, device: str) -> None:
        self._users[device] -= 1
        if not self._users[device]:
            del self._users[device], self._arbiters[device]


def _processors(model: str) -> str:
    """Returns, for all versions of one model that are on no device, a name that no device has."""
    return f"\0{model}"
