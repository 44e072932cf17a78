"""Shares rollouts between replicas: repeats here what others did, and reports what happened here.

What that means is in `shared_state`, which is pure, and where it lies in `shared_places`. A
change towards stable is made here at once, and reported; one that goes on is made there first, by one
replica, and only when all that are alive have loaded the candidate. A replica that cannot reach the place
goes on serving, keeps its state, and after two seconds sends nothing to a candidate that has not taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import Any, Protocol

from carpool.config.repository import version_folders
from carpool.engine.fleet.model_state import ModelState
from carpool.errors import Unavailable, WrongState
from carpool.extensions.rollout.rollout_file import Mark, Record
from carpool.extensions.rollout.rollout_guards import Counts, read_counts
from carpool.extensions.rollout.rollout_states import Rollout, State
from carpool.extensions.rollout.shared_places import OutOfReach, SharedPlace, StoredState
from carpool.extensions.rollout.shared_state import (
    NewerFormat,
    Part,
    SharedRollout,
    as_bytes,
    from_bytes,
    merged,
    of_record,
    on_top,
    rank,
)
from carpool.extensions.rollout.watched_rollout import WatchedRollout
from carpool.observe.logs import logger

log = logger("rollout")

_LOOK_S = 0.4  # between two looks at what the others did
_BEAT_S = 2.0  # between two signs of life, while one is under way
_ALIVE_S = 6.0  # without one
_INTRODUCED_S = 3 * _LOOK_S  # after which every replica has said that it is there, too
_CUT_OFF_S = 2.0
_FIRST_LOOK_S = 3.0  # that a start waits for the place
_RETRY_S = 0.05
_TRIES = 20  # of a change, while others change it too
_BACKWARD = (State.ROLLED_BACK, State.FAILED, State.PAUSED)
_NO_NAME = re.compile(r"[^0-9A-Za-z._-]+")

Change = Callable[[SharedRollout | None], SharedRollout | None]


def goes_on(after: Rollout) -> bool:
    """Returns whether it goes on, rather than towards stable."""
    return after.state not in _BACKWARD


class OwnRollouts(Protocol):
    """Defines what this replica does of its own rollouts: `Rollouts` does."""

    def known(self, name: str, home: Path) -> WatchedRollout | None: ...

    def find(self, name: str) -> WatchedRollout | None: ...

    def home(self, name: str) -> Path | None: ...

    def new(self, record: Record) -> None: ...

    def bring(self, name: str) -> None: ...

    def decide(self, watched: WatchedRollout) -> None: ...

    def change(self, watched: WatchedRollout, after: Rollout, *, shared: bool = False) -> None: ...

    def moved(self, watched: WatchedRollout, after: Rollout) -> None: ...

    def agree(self, watched: WatchedRollout, first: Rollout) -> None: ...

    def publish(self) -> None: ...

    def do(self, work: Coroutine[Any, Any, None]) -> None: ...


class SharedRollouts:
    """Belongs to the engine's loop."""

    def __init__(self, place: SharedPlace, rollouts: OwnRollouts) -> None:
        self.place = place
        self.replica = f"{_NO_NAME.sub('_', socket.gethostname())[:40]}-{token_hex(3)}"
        self.trouble = ""  # why the place cannot be reached
        self.cut_off = False  # for so long that nothing is sent to a candidate
        self._rollouts = rollouts
        self._known: dict[str, SharedRollout] = {}  # by model
        self._turns: dict[str, asyncio.Lock] = {}  # by model: one exchange at a time
        self._decided: dict[str, list[tuple[Mark, Rollout]]] = {}  # here, and no other replica knows of it
        self._proposed: set[str] = set()
        self._beats: dict[str, tuple[int, float]] = {}  # by replica: the last, and when it was seen
        self._told_at: dict[str, float] = {}
        self._beat = 0
        self._heard_at = monotonic()
        self._wake = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._damaged: dict[str, bytes] = {}  # what was logged already

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self.place.close()

    # ---- all the time -----------------------------------------------------------------------------------

    async def prepare(self, model: ModelState) -> None:
        """Before a model is loaded for the first time: what its replicas know decides which version is."""
        name = model.name
        if name in self._turns or not model.places or model.places[0].is_file():
            return
        self._turns[name] = asyncio.Lock()
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        watched = self._rollouts.known(name, model.places[0])
        if watched is not None:
            record = watched.record
            if not record.rollout.over:
                record.counts = Counts()  # what the process before this one counted is reported
            if record.mark.run or not record.rollout.over:  # else it ended before it was shared
                self._known[name] = of_record(record, monotonic())
        give_up = monotonic() + (0.0 if self.cut_off else _FIRST_LOOK_S)
        while True:
            try:
                await self._exchange(name)
                return
            except OutOfReach:
                if monotonic() >= give_up:
                    return
                await asyncio.sleep(_RETRY_S)

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)
            self._wake.clear()
            looks = (self._exchange(name) for name in list(self._turns))
            for found in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(found, Exception) and not isinstance(found, OutOfReach):
                    log.error("rollout-not-shared", error=repr(found))

    async def _exchange(self, name: str, change: Change | None = None) -> None:
        """Takes over the others' changes, publishes those made here, and makes a change, all or nothing."""
        async with self._turns[name]:
            try:
                shared = await self._put(name, change)
            except OutOfReach as error:
                self._lost(str(error))
                raise
            self._heard()
            if shared is not None:
                self._take(name, shared)

    async def _put(self, name: str, change: Change | None) -> SharedRollout | None:
        for _ in range(_TRIES):
            found = await self.place.read(name)
            shared = merged(self._known.get(name), self._understood(name, found))
            decided = list(self._decided.get(name, ()))
            if shared is not None:
                shared = self._with_own(name, shared, decided)
            if change is not None:
                shared = change(shared)
            if shared is None:
                return None
            data = as_bytes(shared)
            if data == found.written or await self.place.swap(name, found.lies, data):
                self._known[name] = shared
                if decided:  # more may have been decided meanwhile
                    self._decided[name] = self._decided[name][len(decided) :]
                return shared
        raise OutOfReach("other replicas keep changing it")

    def _understood(self, name: str, found: StoredState) -> SharedRollout | None:
        """Returns None for half a file, or for one of another program: a replica that knows more writes
        it."""
        if found.lies is None:
            return None
        try:
            return from_bytes(found.written or b"")
        except NewerFormat as error:
            raise OutOfReach(str(error)) from None
        except ValueError as error:
            if self._damaged.get(name) != found.lies:
                self._damaged[name] = found.lies
                log.error("rollout-state-damaged", model=name, where=self.place.where, error=str(error))
            return None

    def _with_own(
        self, name: str, shared: SharedRollout, decided: list[tuple[Mark, Rollout]]
    ) -> SharedRollout:
        for mark, after in decided:
            shared = on_top(shared, mark, after, self._alive())
        watched, now = self._rollouts.find(name), monotonic()
        if watched is None or shared.rollout.over or rank_of(watched.record) != shared.rank:
            return shared
        part, counts = shared.parts.get(self.replica), watched.record.counts
        due = now - self._told_at.get(name, 0.0) >= _BEAT_S
        if part is not None and (part.ready, part.counts) == (watched.ready, counts) and not due:
            return shared
        self._beat += 1
        self._told_at[name] = now
        mine = Part(self._beat, watched.ready, read_counts(counts.as_document()))
        return shared.noted(self.replica, mine, round(watched.record.rollout.elapsed(now), 3))

    def _take(self, name: str, shared: SharedRollout) -> None:
        now = monotonic()
        for replica, part in shared.parts.items():
            if self._beats.get(replica, (-1, 0.0))[0] != part.beat:
                self._beats[replica] = part.beat, now
        watched = self._rollouts.find(name)
        # What was decided here lies in it, or was overtaken: nothing that is known here alone is left.
        told = not self._decided.get(name)
        if watched is None or rank_of(watched.record) < shared.rank or told:
            watched = self._adopt(name, watched, shared)
        if watched is not None and rank_of(watched.record) == shared.rank:
            if not watched.record.rollout.over:
                watched.others = shared.counted(without=self.replica)
            if watched.ready:
                self._rollouts.decide(watched)

    def _adopt(self, name: str, watched: WatchedRollout | None, shared: SharedRollout) -> WatchedRollout:
        """What the replicas know together is further than what is known here."""
        rollout = shared.rollout.going(monotonic())
        if watched is not None and rank_of(watched.record) == shared.rank:
            if rollout.state in _BACKWARD:  # which each replica may have come to by itself
                self._rollouts.agree(watched, rollout)
            return watched
        if watched is not None and watched.record.mark[:2] == shared.mark[:2]:
            watched.record.mark = shared.mark
            if not watched.record.rollout.alike(rollout):
                self._rollouts.change(watched, rollout, shared=True)
            return watched
        digests = dict(shared.digests)
        self._rollouts.new(Record(name, shared.plan, rollout, shared.by_hand, digests, mark=shared.mark))
        self._rollouts.bring(name)
        self._wake.set()  # the others wait to hear that this one is there
        adopted = self._rollouts.find(name)
        assert adopted is not None  # it is watched from now on
        return adopted

    async def waits_for_files(self, watched: WatchedRollout) -> bool:
        """Other replicas may have the candidate's files earlier: then this one goes on with stable."""
        candidate, home = watched.record.rollout.candidate, self._rollouts.home(watched.record.model)
        absent = home is not None and int(candidate) not in await asyncio.to_thread(version_folders, home)
        watched.missing = candidate if absent and not watched.stamps else ""
        return bool(watched.missing)

    def _alive(self) -> set[str]:
        now = monotonic()
        self._beats = {name: seen for name, seen in self._beats.items() if now - seen[1] < _ALIVE_S}
        return {*self._beats, self.replica}

    def _heard(self) -> None:
        self._heard_at = monotonic()
        if self.trouble:
            self.trouble, self.cut_off = "", False
            log.info("rollout-state-reached", where=self.place.where)
            self._rollouts.publish()
            for name in self._turns:
                self._rollouts.bring(name)  # what could not be begun

    def _lost(self, why: str) -> None:
        if not self.trouble:
            log.warning("rollout-state-not-reached", where=self.place.where, why=why)
        self.trouble = why
        if not self.cut_off and monotonic() - self._heard_at >= _CUT_OFF_S:
            self.cut_off = True
            self._rollouts.publish()

    # ---- changes ----------------------------------------------------------------------------------------

    def decided(self, name: str, mark: Mark, after: Rollout) -> None:
        """Here, towards stable, at this mark: the others hear of it as soon as may be."""
        self._decided.setdefault(name, []).append((mark, after))
        self._wake.set()

    def propose(self, watched: WatchedRollout, after: Rollout) -> None:
        """Proposes to go on. The first replica does it for all."""
        record = watched.record
        rollout = record.rollout
        if rollout.state is State.LOADING and rollout.elapsed(monotonic()) < _INTRODUCED_S:
            return  # the next look proposes it again
        behind = self._behind(record)
        if behind:
            record.rollout = replace(record.rollout, why=f"{behind} has not loaded it yet")
        elif record.model not in self._proposed:
            self._proposed.add(record.model)
            self._rollouts.do(self._go_on(record.model, rank_of(record), after))

    def _behind(self, record: Record) -> str:
        """Returns a replica that is alive and has to load the candidate first."""
        shared = self._known.get(record.model)
        if shared is None or record.rollout.state is State.RETIRED:
            return ""
        others = self._alive() - {self.replica}
        return next(
            (name for name in sorted(others & shared.parts.keys()) if not shared.parts[name].ready), ""
        )

    async def _go_on(self, name: str, seen: tuple[Any, ...], after: Rollout) -> None:
        def change(shared: SharedRollout | None) -> SharedRollout | None:
            if shared is None or shared.rank != seen:
                return shared  # another replica was faster
            return shared.went(after.stopped(monotonic()), self._alive())

        try:
            with contextlib.suppress(OutOfReach):  # it is tried again
                await self._exchange(name, change)
        finally:
            self._proposed.discard(name)

    async def act(self, watched: WatchedRollout, action: Callable[[Rollout], Rollout]) -> None:
        """Does what was asked by hand. What goes on is done to what all know, so that no replica goes
        on from what is over."""
        record = watched.record
        after = action(record.rollout)
        if not goes_on(after):
            self._rollouts.moved(watched, after)
            with contextlib.suppress(OutOfReach):
                await self._exchange(record.model)
            return

        def change(shared: SharedRollout | None) -> SharedRollout | None:
            if shared is None:
                return None
            then, now = action(shared.rollout), monotonic()
            if then is shared.rollout:
                return shared
            return shared.went(then.stopped(now), self._alive(), forget=shared.rollout.held)

        await self._by_agreement(record.model, change)

    async def begin(self, record: Record, before: Record | None) -> None:
        """`before` is what was known here when it was asked for: what ended elsewhere since was not seen."""
        name, rollout = record.model, record.rollout

        def change(shared: SharedRollout | None) -> SharedRollout | None:
            if shared is not None and not shared.rollout.over:
                if shared.rollout.candidate == rollout.candidate:
                    return shared
                raise WrongState(
                    f"version {shared.rollout.candidate} of '{name}' is being rolled out: abort that first"
                )
            if shared is not None and (before is None or rank_of(before) != shared.rank):
                raise WrongState(f"another rollout of '{name}' was ended at the same time: look at it first")
            run = 1 if shared is None else shared.mark.run + 1
            mark = Mark(run, token_hex(8), 0, rollout.stable)
            standing = rollout.stopped(monotonic())
            return SharedRollout(mark, record.plan, standing, record.by_hand, dict(record.digests))

        await self._by_agreement(name, change)

    async def _by_agreement(self, name: str, change: Change) -> None:
        try:
            await self._exchange(name, change)
        except OutOfReach as error:
            raise Unavailable(
                f"the shared rollout state cannot be reached ({error}): only pause and abort are possible",
                reason="rollout-state",
            ) from None

    # ---- what others see --------------------------------------------------------------------------------

    def status(self, name: str) -> dict[str, Any]:
        shared, alive = self._known.get(name), self._alive()
        parts = {} if shared is None else shared.parts
        return {
            "where": self.place.where,
            "reached": not self.trouble,
            "trouble": self.trouble,
            "replica": self.replica,
            "replicas": {
                replica: {
                    "alive": replica in alive,
                    "ready": part.ready,
                    "answers": part.counts.candidate.answers,
                    "compared": part.counts.compared_here,
                }
                for replica, part in sorted(parts.items())
            },
        }


def rank_of(record: Record) -> tuple[int, str, int, int]:
    return rank(record.mark, record.rollout)
