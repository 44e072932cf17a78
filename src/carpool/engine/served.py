"""One version of one model, from loading to unloading: its instances, its scheduler and its figures."""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic, time

from carpool import backends
from carpool.backends.backend import Backend
from carpool.config.model import ModelConfig, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch, Instance
from carpool.core.job import Reason
from carpool.core.policy import Knobs, Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.driver import Driver
from carpool.engine.executor import BatchResult, Executor
from carpool.engine.warmup import best_piece, measure, run_time
from carpool.engine.work import Work
from carpool.errors import CarpoolError, ConfigError, ModelError, Unavailable
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.directory import Slot
from carpool.observe.logs import logger
from carpool.observe.statistics import BatchStatistics
from carpool.types import DATATYPES, Signature, TensorSpec

log = logger("engine")

_CLEARLY_FASTER = 0.8
_SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one
_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 30.0


class State(enum.StrEnum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class Ready:
    """What loading produced, before it serves."""

    config: ModelConfig
    signature: Signature
    curve: BatchCurve
    backends: list[Backend]


class Served:
    """Watches its driver: counts what it did, and replaces the instances it lost."""

    def __init__(
        self, config: ModelConfig, version: ModelVersion, slot: Slot, row: Row, server_row: Row
    ) -> None:
        self.name = config.name
        self.version = str(version.number)
        self.config = config
        self.state = State.LOADING
        self.reason = ""
        self.signature = Signature(config.name, (), ())
        self.batches = BatchStatistics()
        self.promises = False
        self.gate: Callable[[Scheduler, float], None] = lambda _scheduler, _now: None
        self.slot = slot  # where its counters are
        self.row = row
        self._server_row = server_row
        self._version = version
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Driver | None = None
        self._piece = 1
        self._threads: int | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{config.name}-loader")

    @property
    def driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    # ---- loading ----------------------------------------------------------------------------------------

    async def load(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Load, warm up and measure, off the loop; raises what went wrong after noting it."""
        began = monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            ready = await self._loop.run_in_executor(self._loader, self._prepare, progress)
        except CarpoolError as error:
            self.state, self.reason = State.UNAVAILABLE, error.message
            raise
        self._begin(ready)
        self.state = State.READY
        seconds = monotonic() - began
        self.row.set(columns.LOAD_SECONDS, seconds)
        log.info("model-ready", model=self.name, version=self.version, seconds=round(seconds, 3))

    def _prepare(self, progress: Callable[[str], None]) -> Ready:
        config = backends.describe(self.config, self._version)
        count = instance_count(config)
        signature = signature_of(config)
        loaded: list[Backend] = []
        try:
            for index in range(count):
                progress(f"loading instance {index + 1} of {count}")
                loaded.append(self._load_backend(config, index, count))
            curve = self._warm_up(config, loaded, signature, progress)
        except BaseException:
            for backend in loaded:
                backend.close()
            raise
        return Ready(config, signature, curve, loaded)

    def _load_backend(self, config: ModelConfig, index: int, count: int) -> Backend:
        if self._threads is None:
            self._threads = self._choose_threads(config, count)
        return backends.load(config, self._version, instance=index, threads=self._threads)

    def _choose_threads(self, config: ModelConfig, count: int) -> int:
        """Several threads for one run only where they clearly shorten it: small models only pay for them."""
        shared = backends.default_threads(count, len(os.sched_getaffinity(0)))
        if shared == 1 or config.backend != "onnxruntime" or config.onnxruntime.intra_op_threads:
            return shared
        alone = self._try(config, 1)
        if alone is not None and alone < _SHORT_S:
            return 1
        together = self._try(config, shared)
        if alone is None or together is None:
            return shared  # it cannot be tried on zeros; what is wrong is told later, if it matters
        return shared if together < _CLEARLY_FASTER * alone else 1

    def _try(self, config: ModelConfig, threads: int) -> float | None:
        """Seconds for one image with so many threads."""
        backend = backends.load(config, self._version, threads=threads)
        try:
            return run_time(backend, signature_of(config), 1)
        except CarpoolError:
            return None
        finally:
            backend.close()

    def _warm_up(
        self,
        config: ModelConfig,
        loaded: list[Backend],
        signature: Signature,
        progress: Callable[[str], None],
    ) -> BatchCurve:
        try:
            curve = measure(config, loaded[0], signature, lambda n: progress(f"measuring a batch of {n}"))
            if config.fake is None:
                for backend in loaded[1:]:
                    run_time(backend, signature, max(1, signature.max_batch))
        except ModelError as error:
            if isinstance(config.policy, Promise):
                raise ModelError(
                    f"{config.name}: a promise needs a measured model, and warming up failed: {error.message}"
                ) from error
            if not all(backend.alive for backend in loaded):
                raise
            log.warning("warm-up-failed", model=config.name, error=error.message)
            curve = BatchCurve.linear(0.001, 0.001, max(1, signature.max_batch))
        if isinstance(config.policy, Promise) and curve.times[1] > config.policy.slo:
            alone = curve.times[1] * 1e3
            raise ConfigError(
                f"{config.name}: one image takes {alone:.3g} ms here, so slo_ms = "
                f"{config.policy.slo * 1e3:g} cannot be kept; promise at least {2.2 * alone:.3g} ms"
            )
        return curve

    def _begin(self, ready: Ready) -> None:
        assert self._loop is not None
        self.config, self.signature = ready.config, ready.signature
        self._piece = best_piece(ready.curve) if ready.config.fake is None else ready.curve.max_batch
        policy = ready.config.policy
        self.promises = isinstance(policy, Promise)
        scheduler = Scheduler(ready.curve, policy, len(ready.backends))
        knobs = isinstance(policy, Knobs)
        timeout = ready.config.execution_timeout
        self._driver = Driver(self.name, scheduler, knobs, self, self._loop, timeout)
        for instance, backend in zip(scheduler.instances, ready.backends, strict=True):
            self._driver.place(instance, self._executor(backend))

    def _executor(self, backend: Backend) -> Executor:
        largest = max(1, self.signature.max_batch)
        return Executor(backend, self.signature, largest, self._piece, self.driver.report)

    # ---- what the driver sees ---------------------------------------------------------------------------

    def batch_ended(self, works: Sequence[Work], result: BatchResult, batch: Batch) -> None:
        good = [
            max(0.0, batch.started - work.arrived)
            for work, outcome in zip(works, result.outcomes, strict=True)
            if outcome.error is None
        ]
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
        nanoseconds = (round(part * 1e9) for part in (timing.input, timing.infer, timing.output))
        self.batches.add(batch.images, *nanoseconds)

    def turned(self, scheduler: Scheduler, now: float) -> None:
        self.row.set(columns.PENDING, scheduler.lanes.requests)
        if self.promises:
            self.row.set(columns.SATURATION, scheduler.saturation(now))
            self.gate(scheduler, now)

    def refused_elsewhere(self, requests: int, reason: Reason) -> None:
        """Front ends said no on our advice: their traffic counts all the same."""
        if self._driver is not None:
            self.driver.scheduler.refused_elsewhere(requests, requests, reason, monotonic())

    def instance_lost(self, instance: Instance, why: str) -> None:
        log.warning("instance-lost", model=self.name, version=self.version, instance=instance.index, why=why)
        if self.state is State.READY:
            task = asyncio.get_running_loop().create_task(self._replace(instance))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, instance: Instance) -> None:
        """Load a new instance, with patience: whatever killed the last one may do so again."""
        assert self._loop is not None
        delay = _FIRST_RETRY_S
        while self.state is State.READY:
            try:
                count = len(self.driver.scheduler.instances)
                backend = await self._loop.run_in_executor(
                    self._loader, self._load_backend, self.config, instance.index, count
                )
            except CarpoolError as error:
                log.error("instance-not-replaced", model=self.name, error=error.message, retry_s=delay)
                if not any(i.available for i in self.driver.scheduler.instances):
                    gone = Unavailable(f"{self.name} is down and is being restarted", reason="restarting")
                    self.driver.refuse_from_now_on(gone)
                    self.driver.fail_waiting(gone)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_S)
                continue
            self.driver.accept_again()
            self.driver.place(instance, self._executor(backend))
            if self.config.backend == "python":
                self._server_row.add(columns.RESTARTS["worker"])
            log.info("instance-replaced", model=self.name, version=self.version, instance=instance.index)
            return

    # ---- unloading --------------------------------------------------------------------------------------

    async def unload(self, timeout: float) -> None:
        """Finish what was accepted, within this time, and free the model."""
        if self._driver is None:
            self._loader.shutdown(wait=False)
            return
        self.state = State.UNLOADING
        self.driver.refuse_from_now_on(Unavailable(f"{self.name} is being unloaded", reason="unloading"))
        for task in list(self._replacing):
            task.cancel()
        if not await self.driver.drained(timeout):
            log.warning("drain-timeout", model=self.name, waiting=self.driver.scheduler.lanes.requests)
        self.driver.close()
        self._loader.shutdown(wait=False)
        self.state, self.reason = State.UNAVAILABLE, "unloaded"


def instance_count(config: ModelConfig) -> int:
    """Without a GPU, groups that ask for one run on the CPU: the counts add up."""
    return max(1, sum(group.count * max(1, len(group.gpus)) for group in config.instances))


def signature_of(config: ModelConfig) -> Signature:
    def specs(tensors: Sequence[TensorConfig]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t.name, DATATYPES[t.datatype], t.dims) for t in tensors)

    return Signature(config.name, specs(config.inputs), specs(config.outputs), config.max_batch or 0)
