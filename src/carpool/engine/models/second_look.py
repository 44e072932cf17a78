"""A model that was measured on a busy machine is measured again while it serves, once the machine is calm.

Its runs are background work, as a new version's comparisons are (`core/background.py`): they take what
requests leave over, and nothing while a request waits. A promise stays what it was when the model was loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from math import isinf, log
from time import monotonic

from carpool.config.fingerprint import PROVISIONAL
from carpool.core.curve import BatchCurve
from carpool.engine.loading.loading import Loading
from carpool.engine.models.runtime import InstancesRuntime
from carpool.engine.profile.contention import contention
from carpool.engine.profile.hardware import CpuWatch
from carpool.engine.profile.measuring import Measured, Point, Watches, sample
from carpool.engine.profile.model_profile import Profile, choices
from carpool.engine.run.batch import Outcome, Work
from carpool.engine.run.driver import Driver
from carpool.observe.logs import logger

_log = logger("engine")

_FIRST_S, _LONGEST_S = 5.0, 300.0  # before a look at the machine: the longer, the more of them found it busy
_LOOK_S = 1.0
_MOST_LOOKS = 50  # at the machine; some hours
_MOST_TRIES = 4  # to measure
_RUNS = 3  # of each size; the shortest counts
_PATIENCE_S = 300.0  # for one try: long batches get their turn once in a while
_SHORT = 0.1  # of the promise: so long may background work be at any time

Sleep = Callable[[float], Awaitable[object]]


class SecondLook:
    """Looks a second time at one version. `run` ends when it was measured, when it is no longer offered, or
    when the tries are over."""

    def __init__(
        self,
        runtime: InstancesRuntime[Driver],
        watch: Callable[[], Watches] = CpuWatch,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._runtime, self._served = runtime, runtime.served
        self._watch = watch
        self._sleep = sleep
        self._wait = _FIRST_S

    async def run(self) -> None:
        tries = looks = 0
        while tries < _MOST_TRIES and looks < _MOST_LOOKS:
            await self._sleep(self._wait)
            self._wait = min(2 * self._wait, _LONGEST_S)
            looks += 1
            if not await self._is_calm():
                continue
            tries += 1
            watched = self._watch()
            ratios = await self._ratios()
            if ratios and not contention(watched.read()).why:
                await self._adopt(ratios)
                return
        _log.info("profile-provisional", model=self._served.name, version=self._served.version, tries=tries)

    async def _is_calm(self) -> bool:
        """Returns whether the machine is calm for a moment, while no request runs or waits."""
        watched = self._watch()
        await self._sleep(_LOOK_S)
        return self._runtime.idle and not contention(watched.read()).why

    # ---- runs -------------------------------------------------------------------------------------------

    async def _ratios(self) -> dict[int, float]:
        """Returns, by size, what it takes now over what was measured. Empty: there was no room for it."""
        profile = self._served.profile
        assert profile is not None
        end = monotonic() + _PATIENCE_S
        found: dict[int, float] = {}
        for point in _few(profile.points, self._served.slo):
            times: list[float] = []
            while len(times) < _RUNS:
                seconds = await self._once(point.size)
                if seconds is not None:
                    times.append(seconds)
                elif monotonic() > end:
                    return {}
                else:
                    await self._sleep(_LOOK_S)
            found[point.size] = min(times) / point.seconds
        return found

    async def _once(self, images: int) -> float | None:
        """Returns the mean of all instances, at the same time, as it was measured. None: one of them was
        skipped."""
        loop, answers = asyncio.get_running_loop(), []
        route = self._runtime.background_route()
        for number in range(len(self._runtime.driver.scheduler.instances)):
            answer: asyncio.Future[Outcome] = loop.create_future()
            inputs = sample(self._served.signature, images)
            alone = ("measured", number)  # of a shape of its own, for a batch of its own
            work = Work(inputs, _answering(answer), monotonic(), images=images, shape=alone)
            answers.append(answer)
            route.submit([work])
        ended = await asyncio.gather(*answers)
        took = [one.timing.input + one.timing.infer for one in ended if one.error is None]
        return sum(took) / len(took) if len(took) == len(ended) else None

    # ---- what becomes of it -----------------------------------------------------------------------------

    async def _adopt(self, ratios: Mapping[int, float]) -> None:
        served, before = self._served, self._served.profile
        assert before is not None
        scheduler = self._runtime.driver.scheduler
        points = tuple(replace(p, seconds=p.seconds * _nearest(ratios, p.size)) for p in before.points)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        profile = replace(before, measured=Measured(points, before.measured.ended), measured_at=at, reused="")
        old = scheduler.trend.profile
        curve = profile.measured.curve(old.max_batch, old.buckets)
        scheduler.measured_again(curve, monotonic())
        served.choices = self._sentences(before, old, profile, curve)
        served.profile = profile
        left = {name: value for name, value in served.config.parameters.items() if name != PROVISIONAL}
        served.config = replace(served.config, parameters=left)
        self._runtime.changed()
        ratio = round(ratios[min(ratios)], 3)
        _log.info("profile-measured-again", model=served.name, version=served.version, ratio=ratio)
        if isinstance(self._runtime.loading, Loading):
            await asyncio.to_thread(self._runtime.loading.keep, profile)

    def _sentences(
        self, before: Profile, old: BatchCurve, now: Profile, curve: BatchCurve
    ) -> tuple[str, ...]:
        """Those about times are made anew, the others stay."""
        slo = None if isinf(self._served.slo) else self._served.slo
        stale = set(choices(before, old, old.max_batch, slo))
        stays = (sentence for sentence in self._served.choices if sentence not in stale)
        return (*choices(now, curve, curve.max_batch, slo), *stays)


def _few(points: Sequence[Point], slo: float) -> list[Point]:
    """Returns a single image, and the largest batch that background work may run at any time."""
    short = [point for point in points if point.seconds <= _SHORT * slo]
    return [points[0], *short[-1:]] if short and short[-1] is not points[0] else [points[0]]


def _nearest(ratios: Mapping[int, float], size: int) -> float:
    return ratios[min(ratios, key=lambda other: abs(log(other / size)))]


def _answering(answer: asyncio.Future[Outcome]) -> Callable[[Work, Outcome], None]:
    def done(_work: Work, outcome: Outcome) -> None:
        if not answer.done():
            answer.set_result(outcome)

    return done
