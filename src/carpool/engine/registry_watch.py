"""Models that follow a registry: their addresses are looked at in time, and who changes versions is told of
every move. A registry that is down, slow or wrong is a warning: what serves goes on serving."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from carpool.clock import now
from carpool.errors import CarpoolError
from carpool.observe.columns import REGISTRY_MOVES, REGISTRY_SEEN, REGISTRY_UP
from carpool.observe.logs import logger
from carpool.registry.followed_model import FollowedModel, Pointed, Registries
from carpool.registry.source import BadArtifacts, NotReady, Pin, RegistryDown, RegistryError

if TYPE_CHECKING:
    from carpool.config.server import ServerSettings
    from carpool.engine.engine import Engine

_FIRST_S, _LONGEST_S = 1.0, 60.0  # between two tries of a registry that is down
_BAD_S = 600.0  # before what cannot be taken is fetched again: somebody may have made room
_FOLDERS_S = 30.0  # models may come that follow one
_DOWN, _UP = 1.0, 2.0  # 0: no model follows a registry

log = logger("registry")


class Follower(Protocol):
    """What becomes of a model whose addresses moved. Called in the engine's loop, one move at a time; the
    files of all versions that are named lie in the model's folder already. Errors are logged; the same move
    is not told again until an address moves once more."""

    async def moved(self, model: str, stable: Pin, candidate: Pin | None) -> None:
        """Where they point now, which is not what serves alone. Told again after a start while that is so:
        what was begun then goes on."""

    async def moved_back(self, model: str) -> None:
        """They point to what is served again: what was begun is not wanted any more."""


class _Wanted(NamedTuple):
    """What is pointed to and not served, by digest."""

    stable: str = ""
    candidate: str = ""


_NOTHING = _Wanted()


@dataclass(slots=True)
class _Watched:
    model: FollowedModel
    due: float = 0.0
    failures: int = 0
    down: bool = False  # at its last look: the registry, not what it has
    told: _Wanted = _NOTHING
    bad: _Wanted = _NOTHING  # could not be fetched as it is: not all of it is fetched again at every look
    bad_until: float = 0.0
    warned: str = ""  # the last complaint: once is enough


class RegistryWatch:
    """`follower` is whoever changes versions: until another takes its place, a stable address that moved is
    loaded and takes over at once, as a load by hand would."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._registries = Registries(settings.registry, settings.cache_dir)
        self._may_come = settings.model_control_mode != "none"
        self._watched: dict[Path, _Watched] = {}
        self._complaints: Sequence[str] = ()
        self._task: asyncio.Task[None] | None = None
        self.follower: Follower = _Swap(self)

    async def open(self) -> None:
        """The models have been loaded."""
        await self._find()
        if self._watched or self._may_come:
            self._task = asyncio.get_running_loop().create_task(self._look_in_time())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ---- what followers use

    async def adopt(self, model: str, serve: Sequence[int], *, state: str, rollout: str = "") -> None:
        """Which versions of the model a load takes from now on, the stable one first. The registry is told
        how that one fares, and its stable alias follows, where that is wanted and it answers."""
        watched = self._of(model)
        pointed, settings = watched.model.state.pointed, watched.model.settings
        if pointed is None:
            return
        await asyncio.to_thread(watched.model.remember, pointed, serve)
        watched.told = _wanted(pointed, serve)
        for pin in (pin for pin in pointed if pin is not None and pin.version == serve[0]):
            if settings.write_back:
                await self.write_back(model, pin, state, rollout)
            if settings.move_alias and pin is not pointed.stable:
                await self._tell(model, pin, partial(watched.model.stable.point, pin))

    async def write_back(
        self, model: str, pin: Pin, state: str, rollout: str = "", metrics: dict[str, float] | None = None
    ) -> None:
        """To the registry, if it answers: nothing depends on it."""
        source = self._of(model).model.stable
        await self._tell(model, pin, lambda: source.write_back(pin, state, rollout, metrics))

    async def _tell(self, model: str, pin: Pin, tell: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(tell)
        except RegistryError as error:
            log.warning("registry-not-told", model=model, version=pin.version, error=error.message)

    def count_move(self, model: str, before: float) -> None:
        """Counters belong to versions: the one that serves now goes on from the count of the one before."""
        for served in self._engine.served.values():
            if served.name == model:
                served.row.set(REGISTRY_MOVES, before + 1.0)

    def moves(self, model: str) -> float:
        table = self._engine.table
        return max((row.cells[REGISTRY_MOVES] for row in table.models() if row.model == model), default=0.0)

    async def load(self, model: str) -> None:
        await self._engine.load(model)

    def _of(self, model: str) -> _Watched:
        return next(watched for watched in self._watched.values() if watched.model.name == model)

    # ---- looking

    async def _find(self) -> None:
        """Which models follow a registry: their settings say so, whether or not they could be loaded."""
        try:
            found = await asyncio.to_thread(self._registries.folders, self._engine.paths)
        except CarpoolError as error:
            log.debug("registry-folders", error=error.message)
            return
        _, followed, complaints = found
        for complaint in complaints if complaints != self._complaints else ():
            log.warning("registry", message=complaint)
        self._complaints = complaints
        there = {model.folder: model for model in followed}
        for folder in self._watched.keys() - there.keys():
            del self._watched[folder]
        for folder, model in there.items():
            known = self._watched.get(folder)
            if known is None:
                self._watched[folder] = _Watched(model)
            elif known.model.settings != model.settings:
                known.model, known.due = model, 0.0

    async def _look_in_time(self) -> None:
        look_again = now() + _FOLDERS_S
        while True:
            soonest = min((watched.due for watched in self._watched.values()), default=look_again)
            await asyncio.sleep(max(0.0, min(soonest, look_again) - now()))
            if now() >= look_again:
                look_again = now() + _FOLDERS_S
                if self._may_come:
                    await self._find()
            for watched in [one for one in self._watched.values() if one.due <= now()]:
                try:
                    await self.look(watched)
                except Exception:  # ours: the next look may fare better
                    log.exception("registry-look-failed", model=watched.model.name)
                    watched.due = now() + _LONGEST_S

    async def look(self, watched: _Watched) -> None:
        model = watched.model
        try:
            pointed = await asyncio.to_thread(model.look)
        except RegistryError as error:
            self._failed(watched, error)
            return
        server = self._engine.block.server
        watched.failures, watched.down, watched.due = 0, False, now() + model.settings.poll_s
        server.set(REGISTRY_SEEN, now())
        server.set(REGISTRY_UP, _DOWN if any(one.down for one in self._watched.values()) else _UP)
        self._warn(watched, f"{', '.join(model.missing)} is gone" if model.missing else "")
        try:
            await self._follow(watched, pointed)
        except (RegistryDown, NotReady) as error:  # while files were fetched
            self._failed(watched, error)
        except CarpoolError as error:  # bad files, no room, a model that does not load: what serves goes on
            self._warn(watched, error.message)

    def _failed(self, watched: _Watched, error: RegistryError) -> None:
        watched.failures, watched.down = watched.failures + 1, isinstance(error, RegistryDown)
        later = error.retry_after_s if isinstance(error, RegistryDown) else None
        wait = min(max(_FIRST_S * 2.0 ** min(watched.failures - 1, 10), later or 0.0), _LONGEST_S)
        watched.due = now() + wait * random.uniform(0.75, 1.25)
        if watched.down:
            self._engine.block.server.set(REGISTRY_UP, _DOWN)
        self._warn(watched, error.message)

    def _warn(self, watched: _Watched, message: str) -> None:
        if message and message != watched.warned:
            log.warning("registry", model=watched.model.name, message=message)
        watched.warned = message

    async def _follow(self, watched: _Watched, pointed: Pointed) -> None:
        model, name = watched.model, watched.model.name
        serve = model.state.serve
        wanted = _wanted(pointed, serve)
        if (serve and wanted == watched.told) or (wanted == watched.bad and now() < watched.bad_until):
            return
        try:
            await asyncio.to_thread(model.bring, pointed)
        except BadArtifacts:
            watched.bad, watched.bad_until = wanted, now() + _BAD_S
            raise
        before, watched.told = watched.told, wanted
        if not serve:  # the registry was down when the server started, and nothing had come before
            await asyncio.to_thread(model.remember, pointed, (pointed.stable.version,))
            await self.load(name)
            watched.told = _wanted(pointed, (pointed.stable.version,))
            return
        await asyncio.to_thread(model.remember, pointed, serve)
        if before != _NOTHING:
            await self.follower.moved_back(name)
        if wanted != _NOTHING:
            log.info(
                "registry-moved",
                model=name,
                stable=pointed.stable.version,
                candidate=None if pointed.candidate is None else pointed.candidate.version,
            )
            await self.follower.moved(name, pointed.stable, pointed.candidate)


def _wanted(pointed: Pointed, serve: Sequence[int]) -> _Wanted:
    stable, candidate = pointed
    if candidate is not None and tuple(serve) == (candidate.version,):
        return _NOTHING  # it has taken over, and nobody has moved the stable alias yet
    same = tuple(serve[:1]) == (stable.version,)
    return _Wanted("" if same else stable.digest, "" if candidate is None else candidate.digest)


class _Swap:
    """Without rollouts: the version that the stable address means is loaded beside the one that serves, and
    takes over when it is warm. One that does not load changes nothing."""

    def __init__(self, watch: RegistryWatch) -> None:
        self._watch = watch

    async def moved(self, model: str, stable: Pin, candidate: Pin | None) -> None:
        watched = self._watch._of(model)
        before = watched.model.state
        if candidate is not None:
            log.info(
                "candidate-waits", model=model, version=candidate.version, why="nothing rolls it out here"
            )
        if before.serve[:1] == (stable.version,) or before.pointed is None:
            return
        moves = self._watch.moves(model)
        await asyncio.to_thread(watched.model.remember, before.pointed, (stable.version,))
        try:
            await self._watch.load(model)
        except BaseException:
            with suppress(OSError):
                watched.model.remember(before.pointed, before.serve)
            raise
        self._watch.count_move(model, moves)
        await self._watch.adopt(model, (stable.version,), state="full")

    async def moved_back(self, model: str) -> None:
        """Nothing is ever begun and not finished."""
