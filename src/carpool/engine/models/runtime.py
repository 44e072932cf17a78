"""Defines what answers the requests of a version; and how instances are loaded for that, and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from carpool.backends.backend import AsksModels
from carpool.config.backend_kinds import kind_of
from carpool.config.fingerprint import whole_digest
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.loading.loading import Ready
from carpool.engine.models.served import Runtime, Served
from carpool.engine.profile.instance_layout import Devices
from carpool.engine.profile.model_profile import ProfileStore
from carpool.engine.run.batch import Route
from carpool.engine.run.step_memory import StepMemory
from carpool.errors import CarpoolError, Unavailable
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.logs import logger
from carpool.vision.plans.settings import write as write_vision

log = logger("engine")

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 30.0
_PATIENCE_S = 10.0  # for so long requests without a promise wait for an instance that is being replaced

T = TypeVar("T")

Callers: TypeAlias = Callable[[Served], Callable[[int], AsksModels]]
"""How the instance of this number asks other models; called in a thread that loads it."""

_CLOSE_S = 10.0  # for an idle instance to give back what it has


class Models(Protocol):
    """Finds all that is served, by name and version (-1: the newest): the key, the model and its route."""

    memory: StepMemory | None

    def step_row(self, name: str, version: str, step: str) -> Row:
        """Returns where a part of a model is counted."""

    def find(self, name: str, version: int = -1) -> tuple[int, Served, Route] | None: ...


class Loads(Protocol):
    """Defines how the instances of a version are made. Everything is called off the loop."""

    def check(self) -> None:
        """Raises what can be seen to be wrong without loading."""

    def prepare(self, tell: Callable[[str], None], /) -> Ready:
        """Returns warm and measured instances."""

    def backend(self, index: int, count: int, /) -> Any:
        """Returns one more instance, of `count`."""

    def abort(self) -> None:
        """Ends a load that is under way as soon as possible; called from another thread."""

    @property
    def kept_as(self) -> str:
        """Returns the key of the profile that it has stored; empty: it stores none."""


class ModelProcess(Protocol):
    """Defines a process beside the engine, which runs some of its models."""

    max_answer_bytes: int

    def loading(self, config: ModelConfig, version: ModelVersion) -> Loads | None:
        """Returns how the instances of this model are made there; None: it runs in the engine's process."""

    def share(self, arena: int, file: int) -> None:
        """Lets it map the memory of a front end, which has this number from here on."""

    def unshare(self, arena: int) -> None:
        """Takes that back."""

    def follow_logging(self, settings: Mapping[str, Any]) -> None:
        """Logs as these settings say from here on."""

    async def close(self) -> None: ...


class Drives(Protocol):
    """Defines what stands between a runtime's requests and its instances."""

    @property
    def able(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    @property
    def riders(self) -> int:
        """Returns how many requests it has."""

    def accept_again(self) -> None: ...

    def refuse_from_now_on(self, error: CarpoolError, /) -> None: ...

    def refuse_until_placed(self, error: CarpoolError, /) -> None: ...

    async def drained(self, timeout: float | None, /) -> bool:
        """Waits until it has no request. False: that took too long."""

    def close(self) -> Sequence[Any]:
        """Returns what is to be joined."""


DriverT = TypeVar("DriverT", bound=Drives)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Holds what all versions of an engine load with."""

    devices: Devices
    turn: AbstractContextManager[object]  # held while times are taken: others would disturb that
    profiles: ProfileStore | None
    host: ModelProcess | None
    callers: Callers
    models: Models
    changed: Callable[[], None]  # called when a version becomes able or unable to run anything


class InstancesRuntime(Runtime, Generic[DriverT]):
    """Loads instances off the loop, gives them to a driver, and replaces those that it lost."""

    _joins_busy = False  # also an executor that is busy when it is closed ends soon

    def __init__(
        self, served: Served, version: ModelVersion, parts: EngineParts, here: Callable[[], Loads]
    ) -> None:
        """`here` loads it in this process."""
        super().__init__(served)
        there = None if parts.host is None else parts.host.loading(served.config, version)
        self.hosted = there is not None
        self.loading: Loads = there or here()
        self.instances = 0
        self.changed = parts.changed
        self._parts = parts
        self._file = version.file
        self._digest = ""
        self._driver: DriverT | None = None
        self._was_able = True
        self._patient = False  # requests may wait a while for an instance that is being replaced
        self._closed = False
        self._replacing: set[asyncio.Task[None]] = set()
        self.replaced = asyncio.Event()  # an instance was, since the event was last cleared
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{served.name}-loader")

    @property
    def driver(self) -> DriverT:
        assert self._driver is not None
        return self._driver

    @property
    def why_not(self) -> str:
        return "" if self._able else "its instances are being restarted"

    @property
    def _able(self) -> bool:
        return self._driver is not None and self._driver.able

    @property
    def idle(self) -> bool:
        return self._driver is None or self._driver.idle

    # ---- loading ----------------------------------------------------------------------------------------

    async def check(self) -> None:
        await self._off_the_loop(self.loading.check, lambda _: None)

    async def load(self, progress: Callable[[str], None]) -> None:
        self.loop = asyncio.get_running_loop()
        if self._file is not None:
            digest = partial(whole_digest, self._file, self.served.config.path)
            self._digest = await self._off_the_loop(digest, lambda _: None)
        ready = await self._off_the_loop(lambda: self.loading.prepare(progress), Ready.close)
        served = self.served
        served.config, served.signature, served.labels = ready.config, ready.signature, ready.labels
        served.vision, served.profile, served.choices = ready.vision, ready.profile, ready.choices
        served.pictures = None if ready.vision is None else write_vision(ready.vision)
        self.instances = len(ready.backends)
        self._begin(ready, self.loop)

    def _begin(self, ready: Ready, loop: asyncio.AbstractEventLoop) -> None:
        """Make the driver, and place the instances."""
        raise NotImplementedError

    def _place(self, number: int, backend: Any) -> None:
        """This is an instance from now on; if that fails, it is closed."""
        raise NotImplementedError

    def made_of(self) -> Sequence[str]:
        return [self._digest]

    async def _off_the_loop(self, work: Callable[[], T], drop: Callable[[T], None]) -> T:
        """Does work in the loader's thread. Its result is dropped when the caller no longer waits for it."""
        future = self._loader.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(
                lambda done: None if done.cancelled() or done.exception() else drop(done.result())
            )
            raise

    # ---- instances that are lost ------------------------------------------------------------------------

    def look_at_instances(self) -> None:
        able = self._able
        if able:
            self.driver.accept_again()
        elif not self._patient:
            self._refuse_if_down()
        elif self._was_able and self.loop is not None:
            self.loop.call_later(_PATIENCE_S, self._refuse_if_down)
        if able != self._was_able:
            self.changed()
            self._was_able = able  # it is reported; if that raised, the next look reports it

    def _refuse_if_down(self) -> None:
        if not self._closed and not self._able and self._driver is not None:
            self._refuse(
                Unavailable(f"{self.served.name} is down and is being restarted", reason="restarting")
            )

    def _refuse(self, error: CarpoolError) -> None:
        """Refuses until there is an instance again."""
        self.driver.refuse_until_placed(error)

    def _lost(self, number: int, why: str) -> None:
        served = self.served
        log.warning("instance-lost", model=served.name, version=served.version, instance=number, why=why)
        if not self._closed:
            self.look_at_instances()
            task = asyncio.get_running_loop().create_task(self._replace(number))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, number: int) -> None:
        """Load a new instance, with patience: whatever killed the last one may do so again."""
        delay, served = _FIRST_RETRY_S, self.served
        placed = False
        while not self._closed:
            try:
                if not placed:
                    backend: Any = await self._off_the_loop(
                        lambda: self.loading.backend(number, self.instances), lambda late: late.close()
                    )
                    self._place(number, backend)
                placed = True  # once: another would push it out, and it would never be closed
                self.look_at_instances()
            except Exception as error:  # also no memory, no process, no thread: the usual reasons why it died
                if isinstance(error, CarpoolError):
                    log.error("instance-not-replaced", model=served.name, error=error.message, retry_s=delay)
                else:
                    log.exception("instance-not-replaced", model=served.name, retry_s=delay)
                self._refuse_if_down()
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_RETRY_S)
                continue
            if kind_of(served.config.backend).process == "worker":
                served.counters.server_row.add(columns.RESTARTS["worker"])
            self.replaced.set()
            log.info("instance-replaced", model=served.name, version=served.version, instance=number)
            return

    # ---- the end ----------------------------------------------------------------------------------------

    async def finish(self, timeout: float | None) -> int | None:
        if self._driver is None:
            return None
        if timeout is not None:
            why = f"{self.served.name} is being unloaded"
            self._driver.refuse_from_now_on(Unavailable(why, reason="unloading"))
        while not await self._driver.drained(timeout):  # a request may have come meanwhile
            if timeout is not None:
                return self._driver.riders
        return None

    async def close(self) -> None:
        self._closed = True
        for task in list(self._replacing):
            task.cancel()
        if self._driver is None:
            self.loading.abort()  # its thread may be in a run that has no end
        else:
            idle = self._driver.idle
            executors = self._close_driver(self._driver)
            if idle or self._joins_busy:  # else a thread is stuck in the model: do not wait for it
                await asyncio.to_thread(_join_all, executors)
            else:
                for executor in executors:
                    executor.abort()
        self._loader.shutdown(wait=False)

    def _close_driver(self, driver: DriverT) -> Sequence[Any]:
        """Returns what is to be joined."""
        return driver.close()


def _join_all(executors: Sequence[Any]) -> None:
    end = monotonic() + _CLOSE_S
    for executor in executors:
        executor.join(max(0.0, end - monotonic()))
