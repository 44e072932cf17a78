"""Implements what answers in batches: the instances of a version, their scheduler, and the route to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Hashable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from carpool.backends.backend import AnswersEach, Backend, KeepsMemory
from carpool.config.backend_kinds import kind_of
from carpool.config.model import Mode, ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch, Instance
from carpool.core.job import Job, Reason
from carpool.core.numerals import numeral
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.loading.loading import Loading, Ready
from carpool.engine.models.runtime import EngineParts, InstancesRuntime
from carpool.engine.models.served import Gate, OpensGroups, Served, VersionState
from carpool.engine.models.serving_part import Seating, Stand, first, serving_parts
from carpool.engine.profile.hardware import process_age
from carpool.engine.profile.model_profile import Profile, StartTimes
from carpool.engine.profile.run_memory import MUCH_MEMORY, REST_S, give_back_all
from carpool.engine.routes.direct_route import Background, Eager
from carpool.engine.run.batch import BatchResult, Route, Watcher
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import STOPPED_S, Brief, Executes, Executor
from carpool.errors import CarpoolError, Unavailable, Unsupported
from carpool.observe import columns
from carpool.observe.logs import logger

log = logger("engine")

_LOOK_S = 0.25  # between two looks at processes that have nothing to do
_STARTING_S = 30.0  # a model whose load began so soon after the process belongs to its start
_ADVISE_FROM = 0.1  # of the promise spent waiting: below that no request is refused, or only by the engine


@runtime_checkable
class RunsElsewhere(Protocol):
    """Represents an instance in a process beside the engine."""

    def serve(self, piece: int, driver: Driver) -> Executes:
        """Begins to take batches, and to run those that are larger than `piece` in pieces."""

    def close(self) -> None: ...


class BatchRuntime(InstancesRuntime[Driver], Watcher):
    """Watches its driver: counts what it did, and replaces the instances it lost."""

    def __init__(self, served: Served, version: ModelVersion, parts: EngineParts) -> None:
        config = served.config
        caller = parts.callers(served) if kind_of(config.backend).asks_models else None
        here = partial(Loading, config, version, parts.profiles, turn=parts.turn, caller=caller)
        super().__init__(served, version, parts, here)
        self.profiles = parts.profiles
        self.seats = 1  # of each instance: requests that it has under way at once, each on its own
        self._lost_seats: frozenset[int] = frozenset()  # whose instances are not replaced yet
        self._brief: Brief | None = None  # also of instances that replace others
        self._piece = 1
        self._background: Background | None = None
        self._groups: OpensGroups | None = None
        self._seating: Seating | None = None
        self._stand: Stand | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._keep_memory: dict[int, KeepsMemory] = {}  # instances, by number
        self._gave_back = 0.0  # when it had been used last by then
        self._row = served.counters.row
        self._promises = False
        self._pending = -1  # as it was shown last
        self._saturation = -1.0  # this, too
        self._skipped = 0  # of its background work, as counted
        self._gate: Gate | None = None
        self._refusing = False  # the gate's last advice
        self._images: Counter[int] = Counter()  # by the number of them in a batch

    @property
    def idle(self) -> bool:
        return super().idle and (self._stand is None or self._stand.idle)

    def route(self) -> Route:
        if self._stand is not None:
            return self._stand
        return Eager(self.driver) if self.served.config.mode is Mode.EAGER else self.driver

    def groups(self) -> OpensGroups | None:
        """Returns what lets in the parts of an image together. It is imported where a version may have some:
        one that takes images, in batches."""
        if self._groups is None and self.served.vision is not None and self._stand is None:
            from carpool.engine.routes.image_groups import ImageGroups

            if self._seating is None:
                self._groups = ImageGroups(self.served.name, self.driver.scheduler)
        return self._groups

    def background_route(self) -> Background:
        """Returns the route for background work; the first one registers this model with the arbiter of its
        device."""
        if self._stand is not None and self._stand.why_no_background:
            raise Unsupported(f"{self.served.name}: {self._stand.why_no_background}")
        if self._background is None:
            self._parts.devices.join_background(self.driver.scheduler)
            self._background = Background(self.driver)
        return self._background

    # ---- instances --------------------------------------------------------------------------------------

    def _begin(self, ready: Ready, loop: asyncio.AbstractEventLoop) -> None:
        served, config = self.served, ready.config
        if isinstance(ready.backends[0], AnswersEach):
            served.signature = replace(ready.signature, told=True)
        self._piece, self._promises = ready.piece, served.promises
        self._patient = not served.promises
        parts = tuple(serving_parts(config))
        self._seating = seating = first(part.seating(ready) for part in parts if part.seating is not None)
        seats, policy = (1, config.policy) if seating is None else (seating.seats, seating.policy)
        self.seats = seats
        self.scheduler = scheduler = Scheduler(ready.curve, policy, seats * len(ready.backends))
        timeout, chosen = execution_timeout(config, ready.curve)
        if chosen:
            log.debug("choice", model=served.name, why=chosen)
            served.choices = (*served.choices, chosen)
        fixed = isinstance(policy, FixedBatching)
        self._driver = driver = Driver(served.name, scheduler, fixed, self, loop, timeout)
        stand = first(part.before(served, driver, loop) for part in parts if part.before is not None)
        devices = self._parts.devices
        if timeout is None or timeout >= STOPPED_S:
            self._brief = Brief(devices.loop_time)
        seated = [backend for backend in ready.backends for _ in range(seats)]
        devices.join(scheduler, seated, config.device_weight, driver.plan_turn, served.name)
        for number, backend in enumerate(ready.backends):
            self._place(number, backend)
        self._stand = stand
        self._look_now_and_then(ready, loop)

    def _look_now_and_then(self, ready: Ready, loop: asyncio.AbstractEventLoop) -> None:
        if kind_of(ready.config.backend).process == "worker":
            self._look_at_idle(loop)
        if ready.profile.memory.service >= MUCH_MEMORY:
            self._look_at_memory(loop)

    def _place(self, number: int, backend: Backend | RunsElsewhere) -> None:
        self._lost_seats -= {number}
        owners: Sequence[Backend | RunsElsewhere | Executes] = [backend]
        try:
            owners = executors = self._executors(backend)
            for instance, executor in zip(self._seated(number), executors, strict=True):
                self.driver.place(instance, executor)
        except BaseException:
            for owner in owners:
                owner.close()
            raise
        if isinstance(backend, KeepsMemory):
            self._keep_memory[number] = backend
        if self._stand is not None:
            self._stand.placed(number)

    def _executors(self, backend: Backend | RunsElsewhere) -> Sequence[Executes]:
        if isinstance(backend, RunsElsewhere):
            return [backend.serve(self._piece, self.driver)]
        signature, report = self.served.signature, self.driver.report
        if self._seating is not None and self.loop is not None:
            return self._seating.executors(backend, signature, report, self.loop)
        return [Executor(backend, signature, max(1, signature.max_batch), self._piece, report, self._brief)]

    def _seated(self, number: int) -> Sequence[Instance]:
        """Returns what the scheduler takes for instances, and are the seats of this one."""
        return list(self.driver.scheduler.instances)[number * self.seats :][: self.seats]

    def riding(self, number: int) -> Sequence[Job]:
        seats = () if self._driver is None else self._seated(number)  # none: it runs a trial, not a request
        return [job for seat in seats if seat.batch is not None for job in seat.batch.jobs]

    def _look_at_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks at idle instances: a process that dies while it has nothing to do sends no report."""
        self._looking = loop.call_later(_LOOK_S, self._look_at_idle, loop)
        self.driver.look_at_idle()

    def _look_at_memory(self, loop: asyncio.AbstractEventLoop) -> None:
        """The first batch after a rest takes up to 1.4 times as long, since all of its pages are new."""
        self._resting = loop.call_later(1.0, self._look_at_memory, loop)
        used = self.served.counters.last_used
        if used != self._gave_back and monotonic() - used > REST_S and self.idle:
            self._gave_back = used
            self._loader.submit(give_back_all, list(self._keep_memory.values()))

    def instance_lost(self, instance: Instance, why: str) -> None:
        number = instance.index // self.seats
        if number in self._lost_seats:
            return  # with another of its seats
        if self.seats > 1:
            self._lose_seats(number)
        if self._stand is not None:
            self._stand.lost(number)
        self._lost(number, why)

    def _lose_seats(self, number: int) -> None:
        """Marks all seats of the instance as lost together: no request is sent to them from here on."""
        self._lost_seats |= {number}
        for seat in self._seated(number):
            seat.available = False
        self.driver.scheduler.instances.refresh()
        asyncio.get_running_loop().call_soon(self.driver.look_at_idle)

    def _refuse(self, error: CarpoolError) -> None:
        if self._stand is not None:
            self._stand.stop(error, until_placed=True)
        super()._refuse(error)

    # ---- what the driver sees ---------------------------------------------------------------------------

    def batch_ended(self, result: BatchResult, batch: Batch) -> None:
        counters = self.served.counters
        counters.last_used = now = monotonic()
        if result.out_of_memory:
            self._row.add(columns.OUT_OF_MEMORY, result.out_of_memory)
        if batch.turn is not None and batch.turn.is_background():  # no request
            self._row.add(columns.BACKGROUND["ran"], len(batch.jobs))
            return
        if self._promises and self.scheduler is not None and self.served.state is VersionState.READY:
            # A promise rests on the profile: when that stops being true, it is said once per kind of work.
            self._row.set(columns.SPEED_RATIO, self.scheduler.belief.trend.factor)
            factor = batch.belief.trend.news(now)
            if factor is not None:
                self._warn_of_trend(round(factor, 3), batch.jobs[0].shape)
        self._images[batch.images] += batch.images
        good = [outcome.timing.queue for outcome in result.outcomes if outcome.error is None]
        if good:
            timing = result.timing
            counters.ran(batch.images, good, timing.input, timing.infer, timing.output)
            if result.clean:
                counters.recent.add(batch.images, result.seconds, now)

    # ---- what a start took ------------------------------------------------------------------------------

    def _note_ready(self) -> None:
        """Notes a model that the server loaded when it was started: how long that took is kept in its
        profile."""
        served, age = self.served, process_age()
        profile = served.profile
        if profile is None or not profile.points or not 0.0 < age < served.load_s + _STARTING_S:
            return
        served.profile = replace(profile, started=StartTimes(round(age, 2)))
        self._keep_start(served.profile.started)

    def at_full_speed(self, profile: Profile) -> Profile:
        """Does the same with the time that this took, the first time."""
        started = profile.started
        if not started.ready_s or started.full_speed_s:
            return profile
        return replace(profile, started=replace(started, full_speed_s=round(process_age(), 2)))

    def _keep_start(self, started: StartTimes) -> None:
        loading, profiles = self.loading, self.profiles
        key = loading.kept_as
        if key and profiles is not None:
            asyncio.get_running_loop().run_in_executor(None, profiles.note_start, key, started)

    def document(self, now: float) -> dict[str, Any]:
        from carpool.engine.models.batch_document import batch_document

        return batch_document(self.served, self.driver.scheduler, self.seats, now)

    def images_by_size(self, sizes: Sequence[int]) -> dict[int, int]:
        """Returns images that ran, by the size of these that their batches were padded to."""
        found = dict.fromkeys(sizes, 0)
        for images, count in self._images.items():
            size = min((size for size in sizes if size >= images), default=None)
            if size is not None:
                found[size] += count
        return found

    def _warn_of_trend(self, factor: float, shape: Hashable) -> None:
        which = {} if shape is None else {"shape": str(shape)}  # where requests may differ
        served = self.served
        log.warning("profile-drift", model=served.name, version=served.version, factor=factor, **which)

    def turned(self, scheduler: Scheduler, now: float) -> None:
        if self.served.state is not VersionState.READY:
            return  # its successor writes to the same row
        if scheduler.background is not None and scheduler.background.skipped != self._skipped:
            self._row.add(columns.BACKGROUND["skipped"], scheduler.background.skipped - self._skipped)
            self._skipped = scheduler.background.skipped
        pending = scheduler.lanes.requests
        if self._stand is not None:
            pending += self._stand.turned()
        if pending != self._pending:
            self._pending = pending
            self._row.set(columns.PENDING, pending)
        if self._promises:
            saturation = scheduler.saturation(now)
            if saturation != self._saturation:
                self._saturation = saturation
                self._row.set(columns.SATURATION, saturation)
            # Where a request would run nearly at once, none is refused: the gate need only end refusals.
            if self._gate is not None and (saturation > _ADVISE_FROM or self._refusing):
                self._refusing = self._gate(scheduler, now)

    def refused_elsewhere(self, requests: int, reason: Reason, source: str) -> None:
        """Counts requests that front ends refused: they are part of the demand. Renews the advice, too."""
        if self.scheduler is not None:
            now = monotonic()
            self.scheduler.refused_elsewhere(requests, requests, reason, now, source)
            self.turned(self.scheduler, now)

    # ---- coming and going -------------------------------------------------------------------------------

    def offered(self, gate: Gate) -> None:
        self._gate = gate
        self._note_ready()

    def work_beside(self) -> Coroutine[Any, Any, None] | None:
        if self._stand is not None or not wants_second_look(self.served):
            return None
        from carpool.engine.models.second_look import SecondLook

        return SecondLook(self).run()

    async def finish(self, timeout: float | None) -> int | None:
        if self._stand is not None:
            await self._stand.drained(timeout)
            if timeout is not None:
                self._stop()
        return await super().finish(timeout)

    def _stop(self) -> None:
        if self._stand is not None:
            self._stand.stop(Unavailable(f"{self.served.name} was unloaded", reason="unloading"))

    async def close(self) -> None:
        for timer in (self._looking, self._resting):
            if timer is not None:
                timer.cancel()
        if self._stand is not None:
            self._stop()
            self._stand.close()
        await super().close()

    def _close_driver(self, driver: Driver) -> Sequence[Executes]:
        executors = driver.close()
        self._parts.devices.leave(driver.scheduler)
        return executors


def wants_second_look(served: Served) -> bool:
    """Returns whether it promises by a provisional profile, and background work can run beside it."""
    profile = served.profile
    measured = profile is not None and profile.provisional and profile.points
    return bool(measured and not served.hosted and served.promises)


_TIMES_AS_LONG, _SHORTEST_TIMEOUT_S = 100.0, 10.0  # as its largest batch: then a batch is given up


def execution_timeout(config: ModelConfig, curve: BatchCurve) -> tuple[float | None, str]:
    """Returns after how long a batch is given up, and the words for it where that was chosen here.

    A promise knows what a batch should take; a hundred times that is no batch any more. Models without a
    promise are not measured, and may be meant to take minutes.
    """
    told = config.execution_timeout
    if config.decoupled:
        return None, ""  # its backend watches the time from answer to answer
    if told is not None:
        return told or None, ""  # 0: never
    if not isinstance(config.policy, Promise):
        return None, ""
    seconds = max(_SHORTEST_TIMEOUT_S, _TIMES_AS_LONG * curve.times[curve.max_batch])
    return seconds, (
        f"A batch that takes longer than {numeral(seconds)} s is given up ({_TIMES_AS_LONG:g} times what the "
        f"largest takes, at least {_SHORTEST_TIMEOUT_S:g} s); execution_timeout_ms changes that."
    )
