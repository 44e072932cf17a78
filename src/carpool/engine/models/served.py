"""One version of one model, from loading to unloading: its instances, its scheduler and its figures."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from time import monotonic, time
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import orjson

from carpool.backends.backend import AnswersEach, AsksModels, Backend
from carpool.config.backend_kinds import kind_of
from carpool.config.fingerprint import settings_of_answers, whole_digest
from carpool.config.model import InstanceKind, Mode, ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.instance import Batch, Instance
from carpool.core.job import INFINITY, Reason
from carpool.core.objectives import Knobs, Promise
from carpool.core.pinned import pin
from carpool.core.scaling import capacity
from carpool.core.scheduler import Scheduler
from carpool.core.spare import SpareTurn
from carpool.engine.generation.text_loading import TextLoading
from carpool.engine.loading.candidate import Upload
from carpool.engine.loading.hosted_model import HostedInstance, HostedLoading
from carpool.engine.loading.loading import Loading, Ready, execution_timeout, join_all
from carpool.engine.profile.instance_layout import Devices
from carpool.engine.profile.model_profile import Profile, ProfileStore
from carpool.engine.routes.direct_route import Direct, Spare
from carpool.engine.routes.sequence_route import SequenceRoute
from carpool.engine.routes.stream_route import StreamRoute
from carpool.engine.run.batch import BatchResult, Route, Watcher
from carpool.engine.run.decoupled import DecoupledInstance, places_of
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import STOPPED_S, Brief, Executes, Executor
from carpool.errors import CarpoolError, Unavailable, Unsupported
from carpool.observe import columns
from carpool.observe.counters import CounterRow, Row, count_failure
from carpool.observe.logs import logger
from carpool.observe.statistics import BatchStatistics, RecentBatches
from carpool.types import Signature
from carpool.vision.plans.settings import VisionSettings
from carpool.vision.plans.settings import write as write_vision

if TYPE_CHECKING:
    from carpool.engine.loading.runner_client import Runner

log = logger("engine")

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 30.0
_PATIENCE_S = 10.0  # for so long requests without a promise wait for an instance that is being replaced
_LOOK_S = 0.25  # between two looks at processes that have nothing to do
_ADVISE_FROM = 0.1  # of the promise spent waiting: below that no newcomer is refused, or only by the engine

T = TypeVar("T")


Callers: TypeAlias = "Callable[[Served, int], AsksModels]"
"""Takes a version and the number of an instance, and is called in a thread of its loading."""


class VersionState(enum.StrEnum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Served(Watcher):
    """Watches its driver: counts what it did, and replaces the instances it lost."""

    is_ensemble = False  # it runs nothing itself
    writes = False  # its answers come token by token
    seats = 1  # of each instance: requests that it has under way at once, each on its own
    _lost: frozenset[int] = frozenset()  # instances with seats, until others are in their place
    _brief: Brief | None = None  # also of instances that replace others

    def __init__(
        self,
        config: ModelConfig,
        version: ModelVersion,
        slot: CounterRow,
        row: Row,
        server_row: Row,
        *,
        identity: object = None,
        upload: Upload | None = None,
        profiles: ProfileStore | None = None,
        devices: Devices | None = None,
        host: Runner | None = None,
        turn: AbstractContextManager[object] | None = None,
        callers: Callers | None = None,
    ) -> None:
        self.name = config.name
        self.version = str(version.number)
        self.config = config
        self.state = VersionState.LOADING
        self.signature = Signature(config.name, (), ())
        self.labels: Mapping[str, Sequence[str]] = {}  # by output
        self.vision: VisionSettings | None = None  # how it answers pictures, if it does
        self.identity = identity  # equal for what is made of the same files and settings
        self.upload = upload
        self.last_used = monotonic()  # its last batch, or else its beginning
        self.made_of = ""  # a digest of its files
        self._version = version
        self.batches = BatchStatistics()
        self.recent = RecentBatches()
        self.promises = False
        self.profile: Profile | None = None  # as it was loaded; what is believed now is the scheduler's
        self.choices: Sequence[str] = ()  # what was chosen for it and why, in words
        self.gate: Callable[[Scheduler, float], bool] = lambda _scheduler, _now: False
        self.changed: Callable[[], None] = lambda: None  # told when it becomes able or unable to run anything
        self._was_able = True
        self._pending = -1  # as it was shown last
        self._saturation = -1.0  # this, too
        self._refusing = False  # the gate's last advice
        self.slot = slot  # where its counters are
        self.row = row
        self._server_row = server_row
        there = None if host is None else host.loading(config, version)
        self.hosted = there is not None  # it runs in another process
        caller = None if callers is None else partial(callers, self)
        here = TextLoading(config, version) if config.generate is not None else None
        self.loading: Loading | TextLoading | HostedLoading = (
            there or here or Loading(config, version, profiles, turn=turn, caller=caller)
        )
        self._devices = devices or Devices()
        self._leave_devices: Callable[[], None] = lambda: None
        self._spare: Spare | None = None
        self._sequences: SequenceRoute | None = None  # of a model that has them
        self._streams: StreamRoute | None = None  # of a decoupled one
        self._skipped = 0  # of its spare work, as counted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Driver | None = None
        self._piece = 1
        self._closed = False
        self._looking: asyncio.TimerHandle | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{config.name}-loader")

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return self._loop

    @property
    def slo(self) -> float:
        policy = self.config.policy
        return policy.slo if isinstance(policy, Promise) else INFINITY

    def route(self) -> Route:
        """How its requests are answered."""
        return self._sequences or self._streams or Direct(self.driver, eager=self._eager)

    @property
    def _eager(self) -> bool:
        return self.config.mode is Mode.EAGER

    def picture_document(self) -> Mapping[str, Any] | None:
        """How it answers pictures, for front ends; None: it takes only tensors."""
        return None if self.vision is None else write_vision(self.vision)

    def answers_digest(self) -> str:
        """Of all that its answers follow from: two models that have the same one answer the same."""
        settings = settings_of_answers(self.config)
        parts = [self._made_of(), settings, self.picture_document(), self.labels]
        text = orjson.dumps(parts, default=list, option=orjson.OPT_NON_STR_KEYS)
        return blake2b(text, digest_size=16).hexdigest()

    def _made_of(self) -> Sequence[str]:
        return [self.made_of]

    @property
    def scheduler(self) -> Scheduler | None:
        """None before it is loaded, and of what runs nothing itself."""
        return None if self._driver is None else self._driver.scheduler

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    def idle(self) -> bool:
        """Nobody waits and nothing runs; nor would a sequence lose its state if it were unloaded."""
        if self._sequences is not None and self._sequences.law.live:
            return False
        return self._driver is None or self._driver.idle

    # ---- loading ----------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Raises what can be seen to be wrong without loading."""
        await self._off_the_loop(self.loading.check, lambda _: None)

    async def load(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Load, warm up and measure, off the loop; it serves once it is offered. Raises what went wrong."""
        began = monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            self.made_of = await self._digest()
            ready = await self._off_the_loop(lambda: self.loading.prepare(progress), Ready.close)
        except CarpoolError:
            self.state = VersionState.UNAVAILABLE
            raise
        self._begin(ready)
        seconds = monotonic() - began
        self.row.set(columns.LOAD_SECONDS, seconds)
        facts = {**self._facts(), "seconds": round(seconds, 1)}
        log.info("model-ready", model=self.name, version=self.version, **facts)

    def _facts(self) -> dict[str, object]:
        """What an operator wants to know of a model that serves; why it is so is in its profile."""
        config, layout = self.config, None if self.profile is None else self.profile.layout
        gpus = sorted({gpu for group in config.instances for gpu in group.gpus})
        facts: dict[str, object] = {"engine": config.backend, "device": _device(config, gpus)}
        if layout is not None:
            facts["instances"] = f"{layout.instances}x{layout.threads}"
        if self.profile is not None and self.profile.provisional:
            facts["provisional"] = self.profile.provisional
        facts["max_batch"] = self.signature.max_batch
        if isinstance(config.policy, Promise):
            facts["slo_ms"] = round(config.policy.slo * 1e3, 3)
        if self.scheduler is not None and (able := capacity(self.scheduler)):
            facts["capacity_rps"] = round(able, 1)
        return facts

    async def _digest(self) -> str:
        file = self._version.file
        if file is None:
            return ""
        return await self._off_the_loop(partial(whole_digest, file, self.config.path), lambda _: None)

    async def _off_the_loop(self, work: Callable[[], T], drop: Callable[[T], None]) -> T:
        """Work in the loader's thread. What it made is dropped when nobody waits for it any more."""
        future = self._loader.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else drop(done.result())
            )
            raise

    def _begin(self, ready: Ready) -> None:
        assert self._loop is not None
        self.config, self.signature, self.labels = ready.config, ready.signature, ready.labels
        self.vision = ready.vision
        if isinstance(ready.backends[0], AnswersEach) or ready.config.sequences is not None:
            self.signature = replace(ready.signature, told=True)
        self.profile, self.choices, self._piece = ready.profile, ready.choices, ready.piece
        policy = ready.config.policy
        self.promises = isinstance(policy, Promise)
        knobs = isinstance(policy, Knobs)
        seats = self.seats = places_of(ready.backends[0]) if ready.config.decoupled else 1
        if seats > 1 and isinstance(policy, Knobs):  # each is for one request, and nobody waits for others
            policy = replace(policy, preferred=(1,), max_delay=0.0)
        scheduler = Scheduler(ready.curve, policy, seats * len(ready.backends))
        sequences = ready.config.sequences
        if sequences is not None:
            pin(scheduler, sequences.knobs(policy) if isinstance(policy, Knobs) else None)
        timeout, chosen = execution_timeout(ready.config, ready.curve)
        if chosen:
            log.debug("choice", model=self.name, why=chosen)
            self.choices = (*self.choices, chosen)
        self._driver = driver = Driver(self.name, scheduler, knobs, self, self._loop, timeout)
        if timeout is None or timeout >= STOPPED_S:
            self._brief = Brief(self._devices.loop_time)
        weight = ready.config.device_weight
        seated = [backend for backend in ready.backends for _ in range(seats)]
        self._leave_devices = self._devices.join(scheduler, seated, weight, driver.plan_turn, self.name)
        for number, backend in enumerate(ready.backends):
            self._place(number, backend)
        if sequences is not None:
            self._sequences = SequenceRoute(self.name, driver, sequences, self._loop, self.slo)
        if ready.config.decoupled:
            places = seats * len(ready.backends)
            self._streams = StreamRoute(self.name, driver, places, self._loop, eager=self._eager)
        if kind_of(ready.config.backend).process == "worker":
            self._look_at_idle()

    def _place(self, number: int, backend: Backend | HostedInstance) -> None:
        owners: Sequence[Backend | HostedInstance | Executes] = [backend]
        try:
            owners = executors = self._executors(backend)
            for instance, executor in zip(self.seated(number), executors, strict=True):
                self.driver.place(instance, executor)
        except BaseException:
            for owner in owners:
                owner.close()
            raise

    def _executors(self, backend: Backend | HostedInstance) -> Sequence[Executes]:
        if isinstance(backend, HostedInstance):
            return [backend.serve(self._piece, self.driver)]
        largest, report = max(1, self.signature.max_batch), self.driver.report
        if self.config.decoupled and self._loop is not None:
            return DecoupledInstance(backend, self.signature, report, self._loop).places
        return [Executor(backend, self.signature, largest, self._piece, report, self._brief)]

    def seated(self, number: int) -> Sequence[Instance]:
        """What the scheduler takes for instances, and are the seats of this one."""
        instances = self.driver.scheduler.instances
        return [instances[number * self.seats + seat] for seat in range(self.seats)]

    def spare_route(self) -> Spare:
        """For work that nobody waits for. From the first on, whoever shares its device must be asked."""
        if self._sequences is not None:
            raise Unsupported(
                f"{self.name}: nothing is run beside its sequences, whose states it would change"
            )
        if self._spare is None:
            self._devices.join_spare(self.driver.scheduler)
            self._spare = Spare(self.driver)
        return self._spare

    # ---- what the driver sees ---------------------------------------------------------------------------

    def batch_ended(self, result: BatchResult, batch: Batch) -> None:
        self.last_used = monotonic()
        if result.out_of_memory:
            self.row.add(columns.OUT_OF_MEMORY, result.out_of_memory)
        if isinstance(batch.turn, SpareTurn):  # no request
            self.row.add(columns.SPARE["ran"], len(batch.jobs))
            return
        self._watch_speed(batch)
        good = [outcome.timing.queue for outcome in result.outcomes if outcome.error is None]
        if not good:
            return
        timing = result.timing
        self.row.add_batch(
            batch.images,
            good,
            input_s=timing.input,
            infer_s=timing.infer,
            output_s=timing.output,
            ended_ms=time() * 1e3,
        )
        input_ns, infer_ns = round(timing.input * 1e9), round(timing.infer * 1e9)
        self.batches.add(batch.images, input_ns, infer_ns, round(timing.output * 1e9))
        if result.clean:
            self.recent.add(batch.images, result.seconds, self.last_used)

    def count_asked(self, error: CarpoolError | None, seconds: float) -> None:
        """Another model of this engine asked it, as a step or by a call of its own, and this came of it. What
        clients ask is counted by their front ends."""
        if error is None:
            self.row.observe(columns.REQUEST_SECONDS, seconds)
        else:
            count_failure(self.row, error, seconds)

    def _watch_speed(self, batch: Batch) -> None:
        """A promise rests on the profile: when that stops being true, whoever watches should know, once for
        each kind of work."""
        if not self.promises or self.state is not VersionState.READY:
            return
        assert self._driver is not None
        self.row.set(columns.SPEED_RATIO, self._driver.scheduler.belief.drift.factor)
        factor = batch.belief.drift.news(monotonic())
        if factor is not None:
            shape = batch.jobs[0].shape
            which = {} if shape is None else {"shape": str(shape)}  # told where requests may differ
            factor = round(factor, 3)
            log.warning("profile-drift", model=self.name, version=self.version, factor=factor, **which)

    def turned(self, scheduler: Scheduler, now: float) -> None:
        if self.state is not VersionState.READY:
            return  # its successor writes to the same row
        if scheduler.spare is not None and scheduler.spare.skipped != self._skipped:
            self.row.add(columns.SPARE["skipped"], scheduler.spare.skipped - self._skipped)
            self._skipped = scheduler.spare.skipped
        pending = scheduler.lanes.requests + (0 if self._streams is None else self._streams.law.held)
        if self._sequences is not None:
            law = self._sequences.law
            pending += law.waiting
            self.row.set(columns.SEQUENCES["live"], law.live)
            self.row.set(columns.SEQUENCES["backlog"], law.backlog)
        if pending != self._pending:
            self._pending = pending
            self.row.set(columns.PENDING, pending)
        if self.promises:
            saturation = scheduler.saturation(now)
            if saturation != self._saturation:
                self._saturation = saturation
                self.row.set(columns.SATURATION, saturation)
            # Who would run nearly at once is not refused: it is left to say that nobody is any more.
            if saturation > _ADVISE_FROM or self._refusing:
                self._refusing = self.gate(scheduler, now)

    def refused_elsewhere(self, requests: int, reason: Reason, source: str) -> None:
        """Front ends said no on our advice: their traffic counts all the same, and they need it fresh."""
        if self._driver is not None:
            scheduler, now = self.driver.scheduler, monotonic()
            scheduler.refused_elsewhere(requests, requests, reason, now, source)
            self.turned(scheduler, now)

    @property
    def able(self) -> bool:
        """Whether any instance could run a batch now: what readiness means."""
        return self._driver is not None and self._driver.able

    @property
    def why_not(self) -> str:
        """Said of one that is offered and not able."""
        return "its instances are being restarted"

    def look_at_instances(self) -> None:
        """One of them was lost or placed, or the process that runs them has stalled or moves again."""
        able = self.able
        if able:
            self.driver.accept_again()
        elif self.promises:  # a restart takes longer than what is promised; without that, one may wait
            self._refuse_if_down()
        elif self._was_able and self._loop is not None:
            self._loop.call_later(_PATIENCE_S, self._refuse_if_down)
        if able != self._was_able:
            self.changed()
            self._was_able = able  # told: else the next look tells it

    def _look_at_idle(self) -> None:
        """A process that dies while it has nothing to do tells nobody."""
        assert self._loop is not None
        self._looking = self._loop.call_later(_LOOK_S, self._look_at_idle)
        self.driver.look_at_idle()

    def instance_lost(self, instance: Instance, why: str) -> None:
        number = instance.index // self.seats
        if number in self._lost:
            return  # with another of its seats
        if self.seats > 1:
            self._lose_seats(number)
        log.warning("instance-lost", model=self.name, version=self.version, instance=number, why=why)
        if self._sequences is not None:
            self._sequences.lost(number)
        if not self._closed:
            self.look_at_instances()
            task = asyncio.get_running_loop().create_task(self._replace(instance))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    def _lose_seats(self, number: int) -> None:
        """They are lost together: nobody is sent to any of them from here on."""
        self._lost |= {number}
        for seat in self.seated(number):
            seat.available = False
        self.driver.scheduler.instances.refresh()
        asyncio.get_running_loop().call_soon(self.driver.look_at_idle)

    async def _replace(self, instance: Instance) -> None:
        """Load a new instance, with patience: whatever killed the last one may do so again."""
        delay = _FIRST_RETRY_S
        placed = False
        while not self._closed:
            try:
                if not placed:
                    await self._load_in_place_of(instance)
                placed = True  # once: another would push it out, and nobody would ever close it
                self.look_at_instances()
            except Exception as error:  # also no memory, no process, no thread: the usual reasons why it died
                if isinstance(error, CarpoolError):
                    log.error("instance-not-replaced", model=self.name, error=error.message, retry_s=delay)
                else:
                    log.exception("instance-not-replaced", model=self.name, retry_s=delay)
                self._refuse_if_down()
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_S)
                continue
            if kind_of(self.config.backend).process == "worker":
                self._server_row.add(columns.RESTARTS["worker"])
            number = instance.index // self.seats
            log.info("instance-replaced", model=self.name, version=self.version, instance=number)
            return

    async def _load_in_place_of(self, instance: Instance) -> None:
        number, count = instance.index // self.seats, len(self.driver.scheduler.instances) // self.seats
        backend: Backend | HostedInstance = await self._off_the_loop(
            lambda: cast(Any, self.loading.backend(number, count)), lambda late: late.close()
        )
        self._lost -= {number}
        self._place(number, backend)
        if self._sequences is not None:
            self._sequences.placed(number)

    def _refuse_if_down(self) -> None:
        if not self._closed and not self.able:
            error = Unavailable(f"{self.name} is down and is being restarted", reason="restarting")
            if self._sequences is not None:
                self._sequences.stop(error, until_placed=True)
            if self._streams is not None:
                self._streams.stop(error)
            self.driver.refuse_until_placed(error)

    # ---- coming and going -------------------------------------------------------------------------------

    def offer(self) -> None:
        self.state = VersionState.READY
        self.row.set(columns.SLO_SECONDS, self.slo if self.slo < INFINITY else 0.0)
        if self.promises:
            self.row.set(columns.SPEED_RATIO, 1.0)

    def withdraw(self) -> None:
        """Not offered any more; whoever comes all the same is still served."""
        self.state = VersionState.UNLOADING

    async def retire(self) -> None:
        """Free the model when its last rider has left, however long that takes."""
        if self._sequences is not None:
            await self._sequences.drained(None)
        if self._streams is not None:
            await self._streams.drained(None)
        if self._driver is not None:
            while not await self.driver.drained(None):
                """Somebody came while it was being said that nobody was there."""
        await self._close()

    async def unload(self, timeout: float) -> None:
        """Finish what was accepted, within this time, and free the model."""
        self.withdraw()
        if self._sequences is not None:
            await self._sequences.drained(timeout)
            self._sequences.stop(Unavailable(f"{self.name} was unloaded", reason="unloading"))
        if self._streams is not None:
            await self._streams.drained(timeout)
        if self._driver is not None:
            self.driver.refuse_from_now_on(Unavailable(f"{self.name} is being unloaded", reason="unloading"))
            if not await self.driver.drained(timeout):
                waiting = self.driver.scheduler.lanes.requests
                log.warning("drain-timeout", model=self.name, waiting=waiting)
        await self._close()

    async def _close(self) -> None:
        self._closed = True
        self.state = VersionState.UNAVAILABLE
        if self._looking is not None:
            self._looking.cancel()
        for task in list(self._replacing):
            task.cancel()
        if self._sequences is not None:
            self._sequences.stop(Unavailable(f"{self.name} was unloaded", reason="unloading"))
            self._sequences.close()
        if self._streams is not None:
            self._streams.stop(Unavailable(f"{self.name} was unloaded", reason="unloading"))
            self._streams.close()
        if self._driver is not None:
            idle = self._driver.idle
            executors = self._driver.close()
            self._leave_devices()
            if idle:  # else a thread is stuck in the model, and nobody should wait for it
                await asyncio.to_thread(join_all, executors)
        self._loader.shutdown(wait=False)
        if self.upload is not None:
            await asyncio.to_thread(self.upload.leave)
            self.upload = None


def _device(config: ModelConfig, gpus: Sequence[int]) -> str:
    kinds = {group.kind for group in config.instances}
    if InstanceKind.GPU in kinds:
        return ",".join(f"cuda:{gpu}" for gpu in gpus) or "cuda"
    chooses = kind_of(config.backend).pictures_on_device  # a GPU where there is one: only the runner knows
    return "auto" if chooses and kinds != {InstanceKind.CPU} else "cpu"
