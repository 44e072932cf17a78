"""Serves more models than fit into memory: each is loaded on its first request; the least recently used goes.

One model is loaded at a time, so that what the process holds more afterwards is that model's. A loaded model
stays for a while, however many others are requested: at most a fifth of the time goes into loading again what
was freed before. A request that finds no room meanwhile is answered with the time when there will be some.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic

from carpool.backends.python.declarations import callees
from carpool.config.backend_kinds import kind_of
from carpool.config.control_groups import free_in_groups
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelSource
from carpool.core.numerals import numeral
from carpool.engine.fleet.control import ModelControl
from carpool.engine.fleet.fleet import Fleet
from carpool.engine.models.served import Served
from carpool.errors import CarpoolError, ConfigError, InvalidInput, NotFound, Unavailable
from carpool.memory.free_memory import give_back
from carpool.observe.logs import logger
from carpool.observe.process_tree import anonymous_bytes, family

log = logger("engine")

_SHORTEST_STAY_S = 10.0
_TIMES_ITS_LOAD = 4.0  # as long as loading it took, it stays at least
_IN_USE_S = 5.0  # since it was asked last: it stays for longer, and another waits for it
_MOST_STAYS = 6.0  # times its stay: then it goes also while it is in use, for others are asked, too
_AGAIN_S = 10.0  # after a load that failed
_LONGEST_AGAIN_S = 300.0
_SHARE = 0.8  # of the memory that is free at the start, where no limit for models is set
_GB = 1e9


@dataclass(slots=True)
class Known:
    """Describes what is known of one model, loaded or not."""

    files: int = 0  # bytes: it takes no less
    bytes: int = 0  # as it was measured last, or else the size of its files
    seconds: float = 0.0  # that its last load took
    loaded_at: float = -inf
    failures: int = 0  # in a row
    not_before: float = -inf
    why: str = ""
    asks: Sequence[str] = ()  # models that it asks: it is measured, so that they are loaded first

    @property
    def stay(self) -> float:
        return max(_SHORTEST_STAY_S, _TIMES_ITS_LOAD * self.seconds)

    def stays_until(self, last_used: float) -> float:
        """Returns when it may go: it has stayed, and is not in use. That holds up others for a while only."""
        in_use = min(last_used + _IN_USE_S, self.loaded_at + _MOST_STAYS * self.stay)
        return max(self.loaded_at + self.stay, in_use)


class OnDemand:
    """Loads and frees models, on the loop's thread. `used` returns how many bytes this process and its
    children hold for themselves; `most` is what models may take of that together."""

    def __init__(
        self,
        control: ModelControl,
        fleet: Fleet,
        most: float | None = None,
        *,
        now: Callable[[], float] = monotonic,
        used: Callable[[], int] | None = None,
    ) -> None:
        self._control = control
        self._fleet = fleet
        self._most = most * _GB if most is not None else _SHARE * free_memory()
        self._now = now
        self._used = used or held_memory
        self._known: dict[str, Known] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self.tasks: dict[str, str] = {}  # by model: what its settings say it is for, or nothing

    def expect(self, names: Collection[str], sources: Mapping[str, ModelSource]) -> None:
        """Notes the models that there are. Some may have settings that cannot be read: loading those reports
        why."""
        for name in names:
            source = sources.get(name)
            self.tasks[name] = "" if source is None else source.config.task or ""
            self._known[name] = known = Known()
            if source is not None:
                known.bytes = known.files = _file_bytes(source)
                with suppress(CarpoolError):  # loading it reports the error
                    said = [callees(source.config, version.file)[0] for version in source.versions]
                    known.asks = [one for one in dict.fromkeys(chain(*said)) if one in names]

    async def bring(self, name: str) -> None:
        """Returns when the model serves, which it may already. Raises why it does not, and when to retry.

        Callers that come while it is loaded share that load, which goes on when all of them have left.
        """
        if name not in self._known:
            raise NotFound(f"there is no model '{name[:80]}'", reason="unknown-model")
        if name in self._fleet.newest:
            return
        task = self._under_way.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._bring(name))
            self._under_way[name] = task
            task.add_done_callback(lambda done: self._over(name, done))
        await asyncio.shield(task)

    def _over(self, name: str, task: asyncio.Task[None]) -> None:
        del self._under_way[name]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio logs nothing: the callers may have gone

    def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()

    async def _bring(self, name: str) -> None:
        known = self._known[name]
        left = known.not_before - self._now()
        if left > 0:
            raise _later(f"{name} did not load: {known.why}", "load-failed", left)
        async with self._turn:
            for other in self._in_order(name, []):
                if other not in self._fleet.newest:
                    await self._load(other, self._known[other])

    def _in_order(self, name: str, found: list[str]) -> list[str]:
        """Returns the model with the models that it asks, and those that they ask, before it."""
        if name not in found:
            found.append(name)
            for other in self._known[name].asks:
                self._in_order(other, found)
            found.remove(name)
            found.append(name)
        return found

    async def _load(self, name: str, known: Known) -> None:
        await self._make_room(name, known)
        began, before = self._now(), await asyncio.to_thread(self._used)
        while True:
            try:
                await self._control.load(name)
                break
            except CarpoolError as error:
                if error.reason == "device-memory" and await self._free_one(on_device=True):
                    continue
                self._failed(known, error)
                raise _later(
                    f"{name} did not load: {error.message}", "load-failed", known.not_before - self._now()
                ) from error
        known.loaded_at = self._now()
        known.seconds, known.failures = known.loaded_at - began, 0
        await asyncio.to_thread(give_back)
        known.bytes = max(known.files, await asyncio.to_thread(self._used) - before) + self._running(name)
        megabytes = round(known.bytes / 1e6)
        log.info("loaded-on-demand", model=name, megabytes=megabytes, seconds=round(known.seconds, 3))
        while self._held() > self._most and await self._free_one(for_one=name):
            """It takes more than was thought."""

    def _running(self, name: str) -> int:
        """Returns bytes that it takes while it runs, and gave back when it was loaded."""
        profiles = [served.profile for served in self._fleet.offered.values() if served.name == name]
        return sum(profile.memory.service for profile in profiles if profile is not None)

    def _failed(self, known: Known, error: CarpoolError) -> None:
        """The next try waits longer each time: clients that ask again and again must not cost all of it."""
        wait = min(_AGAIN_S * 2**known.failures, _LONGEST_AGAIN_S)
        known.failures = min(known.failures + 1, 16)
        known.not_before, known.why = self._now() + wait, error.message

    # ---- room -------------------------------------------------------------------------------------------

    async def _make_room(self, name: str, known: Known) -> None:
        if known.bytes > self._most:
            raise InvalidInput(
                f"{name} takes about {_gb(known.bytes)}, more than the {_gb(self._most)} for all models: "
                "allow more with --memory-gb",
                reason="memory",
            )
        while self._held() + known.bytes > self._most:
            if not await self._free_one():
                raise _later(
                    f"there is no room for {name}: the loaded models are in use or were loaded just now",
                    "no-room",
                    self._until_room(known),
                )

    def _held(self) -> int:
        names = {served.name for served in (*self._fleet.offered.values(), *self._fleet.leaving.values())}
        return sum(self._known[name].bytes for name in names if name in self._known)

    async def _free_one(self, *, on_device: bool = False, for_one: str = "") -> bool:
        """Unloads the one that was asked least lately; False where none may go now.

        For one that was just loaded, and takes more than its files said, it need not have stayed: what that
        one takes is known from then on, so that this happens once.
        """
        now = self._now()
        spared = {for_one, *self._known[for_one].asks} if for_one else ()
        last = {
            name: _last_used(versions)
            for name, versions in self._loaded(on_device).items()
            if all(served.runtime.idle for served in versions)
            and (for_one or now >= self._known[name].stays_until(_last_used(versions)))
            and name not in spared
        }
        if not last:
            return False
        name = min(last, key=last.__getitem__)
        log.info("freed", model=name, idle_s=round(now - last[name], 1))
        await self._control.unload(name)
        await self._fleet.left(name)
        await asyncio.to_thread(give_back)
        return True

    def _loaded(self, on_device: bool) -> dict[str, list[Served]]:
        found: dict[str, list[Served]] = {}
        for served in self._fleet.offered.values():
            if not on_device or _is_on_device(served.config):
                found.setdefault(served.name, []).append(served)
        return found

    def _until_room(self, known: Known) -> float:
        """Seconds until as many as are in the way have stayed for long enough."""
        ends = sorted(
            (self._known[name].stays_until(_last_used(versions)), self._known[name].bytes)
            for name, versions in self._loaded(False).items()
        )
        missing, at = self._held() + known.bytes - self._most, self._now()
        for end, size in ends:
            if missing <= 0:
                break
            missing, at = missing - size, end
        return max(1.0, at - self._now())


def _last_used(versions: Sequence[Served]) -> float:
    return max(served.counters.last_used for served in versions)


def _is_on_device(config: ModelConfig) -> bool:
    return kind_of(config.backend).process == "runner"


def _later(why: str, reason: str, seconds: float) -> Unavailable:
    error = Unavailable(f"{why}; retry in {numeral(max(1.0, seconds))} s", reason=reason)
    error.retry_after_s = max(1.0, seconds)
    return error


def _gb(size: float) -> str:
    return f"{size / _GB:.2g} GB"


def _file_bytes(source: ModelSource) -> int:
    """Weights are most of a model: what its files take, before it was ever loaded."""
    sizes = 0
    for version in source.versions:
        if version.file is not None:
            inside = version.file.rglob("*") if version.file.is_dir() else (version.file,)
            sizes += sum(file.stat().st_size for file in inside if file.is_file())
    return sizes


# ---- memory, as the kernel counts it


def held_memory() -> int:
    """Returns bytes that this process and all that it started hold for themselves: no files, no shared
    memory."""
    return sum(map(anonymous_bytes, family(os.getpid())))


def free_memory() -> int:
    """Returns bytes that could be taken now: of the machine, and of the container's limit if there is one."""
    try:
        free = _kilobytes(Path("/proc/meminfo").read_text(), "MemAvailable:")
    except OSError:
        raise ConfigError("the free memory cannot be measured here: give --memory-gb") from None
    left = free_in_groups()
    return free if left is None else min(free, left)


def _kilobytes(text: str, field: str) -> int:
    for line in text.splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0
