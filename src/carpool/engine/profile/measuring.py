"""t(B) of a model, measured: warm until it is steady, repeat until it is clear, and never for long.

Loading and `carpool profile` both measure here. A backend's `run` returns when the answer is there, so its
time is the whole time; `synchronise` is for a device that answers before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from math import inf, sqrt
from statistics import fmean
from time import monotonic, sleep
from typing import Protocol, cast

import numpy as np

from carpool.backends.backend import Backend, Gathers, RunsEncoded
from carpool.core.curve import BatchCurve
from carpool.engine.profile.contention import CALM, contention
from carpool.engine.profile.hardware import CpuTaken
from carpool.types import Array, Datatype, Signature

_ANY_LENGTH = 64  # stands in for a dimension that differs from request to request
_STEADY_RUNS = 3
_STEADY = 1.15  # the longest of the last few over the shortest
_CLEAR = 0.03  # half the width of what is not known, over the time itself
_LOOKS, _LOOK_S = 2, 1.0
_COLD = 1.4  # a first run takes up to so many times as long as the next
_LONG_S = 0.5
_SEEN_ANYWAY = 8  # images
_BETWEEN_S = 20e-6  # for each image of a batch, until the instance has the next: what the engine's loop takes
_FEWEST_ENDS = 3  # of batches from which a rate is computed
_NO_GAIN = 0.95  # of the best rate: larger batches that do worse, twice in a row, are not looked at


_Threads = ThreadPoolExecutor | None


@dataclass(frozen=True, slots=True)
class Point:
    """Describes batches of one size. `spread` is how far the middle half of the runs lies apart, over
    `seconds`."""

    size: int
    seconds: float
    spread: float = 0.0
    runs: int = 1

    @property
    def rate(self) -> float:
        return self.size / self.seconds


@dataclass(frozen=True, slots=True)
class Effort:
    """Defines how much looking an answer is worth. Times in seconds, per size unless said."""

    least_runs: int = 5
    most_runs: int = 15
    seconds: float = 0.15
    warm_up: float = 0.5
    total: float = 2.0  # for all sizes: nothing is begun that would likely end after this
    passes: int = 1  # over all sizes: what disturbs the machine for a while then disturbs all alike


FOR_SERVING = Effort(seconds=0.06, warm_up=0.15, total=0.6)
"""A start waits for this measurement; what it leaves out is learned in service."""
FOR_DEVICES = Effort(total=10.0)
"""Every size that was prepared: beside seconds of compiling for each, and one is not like the next."""


FOR_FIRST_ANSWERS = Effort(seconds=0.04, warm_up=0.1, total=2.0)
"""A device whose network is compiled while it serves: each size is timed again then."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Holds the measured times. `ended` says why no larger batch was measured, or is empty: there is none.
    `provisional` says what disturbed the whole measurement, and is empty where the machine was calm; the
    times of a disturbed one are estimates of what the runs would have taken alone."""

    points: tuple[Point, ...] = ()
    ended: str = ""
    provisional: str = ""

    def curve(self, largest: int, buckets: Sequence[int] = ()) -> BatchCurve:
        """With `buckets`, other sizes cost what the next larger one costs: they are padded."""
        return BatchCurve.measured([(point.size, point.seconds) for point in self.points], largest, buckets)


def sample(signature: Signature, images: int) -> dict[str, Array]:
    """Returns zeros in the shape of a request."""
    inputs = {}
    for spec in signature.inputs:
        shape = tuple(_ANY_LENGTH if length < 0 else length for length in spec.shape)
        shape = (images, *shape) if signature.max_batch else shape
        if spec.datatype is Datatype.BYTES:
            inputs[spec.name] = np.full(shape, b"", dtype=object)
        else:
            inputs[spec.name] = np.zeros(shape, spec.datatype.dtype)
    return inputs


class Rows(Protocol):
    """Fills the batches that are measured, and receives the answers of each size."""

    def requests(self, images: int) -> dict[str, Array]: ...

    def heard(self, images: int, batch: Mapping[str, Array]) -> None: ...


class Watches(Protocol):
    """Sees what others take of our cores, from when it is made."""

    def read(self) -> CpuTaken: ...


class NotWatched:
    """Watches nothing, for times that no other process can disturb, as those of a script."""

    def read(self) -> CpuTaken:
        return CpuTaken()


@dataclass(frozen=True, slots=True)
class Measuring:
    """Measures one model on all of its instances at once, as they run when there is much to do."""

    backends: Sequence[Backend]
    _signature: Signature
    _effort: Effort = FOR_SERVING
    _: KW_ONLY
    now: Callable[[], float] = monotonic
    synchronise: Callable[[], None] = lambda: None
    sleep: Callable[[float], None] = sleep
    picture: Array | None = None  # a file: the backends get so many of it instead of tensors
    warm: bool = False  # they have run single images just now
    watch: Callable[[], Watches] = NotWatched
    rows: Rows | None = None  # None: zeros

    def points(
        self, wanted: Iterable[int], budget: float = inf, tell: Callable[[int], None] = lambda _: None
    ) -> Measured:
        """Measures sizes in rising order, as far as they matter: up to the first that takes longer than the
        budget, or, with a budget, that larger batches bring nothing more."""
        with self._threads() as threads:
            watched = self.watch()
            times, ended = self._all_times(wanted, budget, tell, threads)
            taken = watched.read()  # while the threads are there that ran
        points = tuple(_point(*entry) for entry in times.items())
        found = contention(taken, [point.spread for point in points])
        if found is CALM:
            return Measured(points, ended)
        alone = (replace(point, seconds=found.calm_seconds(times[point.size])) for point in points)
        return Measured(tuple(alone), ended, found.why)

    def _all_times(
        self, wanted: Iterable[int], budget: float, tell: Callable[[int], None], threads: _Threads
    ) -> tuple[dict[int, list[float]], str]:
        end = self.now() + self._effort.total
        times: dict[int, list[float]] = {}
        ended = ""
        for images in wanted:
            if times and self._is_over(_point(*list(times.items())[-1]), images, end):
                ended = f"the {self._effort.total:g} s for measuring were over"
                break
            tell(images)
            times[images] = self._times(images, threads)
            ended = _enough([_point(*entry) for entry in times.items()], budget)
            if ended:
                break
        for _ in range(1, self._effort.passes):
            for images in times:
                if self.now() + self._expected(_point(images, times[images]), images) < end:
                    tell(images)
                    times[images] += self._times(images, threads)
        return times, ended

    def point(self, images: int) -> Point:
        with self._threads() as threads:
            return _point(images, self._times(images, threads))

    def shortest(self, images: int) -> float:
        """Returns seconds of the run that was disturbed least, for comparing. Instances run at the same time,
        and count together: one of them alone has the others' share of the memory, too."""
        with self._threads() as threads:
            times, count = self._times(images, threads), len(self.backends)
        return min(fmean(times[at : at + count]) for at in range(0, len(times), count))

    def rate(self, images: int) -> float:
        """Returns images per second of all instances together, each of which begins its next batch when it
        has ended one, and when a pause is over like the one that service makes there. Instances that begin in
        step, as in the other measurements, all copy and decode at the same time and then all compute: what
        they can do beside each other is not seen."""
        with self._threads() as threads:
            runs = self._runs(images, threads)
            runs.once()  # what only a first batch needs
            pause = partial(self.sleep, _BETWEEN_S * images)
            return runs.rate(self._effort.warm_up, self._effort.seconds, pause)

    def once(self, images: int) -> float:
        """Seconds of one run, the first there is perhaps: what it needs only once is counted too."""
        with self._threads() as threads:
            return min(self._runs(images, threads).once())

    @contextmanager
    def _threads(self) -> Iterator[_Threads]:
        """Yields one thread for each instance, where there are several."""
        if len(self.backends) == 1:
            yield None
            return
        with ThreadPoolExecutor(len(self.backends)) as threads:
            yield threads

    def ratios(self, wanted: Sequence[int], curve: BatchCurve, near: float) -> dict[int, float]:
        """Returns them by size: what it takes now over what the curve says, the nearest of a few looks. One
        run is enough where it is near: whatever disturbs a first look may be gone at the next."""
        found: dict[int, float] = {}
        end = self.now() + _LOOK_S
        for size in wanted:
            for look in range(1 + _LOOKS):
                seconds = self.point(size).seconds if look else self.once(size)
                ratio = seconds / curve.times[size]
                if not look and near < ratio < near * _COLD and seconds > _LONG_S / 2:
                    ratio = near  # a second look would take long, and teach little
                if size not in found or max(ratio, 1 / ratio) < max(found[size], 1 / found[size]):
                    found[size] = ratio
                if max(ratio, 1 / ratio) <= near or (look and self.now() > end):
                    break
        return found

    def quick_ratios(self, wanted: Sequence[int], curve: BatchCurve, near: float) -> dict[int, float]:
        """The same by one run of each size, and a second where the first was short and not near: it may have
        been slow because it was the first."""
        found: dict[int, float] = {}
        for size in wanted:
            seconds = self.once(size)
            if seconds < _LONG_S / 5 and not 1 / near <= seconds / curve.times[size] <= near:
                seconds = self.once(size)
            ratio = seconds / curve.times[size]
            found[size] = near if near < ratio < near * _COLD and seconds >= _LONG_S / 5 else ratio
        return found

    def _times(self, images: int, threads: _Threads) -> list[float]:
        effort, runs = self._effort, self._runs(images, threads)
        times = self._warm_up(runs, warm=self.warm and images == 1)
        began = self.now()
        while len(times) < _fewest(times) or (
            min(times) < _LONG_S
            and len(times) < effort.most_runs
            and self.now() - began < effort.seconds
            and not (len(times) >= effort.least_runs and _is_clear(times))
        ):
            times += runs.once()
        if self.rows is not None:
            self.rows.heard(images, runs.answer)
        return times

    def _runs(self, images: int, threads: _Threads) -> _Runs:
        requests: dict[str, Array] = {}
        if self.picture is None:
            requests = sample(self._signature, images) if self.rows is None else self.rows.requests(images)
        pictures = [] if self.picture is None else [self.picture] * images
        return _Runs(self.backends, requests, pictures, images, self.now, self.synchronise, threads)

    def _warm_up(self, runs: _Runs, *, warm: bool) -> list[float]:
        """Repeats until the last few runs agree; those count. None do if that takes too long, unless it is
        `warm`."""
        few = _STEADY_RUNS * len(self.backends)
        times: list[float] = []
        began = self.now()
        while self.now() - began < self._effort.warm_up:
            times += runs.once()
            last = times[-few:]
            if len(last) == few and max(last) <= _STEADY * min(last):
                return last
        return times if warm else []

    def _is_over(self, before: Point, images: int, end: float) -> bool:
        """Returns whether another size would take too long. The first few sizes are measured even where
        something else took the time: after one or two disturbed ones, batches would seem to bring nothing,
        and none would run from which to learn otherwise."""
        takes = self._expected(before, images)
        if images <= _SEEN_ANYWAY and takes < _LONG_S:
            return False
        return self.now() + takes > end

    def _expected(self, before: Point, images: int) -> float:
        """Returns seconds that another size will take, at least."""
        return _STEADY_RUNS * before.seconds * images / before.size


class _Runs:
    """The same batch again and again, on every instance at the same time; or the same pictures' files, which
    lie where they are until the device reads them."""

    def __init__(
        self,
        backends: Sequence[Backend],
        requests: dict[str, Array],
        pictures: Sequence[Array],
        images: int,
        now: Callable[[], float],
        synchronise: Callable[[], None],
        threads: _Threads,
    ) -> None:
        self._requests = requests
        self._pictures = pictures
        self._images = images
        self.answer: Mapping[str, Array] = {}  # of the last run
        self._parts = [{name: array[at : at + 1] for name, array in requests.items()} for at in range(images)]
        self._batches = [
            (backend, {name: array.copy() for name, array in requests.items()}) for backend in backends
        ]
        self._now = now
        self._synchronise = synchronise
        self._threads = threads

    def once(self) -> list[float]:
        if self._threads is None:
            return [self._run(*self._batches[0])]
        return list(self._threads.map(lambda pair: self._run(*pair), self._batches))

    def rate(self, warm_up: float, seconds: float, pause: Callable[[], None]) -> float:
        """See `Measuring.rate`. Batches that end within the first `warm_up` seconds do not count."""

        def repeat(pair: tuple[Backend, dict[str, Array]]) -> float:
            began = ended = self._now()
            ends: list[float] = []
            while len(ends) < _FEWEST_ENDS or ended < began + warm_up + seconds:
                pause()
                self._run(*pair)
                ended = self._now()
                if ended >= began + warm_up:
                    ends.append(ended)
            return self._images * (len(ends) - 1) / max(ends[-1] - ends[0], 1e-9)

        each = map if self._threads is None else self._threads.map
        return sum(each(repeat, self._batches))

    def _run(self, backend: Backend, batch: dict[str, Array]) -> float:
        start = self._now()
        gathers = self._images > 1  # one request alone is run where it lies
        if self._pictures:
            _, errors = cast(RunsEncoded, backend).run_encoded(self._pictures, ())
            for error in errors.values():
                raise error
        elif gathers and isinstance(backend, Gathers):
            self.answer = backend.run_parts(self._parts, [1] * self._images, ())
        else:
            if gathers:
                for name, array in self._requests.items():
                    batch[name][...] = array
            self.answer = backend.run(batch, ())
        self._synchronise()
        return max(self._now() - start, 1e-9)


def _fewest(times: Sequence[float]) -> int:
    """Runs that have to be seen. One that takes long has had its share of whatever disturbs a machine."""
    return 1 if times and min(times) > _LONG_S else 2


def _point(images: int, times: Sequence[float]) -> Point:
    """A time that is right for a quiet machine: what disturbs a run only makes it longer, so the lower
    quartile counts. The very shortest may be luck; what is usual is learned in service."""
    seconds, width = _middle(times)
    return Point(images, seconds, width / seconds, len(times))


def _enough(found: Sequence[Point], budget: float) -> str:
    """Returns why a larger batch need not be measured, or nothing."""
    if found[-1].seconds > budget:
        return f"the last takes longer than {budget * 1e3:g} ms"
    if budget < inf and _no_gain(found):
        return "larger ones bring no more images per second"
    return ""


def _no_gain(found: Sequence[Point]) -> bool:
    best = max(point.rate for point in found)
    return len(found) > 2 and all(point.rate < _NO_GAIN * best for point in found[-2:])


def _is_clear(times: Sequence[float]) -> bool:
    seconds, width = _middle(times)
    return width / 2 / sqrt(len(times)) < _CLEAR * seconds


def _middle(times: Sequence[float]) -> tuple[float, float]:
    """Returns the lower quartile, and how far above it the upper one is."""
    low, high = np.quantile(times, [0.25, 0.75])
    return float(low), float(high - low)
