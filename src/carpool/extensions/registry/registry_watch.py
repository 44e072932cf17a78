"""Models that follow a registry: their addresses are looked at in time, and a `Follower` decides on every
move. A registry that is down, slow or wrong is a warning: what serves goes on serving."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic as now
from typing import TYPE_CHECKING, Protocol

from carpool.errors import CarpoolError
from carpool.extensions.registry.followed_model import (
    NOTHING,
    FollowedModel,
    FollowedState,
    Pointed,
    Registries,
    WantedVersions,
)
from carpool.extensions.registry.source import BadArtifacts, NotReady, Pin, RegistryDown, RegistryError
from carpool.observe.columns import single
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.config.server import ServerSettings
    from carpool.engine.engine import Engine
    from carpool.engine.models.served import Served

_FIRST_S, _LONGEST_S = 1.0, 60.0  # between two tries of a registry that is down
_BAD_S = 600.0  # before what cannot be taken is fetched again: there may be room by then
_FOLDERS_S = 30.0  # models may come that follow one
_MOVES, _REACHED, _SEEN = (single("registry", name) for name in ("moves", "up", "heard"))
_DOWN, _UP = 1.0, 2.0  # 0: no model follows a registry

log = logger("registry")


class Follower(Protocol):
    """Decides what becomes of a model whose addresses moved. Called in the engine's loop, one move at a time;
    the files of all versions that are named lie in the model's folder already. Errors are logged; the same
    move is not repeated until an address moves once more, except for `NotReady`."""

    async def moved(self, model: str, stable: Pin | None, candidate: Pin | None) -> None:
        """Where they point now, of what is neither served nor was decided on. Called again after a start
        while that is so: what was begun then goes on. What else was begun is not wanted any more."""

    async def moved_back(self, model: str) -> None:
        """They point to what is served again: what was begun is not wanted any more."""


MakeFollower = Callable[["RegistryWatch"], Follower]
Tell = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _FollowedState:
    model: FollowedModel
    due: float = 0.0
    failures: int = 0
    down: bool = False  # at its last look: the registry, not what it has
    told: WantedVersions = NOTHING
    bad: WantedVersions = (
        NOTHING  # could not be fetched as it is: not all of it is fetched again at every look
    )
    bad_until: float = 0.0
    warned: str = ""  # the last complaint: once is enough
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    remembering: asyncio.Lock = field(default_factory=asyncio.Lock)
    untold: dict[str, Tell] = field(default_factory=dict)  # by what it is about: notified later
    pointed_by_us: int = 0  # how often: a look that began before is out of date


class RegistryWatch:
    """Looks at the addresses in time; `follower` makes what changes versions."""

    def __init__(self, engine: Engine, settings: ServerSettings, follower: MakeFollower) -> None:
        self._engine = engine
        self._registries = Registries(settings.option("registry"), settings.cache_dir)
        self._may_come = settings.model_control_mode != "none"
        self._watched: dict[Path, _FollowedState] = {}
        self._complaints: Sequence[str] = ()
        self._task: asyncio.Task[None] | None = None
        self._follower = follower(self)
        self.opened = asyncio.Event()  # it is known which models follow a registry

    async def open(self) -> None:
        """The models have been loaded."""
        await self._find()
        self.opened.set()
        if self._watched or self._may_come:
            self._task = asyncio.get_running_loop().create_task(self._look_in_time())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ---- what followers use

    async def adopt(
        self,
        model: str,
        serve: Sequence[int],
        *,
        state: str,
        rollout: str = "",
        judged: int = 0,
        instead_of: int = 0,
    ) -> None:
        """Sets which versions of the model a load takes from now on, the stable one first. The registry is
        notified how that one fares, and its stable alias follows, where that is wanted and it answers.
        `judged` is the version that was decided on, `instead_of` the one that it was compared with: neither
        is reported again where it is pointed to, until an address moves."""
        watched = self._of(model)
        settings, version = watched.model.settings, serve[0]

        def decided(before: FollowedState) -> FollowedState:
            assert before.pointed is not None
            stable = before.pointed.stable
            over = stable.digest if stable.version == instead_of != version else before.passed_over
            digests = {*before.judged, *(pin.digest for pin in before.pins if pin.version == judged)}
            return replace(before, serve=tuple(serve), judged=tuple(sorted(digests)), passed_over=over)

        before, known = await self._remember(watched, decided)
        watched.untold.pop("alias", None)
        if known.pointed is None:
            return
        self.count_moves(model, self.moves(model))
        watched.told, watched.due = (NOTHING, now()) if judged else (known.wanted, watched.due)
        if settings.write_back and before.serve != known.serve:
            await self.write_back(model, version, state, rollout)
        stable, pinned = known.pointed.stable.version, {pin.version for pin in known.pins}
        there_or_back = stable != version and (version in pinned or stable == judged)
        if settings.move_alias and settings.candidate and there_or_back:
            await self._tell(watched, "alias", partial(self._point, watched, version, judged))

    async def _point(self, watched: _FollowedState, version: int, judged: int) -> None:
        """Let the stable alias mean what serves."""
        model = watched.model
        pin = await asyncio.to_thread(model.pin_of, version)
        await asyncio.to_thread(model.stable.point, pin)
        watched.pointed_by_us += 1
        judgements = (one for one in model.state.pins if one.version == judged != version)
        pointed = Pointed(pin, next(judgements, None))
        await self._remember(watched, lambda state: state.seeing(pointed))

    async def write_back(
        self, model: str, version: int, state: str, rollout: str = "", metrics: dict[str, float] | None = None
    ) -> None:
        """To the registry, if it answers: nothing depends on it. How the version stands is notified later,
        when it answers again; metrics are of their moment."""
        watched = self._of(model)
        followed, what = watched.model, f"version {version}"

        def tell(metrics: dict[str, float] | None) -> None:
            followed.stable.write_back(followed.pin_of(version), state, rollout, metrics)

        await self._tell(watched, what, partial(asyncio.to_thread, tell, metrics))
        if what in watched.untold:
            watched.untold[what] = partial(asyncio.to_thread, tell, None)

    async def _tell(self, watched: _FollowedState, what: str, tell: Tell) -> None:
        watched.untold.pop(what, None)
        try:
            await tell()
        except RegistryError as error:
            if isinstance(error, RegistryDown):
                watched.untold[what] = tell
            log.warning("registry-not-notified", model=watched.model.name, what=what, error=error.message)

    async def _remember(
        self, watched: _FollowedState, change: Callable[[FollowedState], FollowedState]
    ) -> tuple[FollowedState, FollowedState]:
        """Returns what the model's folder knew, and knows now; nothing, if nothing came from the registry
        yet. Looks and rollouts both do this, each in its own time."""

        def work() -> tuple[FollowedState, FollowedState]:
            before = watched.model.state
            if before.pointed is None:
                return before, before
            after = change(before)
            watched.model.remember(after)
            return before, after

        async with watched.remembering:
            return await asyncio.to_thread(work)

    async def swap(self, model: str, version: int) -> None:
        """Swaps without a rollout: the version is loaded beside the one that serves, and takes over when it
        is warm. One that does not load changes nothing."""
        watched = self._of(model)
        before, moves = watched.model.state.serve, self.moves(model)
        await self._remember(watched, partial(replace, serve=(version,)))
        try:
            await self._engine.load(model)
        except BaseException:
            await self._remember(watched, partial(replace, serve=before))
            raise
        self.count_moves(model, moves + 1.0)
        await self.adopt(model, (version,), state="full")
        if watched.model.settings.write_back:
            await self.write_back(model, version, "full")

    def count_moves(self, model: str, moves: float) -> None:
        """Counters belong to versions: the one that serves now goes on from the count of the one before."""
        for served in self._engine.served.values():
            if served.name == model:
                served.counters.row.set(_MOVES, moves)

    def moves(self, model: str) -> float:
        table = self._engine.table
        return max((row.cells[_MOVES] for row in table.models() if row.model == model), default=0.0)

    def serving(self, model: str) -> Mapping[int, Served]:
        known = self._engine.control.known(model)
        return {} if known is None else known.serving

    def followed(self, model: str) -> FollowedModel | None:
        """Returns None for a model that has nothing to do with a registry."""
        found = (one.model for one in self._watched.values() if one.model.name == model)
        return next(found, None)

    def _of(self, model: str) -> _FollowedState:
        return next(watched for watched in self._watched.values() if watched.model.name == model)

    # ---- looking

    async def _find(self) -> None:
        """Finds which models follow a registry: their settings say so, whether or not they could be
        loaded."""
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
                self._watched[folder] = _FollowedState(model)
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

    async def look(self, watched: _FollowedState) -> None:
        async with watched.looking:
            await self._look(watched)

    async def _look(self, watched: _FollowedState) -> None:
        model, pointed_by_us = watched.model, watched.pointed_by_us
        try:
            pointed = await asyncio.to_thread(model.look)
        except RegistryError as error:
            self._failed(watched, error)
            return
        server = self._engine.block.server
        watched.failures, watched.down, watched.due = 0, False, now() + model.settings.poll_s
        server.set(_SEEN, now())
        server.set(_REACHED, _DOWN if any(one.down for one in self._watched.values()) else _UP)
        self._warn(watched, f"{', '.join(model.missing)} is gone" if model.missing else "")
        for what, tell in list(watched.untold.items()):
            await self._tell(watched, what, tell)
        if pointed_by_us != watched.pointed_by_us:
            watched.due = now()
            return
        try:
            await self._follow(watched, pointed)
        except (RegistryDown, NotReady) as error:  # while files were fetched
            self._failed(watched, error)
        except CarpoolError as error:  # bad files, no room, a model that does not load: what serves goes on
            self._warn(watched, error.message)

    def _failed(self, watched: _FollowedState, error: RegistryError) -> None:
        watched.failures, watched.down = watched.failures + 1, isinstance(error, RegistryDown)
        later = error.retry_after_s if isinstance(error, RegistryDown) else None
        wait = min(max(_FIRST_S * 2.0 ** min(watched.failures - 1, 10), later or 0.0), _LONGEST_S)
        watched.due = now() + wait * random.uniform(0.75, 1.25)
        if watched.down:
            self._engine.block.server.set(_REACHED, _DOWN)
        self._warn(watched, error.message)

    def _warn(self, watched: _FollowedState, message: str) -> None:
        if message and message != watched.warned:
            log.warning("registry", model=watched.model.name, message=message)
        watched.warned = message

    async def _follow(self, watched: _FollowedState, pointed: Pointed) -> None:
        model, name = watched.model, watched.model.name
        state = model.state
        wanted = state.seeing(pointed).wanted if state.serve else WantedVersions(*pointed.digests)
        moved = state.pointed is None or state.pointed.digests != pointed.digests
        if not moved and wanted == watched.told and state.serve:
            return
        if wanted == watched.bad and now() < watched.bad_until:
            return
        try:
            await asyncio.to_thread(model.bring, pointed)
        except BadArtifacts:
            watched.bad, watched.bad_until = wanted, now() + _BAD_S
            raise
        if not state.serve:  # the registry was down when the server started, and nothing had come before
            async with watched.remembering:
                first = FollowedState(pointed, (pointed.stable.version,))
                await asyncio.to_thread(model.remember, first)
            await self._engine.load(name)
            return
        before, watched.told = watched.told, wanted
        await self._remember(watched, lambda state: state.seeing(pointed))
        if wanted == before:
            return  # a move to what is served, or was decided on
        if wanted == NOTHING:
            await self._follower.moved_back(name)
            return
        stable, candidate = pointed
        log.info(
            "registry-moved",
            model=name,
            stable=stable.version,
            candidate=None if candidate is None else candidate.version,
        )
        try:
            await self._follower.moved(
                name, stable if wanted.stable else None, candidate if wanted.candidate else None
            )
        except NotReady:
            watched.told = before
            raise
