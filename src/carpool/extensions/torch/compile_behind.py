"""A model that serves with plain programs is compiled behind its traffic, one batch size after the other.

Processes of their own do the compiling (`compiler_process.py`); the runner then adopts a size within
seconds, compares its answers with the plain ones, and times both. The scheduler plans with the new time from
the next batch on. The sizes that most images run in come first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import isinf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from carpool.backends.backend import CompiledSize
from carpool.core.curve import BatchCurve, promised_batch, slo_capacity
from carpool.engine.profile.measuring import Point
from carpool.engine.profile.model_profile import Profile
from carpool.errors import CarpoolError
from carpool.extensions.torch.compiled_file import compiled_point, write_compiled
from carpool.extensions.torch.hosted_model import HostedLoading
from carpool.extensions.torch.runner_messages import SavedArtifacts
from carpool.extensions.torch.shared_artifacts import artifacts_of, keep_few
from carpool.observe import columns
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.engine.models.batch_runtime import BatchRuntime
    from carpool.engine.models.served import Served
    from carpool.extensions.torch.runner_client import Compiler

_log = logger("engine")
_MOST_AT_ONCE = 3
_RETRY_S, _TRIES = 1.0, 5
_NEXT_AFTER_S = 2.0
_BUSY = 0.5
_SETTLE_S = 0.5
"""Between two sizes that are adopted while requests take much of the device: what waited runs first."""


def compiles_behind(served: Served) -> bool:
    """It runs where it can be compiled while it serves, and is to be."""
    hosted = served.hosted and not served.config.asks("text")
    return hosted and served.config.pytorch.compiles_behind and not served.config.decoupled


class CompileBehind:
    """Compiles one version, until it is withdrawn. When its instances are replaced it begins anew, with what
    lies in the compiler's cache by then."""

    def __init__(self, runtime: BatchRuntime) -> None:
        assert isinstance(runtime.loading, HostedLoading)
        self._runtime, self._served = runtime, runtime.served
        self._loading = runtime.loading
        self._sizes = list(self._served.config.pytorch.buckets) or [1]
        self._todo: list[int] = []
        self._compiled: asyncio.Queue[int | None] = asyncio.Queue()
        self._in_cache = set(self._sizes) & set(self._loading.artifact_sizes)
        self._done: dict[int, str] = {}  # why a size is not adopted; empty: it is
        self._began = monotonic()
        profile = self._served.profile
        self._plain = () if profile is None else profile.points
        self._known = {} if profile is None else {point.size: point for point in profile.compiled}
        self._artifacts: list[SavedArtifacts] = []

    async def run(self) -> None:
        while True:
            self._runtime.replaced.clear()
            self._done.clear()
            if self._served.profile is not None and self._served.profile.compiled:
                self._plan_with(())
            self._say()
            await self._all()
            await self._runtime.replaced.wait()
            await asyncio.sleep(_RETRY_S)  # others are replaced at the same time

    async def _all(self) -> None:
        self._began = monotonic()
        self._todo = [size for size in self._sizes if size not in self._in_cache]
        self._compiled = asyncio.Queue()
        for size in self._in_order(self._in_cache):
            self._compiled.put_nowait(size)
        count = min(_MOST_AT_ONCE, len(self._todo))
        compilers = [asyncio.ensure_future(self._compiler(number)) for number in range(count)]
        ending = asyncio.ensure_future(self._ended(compilers))
        try:
            while (compiled := await self._compiled.get()) is not None:
                await self._adopt(compiled)
                if self._is_busy():
                    await asyncio.sleep(_SETTLE_S)
        finally:
            for task in (*compilers, ending):
                task.cancel()
        await self._complete()

    async def _ended(self, compilers: Sequence[asyncio.Future[None]]) -> None:
        await asyncio.gather(*compilers, return_exceptions=True)
        for size in self._todo:  # no compiler process could compile them: the runner does
            self._compiled.put_nowait(size)
        self._todo = []
        self._compiled.put_nowait(None)

    # ---- compiling, in processes of their own -----------------------------------------------------------

    async def _compiler(self, number: int) -> None:
        """Compiles sizes: the first one begins at once; each further one only while requests leave half of
        the device."""
        await asyncio.sleep(number * _NEXT_AFTER_S)
        while number and self._todo and self._is_busy():
            await asyncio.sleep(_NEXT_AFTER_S)
        if not self._todo:
            return
        try:
            async with self._loading.compiler() as compiler:
                while self._todo:
                    await self._next(compiler)
                self._artifacts.append(await compiler.save())
        except (CarpoolError, OSError) as error:
            _log.warning("compiler-failed", model=self._served.name, error=str(error))

    def _is_busy(self) -> bool:
        scheduler = self._runtime.driver.scheduler
        curve, slo, now = scheduler.curve, self._served.slo, monotonic()
        able = 0.0 if isinf(slo) else slo_capacity(curve, slo, len(scheduler.instances))
        able = able or len(scheduler.instances) * curve.throughput(curve.max_batch)
        return scheduler.rate(now) > _BUSY * able

    async def _next(self, compiler: Compiler) -> None:
        size = self._in_order(self._todo)[0]
        self._todo.remove(size)
        try:
            (found,) = (await compiler.compile(size)).instances
        except CarpoolError:
            self._todo.append(size)
            raise
        if found.why_not:
            self._refused(size, found.why_not)
        else:
            self._in_cache.add(size)
            self._compiled.put_nowait(size)

    def _in_order(self, sizes: set[int] | Sequence[int]) -> list[int]:
        """Orders sizes by the images that ran in batches of this size; where none did, the size that the
        promise needs most, then a single image, then the largest."""
        used = self._runtime.images_by_size(self._sizes)
        curve = self._runtime.driver.scheduler.curve
        first = curve.padded(promised_batch(curve, self._served.slo) or curve.max_batch)
        return sorted(sizes, key=lambda size: (-used.get(size, 0), size != first, size != 1, -size))

    # ---- adopting, in the runner ------------------------------------------------------------------------

    async def _adopt(self, size: int) -> None:
        found: list[CompiledSize] = []
        for tried in range(1, _TRIES + 1):
            try:
                found = (await asyncio.to_thread(self._loading.compile, size)).instances
                break
            except CarpoolError as error:  # its runner died, and the next one has not loaded it yet
                if tried == _TRIES or self._runtime.replaced.is_set():
                    self._refused(size, error.message)
                    return
                await asyncio.sleep(_RETRY_S * tried)
        why = next((one.why_not for one in found if one.why_not), "" if found else "no instance serves")
        if why:
            self._refused(size, why)
            return
        self._done[size] = ""
        self._plan_with(self._points(size, found))
        seconds = round(monotonic() - self._began, 1)
        timed = [one for one in found if one.after]
        speed = {"speedup": round(timed[0].before / timed[0].after, 3)} if timed else {}
        _log.info(
            "batch-size-compiled",
            model=self._served.name,
            version=self._served.version,
            size=size,
            **speed,
            done=f"{len(self._adopted)} of {len(self._sizes)}",
            seconds=seconds,
            steps=[{"began": one.began, **one.steps} for one in found],
        )
        self._say()

    @property
    def _adopted(self) -> list[int]:
        return sorted(size for size, why in self._done.items() if not why)

    def _refused(self, size: int, why: str) -> None:
        self._done[size] = why
        _log.warning("batch-size-not-compiled", model=self._served.name, size=size, why=why)
        self._say()

    # ---- what becomes of it -----------------------------------------------------------------------------

    def _points(self, size: int, found: Sequence[CompiledSize]) -> tuple[Point, ...]:
        """Returns the points of the sizes that are compiled by now: as an earlier start measured them, or as
        they were timed when they were adopted."""
        known = self._known.get(size)
        plain = next((point for point in self._plain if point.size == size), None)
        if known is None and plain is not None and (point := compiled_point(plain, found)) is not None:
            self._known[size] = point
        return tuple(self._known[one] for one in self._adopted if one in self._known)

    def _plan_with(self, compiled: tuple[Point, ...]) -> None:
        served, scheduler = self._served, self._runtime.driver.scheduler
        if served.profile is None or not self._plain:
            return
        served.profile = replace(served.profile, compiled=compiled)
        fast = {point.size: point.seconds for point in compiled}
        times = [(point.size, fast.get(point.size, point.seconds)) for point in self._plain]
        # Where a larger size is compiled and takes less, batches of a plain one run in that: so do its times.
        shortest = times[-1][1]
        for place in range(len(times) - 1, -1, -1):
            size, seconds = times[place]
            shortest = min(shortest, seconds) if size not in fast else seconds
            times[place] = size, shortest
        old = scheduler.trend.profile
        scheduler.replanned(BatchCurve.measured(times, old.max_batch, old.buckets), monotonic())

    def _say(self) -> None:
        served, row = self._served, self._served.counters.row
        row.set(columns.COMPILED_SIZES["compiled"], len(self._adopted))
        row.set(columns.COMPILED_SIZES["plain"], len(self._sizes) - len(self._adopted))
        kept = tuple(one for one in served.choices if not one.startswith("Compiled: "))
        served.choices = (*kept, self._sentence())
        self._runtime.changed()

    def _sentence(self) -> str:
        adopted, refused = self._adopted, {size: why for size, why in self._done.items() if why}
        listed = f" ({', '.join(map(str, adopted))})" if adopted else ""
        said = f"Compiled: {len(adopted)} of {len(self._sizes)} batch sizes{listed}"
        if refused:
            said += f"; not {', '.join(map(str, sorted(refused)))}: {next(iter(refused.values()))}"
        waiting = len(self._sizes) - len(self._done)
        return f"{said}; {waiting} are being compiled behind the traffic." if waiting else f"{said}."

    async def _complete(self) -> None:
        served, profile = self._served, self._served.profile
        seconds = round(monotonic() - self._began, 1)
        sizes = f"{len(self._adopted)} of {len(self._sizes)}"
        _log.info("model-compiled", model=served.name, version=served.version, sizes=sizes, seconds=seconds)
        if profile is None or not profile.compiled:
            return
        profile = served.profile = self._runtime.at_full_speed(profile)
        await asyncio.to_thread(self._keep, profile)

    def _share(self, file: Path) -> None:
        """Shares a file with other replicas, where that is safe."""
        if self._served.config.pytorch.module is None:
            return
        artifacts, why_not = artifacts_of(self._runtime.profiles)
        if artifacts is not None:
            artifacts.share(file, self._served.name)
        elif why_not:
            _log.info("compiled-not-shared", model=self._served.name, error=why_not)

    def _keep(self, profile: Profile) -> None:
        """Keeps a profile for the next start. Nothing that goes wrong with it keeps the model from being
        served."""
        made, self._artifacts = [one for one in self._artifacts if one.path], []
        paths = [Path(one.path) for one in made]
        try:
            self._loading.keep(profile)
            if len({one.key for one in made}) != 1:
                return
            parts = [path.read_bytes() for path in paths]
            key = self._loading.kept_as
            kept = profile if key else None
            sizes = sorted(self._in_cache)
            file = write_compiled(paths[0].parent, made[0].key, sizes, parts, kept, key)
            keep_few(paths[0].parent)
            _log.info("compiled-written", model=self._served.name, file=str(file))
            self._share(file)
        except (OSError, ValueError, CarpoolError) as error:
            _log.warning("compiled-not-written", model=self._served.name, error=str(error))
        finally:
            for path in paths:  # parts of the one file, also where that could not be written
                with suppress(OSError):
                    path.unlink()
