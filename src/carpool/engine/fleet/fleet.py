"""Holds every model version in memory: what is offered, and what was replaced but still has requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.loading.loadable import Upload
from carpool.engine.models.batch_runtime import BatchRuntime
from carpool.engine.models.runtime import Callers, EngineParts, ModelProcess
from carpool.engine.models.served import Gate, Runtime, Served
from carpool.engine.models.serving_part import runtime_for, work_beside
from carpool.engine.profile.instance_layout import Devices
from carpool.engine.profile.measuring_turn import MeasuringTurn
from carpool.engine.profile.model_profile import ProfileStore
from carpool.engine.routes.direct_route import Background
from carpool.engine.run.batch import Route
from carpool.engine.run.step_memory import StepMemory
from carpool.errors import Unavailable
from carpool.observe import columns
from carpool.observe.counters import Block, Row, Table
from carpool.observe.logs import logger
from carpool.observe.statistics import VersionCounters

log = logger("engine")

_LOOK_S = 0.01
_SEEN_WITHIN_S = 60.0  # a front end that takes longer is stuck, and memory is not kept for it for ever


class Publisher:
    """Announces to callers what is offered. This one is for an engine without front ends, whose callers see
    every change at once."""

    memory: StepMemory | None = None  # for steps of ensembles that run in another process

    def publish(self) -> None:
        """Something else is offered than before, or what is has become able or unable to run."""

    async def everyone_saw(self) -> None:
        """Waits until all callers know the latest change. A withdrawn version is kept until then, for
        requests that are on their way."""

    def gate(self, _key: int) -> Gate:
        """Returns the function that receives a version's advice on new requests."""
        return lambda _scheduler, _now: False


class Fleet:
    """Changes go by `swap`, which happens between two requests: there is never less on offer than needed."""

    def __init__(
        self,
        table: Table,
        block: Block,
        publisher: Publisher,
        profiles: ProfileStore | None,
        host: ModelProcess | None,
        callers: Callers,
    ) -> None:
        self._table = table
        self._block = block
        self._publisher = publisher
        self.publish, self.memory = publisher.publish, publisher.memory
        given = Devices(), MeasuringTurn(), profiles, host, callers
        self._parts = EngineParts(*given, self, publisher.publish)
        self.offered: dict[int, Served] = {}  # by key, a number that is never used again
        self.leaving: dict[int, Served] = {}
        self.routes: dict[int, Route] = {}  # of both
        self.preferred: dict[str, str] = {}  # by name: the version for requests that name none
        self._loading: set[Served] = set()
        self._kept_rows: dict[str, str] = {}  # by name: the version whose counters outlive it
        self._keys = 0
        self.newest: dict[str, int] = {}  # by name: the key for requests that name no version
        self._retiring: set[asyncio.Task[None]] = set()
        self._looks: dict[Served, asyncio.Task[None]] = {}  # what is measured or compiled while they serve

    def build(
        self, config: ModelConfig, version: ModelVersion, identity: object, upload: Upload | None
    ) -> Served:
        """Returns a version that is to be loaded, then swapped in or dropped. It counts where its like
        counted."""
        slot = self._table.directory.assign(config.name, str(version.number))
        counters = VersionCounters(slot, self._block.row(slot), self._block.server)
        make = runtime_for(config, BatchRuntime)
        served = Served(
            config,
            str(version.number),
            counters,
            lambda served: make(served, version, self._parts),
            identity=identity,
            upload=upload,
        )
        if upload is not None:
            upload.join()
        self._loading.add(served)
        return served

    def row_of(self, name: str, version: str) -> Row | None:
        """Returns this process's counters of a version that is there."""
        slot = self._table.directory.find(name, version)
        return None if slot is None else self._block.row(slot)

    def step_row(self, name: str, version: str, step: str) -> Row:
        return self._block.row(self._table.directory.assign(name, f"{version}\0{step}"))

    async def drop(self, served: Served) -> None:
        """It was not needed after all, or did not load."""
        self._loading.discard(served)
        await served.unload(0.0)
        self._forget(served)

    def swap(self, new: Iterable[Served], old: Iterable[Served]) -> None:
        """From here on these are offered, and those are not."""
        going = set(old)
        for key, served in [item for item in self.offered.items() if item[1] in going]:
            del self.offered[key]
            served.withdraw()
            if (look := self._looks.get(served)) is not None:
                look.cancel()
            self.leaving[key] = served
            task = asyncio.get_running_loop().create_task(self._retire(key, served))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        for served in new:
            self._loading.discard(served)
            for before in going:
                if before.version == served.version and before.name == served.name:
                    served.counters.batches = before.counters.batches
            self._keys += 1
            served.offer(self._publisher.gate(self._keys))
            self.offered[self._keys] = served
            self.routes[self._keys] = served.runtime.route()
            if (work := work_beside(served)) is not None:
                self._work_beside(served, work)
        self._rebind()
        self.publish()

    def _work_beside(self, served: Served, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._looks[served] = task
        task.add_done_callback(lambda _: self._looks.pop(served, None))

    def prefer(self, name: str, version: str) -> None:
        """Routes requests that name no version to this one, if it is offered; the caller publishes that."""
        self.preferred[name] = version
        self._rebind()

    def _rebind(self) -> None:
        self.newest = newest(self.offered, self.preferred)
        for runtime in self._runtimes():
            runtime.rebind()

    def _runtimes(self) -> list[Runtime]:
        return [one.runtime for one in (*self.offered.values(), *self.leaving.values())]

    def find(self, name: str, version: int | str = -1) -> tuple[int, Served, Route] | None:
        """Returns what answers requests for this version now; -1 is the newest. With its key and its
        route."""
        key = self.newest.get(name)
        if version != -1:
            asked = (k for k, one in self.offered.items() if (one.name, one.version) == (name, str(version)))
            key = next(asked, None)
        return None if key is None else (key, self.offered[key], self.routes[key])

    def background_route(self, key: int) -> Background:
        """Returns the route for background work; the first one registers its model with the arbiter of the
        device, which gives it slack."""
        served = self.offered.get(key) or self.leaving.get(key)
        if served is None:
            raise Unavailable("the model was unloaded meanwhile", reason="unloading")
        return served.runtime.background_route()

    async def _retire(self, key: int, served: Served) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._publisher.everyone_saw(), _SEEN_WITHIN_S)
        while any(one.holds(served) for one in self._runtimes()):  # a request is on its way there
            await asyncio.sleep(_LOOK_S)
        await served.retire()
        del self.leaving[key], self.routes[key]
        self._forget(served)
        log.info("model-unloaded", model=served.name, version=served.version)
        self.publish()

    async def left(self, name: str) -> None:
        """Returns when nothing of a model that was withdrawn is in memory any more."""
        while any(served.name == name for served in self.leaving.values()) and self._retiring:
            await asyncio.wait(self._retiring, return_when=asyncio.FIRST_COMPLETED)

    def keep_row(self, name: str, version: str | None) -> None:
        """Keeps the counters of one version of a model when it is unloaded, in place of another one's: what
        its end was is read there, by alerts too. They go with the model. None: keep none."""
        before = self._kept_rows.pop(name, None)
        if version is not None:
            self._kept_rows[name] = version
            if (row := self.row_of(name, version)) is not None:
                for gauge in (columns.LOAD, columns.CAPACITY, columns.SATURATION):
                    row.set(gauge, 0.0)
        if before is not None and before != version and before not in self._versions_there(name):
            self._table.directory.retire(name, before)

    def _versions_there(self, name: str) -> set[str]:
        every = (*self.offered.values(), *self.leaving.values(), *self._loading)
        return {served.version for served in every if served.name == name}

    def _forget(self, served: Served) -> None:
        """Its counters stay as long as anything of its name and version is there."""
        there = self._versions_there(served.name)
        if not there:
            self.keep_row(served.name, None)
        if served.version not in there and self._kept_rows.get(served.name) != served.version:
            for version in (served.version, *(f"{served.version}\0{row}" for row in served.runtime.rows)):
                self._table.directory.retire(served.name, version)

    async def stop(self, timeout: float) -> None:
        """Finish what was accepted, within this time, and free everything."""
        tasks = [*self._retiring, *self._looks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.leaving |= self.offered
        self.offered.clear()
        self.newest.clear()
        everything = list(self.leaving.values())
        for first in (True, False):  # ensembles: their requests need the others
            going = [served for served in everything if served.runs_nothing is first]
            await asyncio.gather(*(served.unload(timeout) for served in going))
        self.leaving.clear()
        self.routes.clear()
        for served in everything:
            self._forget(served)
        self.publish()


def newest(versions: Mapping[int, Served], preferred: Mapping[str, str]) -> dict[str, int]:
    """By name, the key of the version that serves requests which name none: the one that is `preferred`, as
    while another is to take over from it, or else the newest."""

    def rank(key: int) -> tuple[bool, int]:
        one = versions[key]
        return one.version == preferred.get(one.name), int(one.version)

    chosen: dict[str, int] = {}
    for key, one in versions.items():
        known = chosen.get(one.name)
        if known is None or rank(key) > rank(known):
            chosen[one.name] = key
    return chosen
