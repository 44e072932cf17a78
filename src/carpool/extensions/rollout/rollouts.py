"""Drives rollouts: loads candidates, publishes which version answers what, counts reports, and decides.

What a state means is in `rollout_states`, which is pure; here it meets models, files and the clock.
Every change is one catalogue: which version serves and which share the candidate has travel together, and
nothing of the model's folder is read for it. What is not needed any more is unloaded behind that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from carpool.config.fingerprint import Fingerprint
from carpool.config.model import ModelConfig
from carpool.config.repository import version_folders
from carpool.engine.engine_host import without_paths
from carpool.engine.engine_parts import EngineServer
from carpool.engine.fleet.control import LoadListener
from carpool.engine.fleet.model_state import ModelState
from carpool.engine.loading.loadable import Pin, fingerprint_of
from carpool.errors import CarpoolError, Unavailable, WrongState
from carpool.extensions.rollout.capacity import MinuteRates, carries
from carpool.extensions.rollout.counted import ROLLBACKS
from carpool.extensions.rollout.labelled_check import LabelledCheck
from carpool.extensions.rollout.rollout_checks import (
    carrier,
    curve_document,
    differences,
    digest_of,
    not_for_two,
    pinned,
    requests_so_far,
    resident_gb,
    route_of,
    swapped_in,
    write_row,
)
from carpool.extensions.rollout.rollout_file import Record, file_for, of_the_first, read_record, set_aside
from carpool.extensions.rollout.rollout_guards import Counts, look, together
from carpool.extensions.rollout.rollout_states import Rollout, State, advance, failed, retired
from carpool.extensions.rollout.settings import RolloutSettings, rollout_settings
from carpool.extensions.rollout.shared_places import place_of
from carpool.extensions.rollout.shared_rollouts import SharedRollouts, goes_on
from carpool.extensions.rollout.split import RolloutSplit
from carpool.extensions.rollout.state_claims import Held, StateClaims
from carpool.extensions.rollout.watched_rollout import WatchedRollout
from carpool.observe.logs import logger

log = logger("rollout")

_TICK_S = 0.5
_SAVE_S = 10.0
_LOOK_S = 5.0  # between two looks at the files of those under way
_CHANGED = "changed"  # in a digest's place: nothing starts by itself any more


class Rollouts(LoadListener):
    """Does everything in the engine's loop."""

    def __init__(self, server: EngineServer) -> None:
        settings = server.settings
        self._server = server
        self._engine = server.engine
        self._control = server.engine.control
        self._folder = settings.state_dir
        self._models: dict[str, WatchedRollout | None] = {}  # None: there is none, which was looked up
        self._held: dict[str, Held] = {}  # by model, of those whose state says nothing that can be acted on
        self._claims = StateClaims(f"process {os.getpid()}, HTTP port {settings.http_port}")
        self._busy: set[str] = set()  # models that are being brought to what their rollout wants
        self._asked: set[str] = set()  # and those for which that was asked
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="rollouts")  # files are written in their order
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._arrivals = MinuteRates(monotonic())
        self.listeners: list[Callable[[Record], None]] = []  # called with every change
        self._labelled = LabelledCheck(server, self.home, self.decide)
        self.shared: SharedRollouts | None = None
        if where := settings.option("rollout_state"):
            self.shared = SharedRollouts(place_of(where, settings.cache_secret), self)
        self._said: Mapping[str, object] = {}  # of rollouts, to front ends

    def close(self) -> None:
        self._labelled.close()
        if self.shared is not None:
            self.shared.close()
        for watched in self._models.values():
            if watched is not None:
                watched.save(self.disk)
        for task in (*self._tasks, self._ticking):
            if task is not None:
                task.cancel()
        self.disk.shutdown(wait=True)
        self._claims.close()

    # ---- which versions are loaded ----------------------------------------------------------------------

    async def prepare(self, model: ModelState) -> None:
        if self.shared is not None:
            await self.shared.prepare(model)

    def pin(self, model: ModelState, files: Fingerprint) -> Pin | None:
        if not model.places or model.places[0].is_file():
            return None
        watched = self.known(model.name, model.places[0])
        serving = tuple(model.serving)
        if watched is None:
            held = self._held.get(model.name)
            return partial(pinned, rollout=None, serving=serving, held=held)
        self._check_files(watched, files)
        record = watched.record
        sent_back = tuple(map(int, record.sent_back))
        return partial(
            pinned, rollout=record.rollout, by_hand=record.by_hand, serving=serving, sent_back=sent_back
        )

    def known(self, name: str, home: Path) -> WatchedRollout | None:
        """Returns its rollout, the last or the one under way; from the file the first time."""
        if name not in self._models:
            self._models[name] = None
            if self._folder is not None:
                self._read(name, file_for(self._folder, name, home))
        return self._models[name]

    def _read(self, name: str, file: Path) -> None:
        """Reads what was kept. Where that cannot be read, or is another server's, nothing begins by
        itself."""
        holder = self._claim(file)
        if holder and self.shared is not None:
            return  # what all replicas share says it as well
        record, trouble = read_record(file)
        record = record if record is not None and record.model == name else None
        if holder:
            trouble = f"{file} belongs to another server ({holder}), which alone moves this rollout"
        elif trouble:
            trouble += ": no rollout begins by itself until one is started by hand"
        if trouble:
            serving = "" if record is None else record.rollout.serving
            self._held[name] = Held(trouble, bool(holder), serving)
            log.error("rollout-held", model=name, error=trouble)
        elif record is not None:
            watched = WatchedRollout(record, file)
            watched.guards = look(record.plan, record.judged_in, record.counts)
            self._watch(watched)
            log.info("rollout-read", model=name, state=str(record.rollout.state))

    def _claim(self, file: Path) -> str:
        """Returns which other server has this state, if one does. A folder that cannot be written to has
        none: that is reported when something is written."""
        try:
            return self._claims.take(file)
        except OSError:
            return ""

    def held(self, name: str) -> Held | None:
        """Returns why the rollout of this model waits, if it does."""
        return self._held.get(name)

    def _take_over(self, name: str) -> None:
        """Goes on with a rollout once the server that had it is gone."""
        home = self.home(name)
        if home is None or self._folder is None or self._claim(file_for(self._folder, name, home)):
            return
        del self._held[name]
        self._models.pop(name, None)
        self.known(name, home)
        self.bring(name)

    def _watch(self, watched: WatchedRollout) -> None:
        record = watched.record
        self._models[record.model] = watched
        self._engine.fleet.prefer(record.model, record.rollout.serving)
        record.rates = self._arrivals.rates.setdefault(record.model, record.rates)
        self._tell_states()

    def _check_files(self, watched: WatchedRollout, files: Fingerprint) -> None:
        for version, stamps in watched.stamps.items():
            if not watched.record.rollout.over and files.of(int(version)) != stamps:
                self._fail_changed(watched, version)

    def _fail_changed(self, watched: WatchedRollout, version: str) -> None:
        """Fails a rollout whose files changed: after a change in the middle of it, `start` has to say that
        they are whole."""
        record = watched.record
        if not self._retire_without(watched, version, f"the files of version {version} changed"):
            record.digests[record.rollout.candidate] = _CHANGED
            self._fail(watched, f"the files of version {version} changed during its rollout")

    def _retire_without(self, watched: WatchedRollout, version: str, why: str) -> bool:
        """The candidate has everything, and the old version is not what it was: no way leads back to it."""
        rollout = watched.record.rollout
        if rollout.over or rollout.serving != rollout.candidate or version != rollout.stable:
            return False
        self.moved(watched, retired(rollout, monotonic(), f"{why}, so it cannot be rolled back to"))
        return True

    def home(self, name: str) -> Path | None:
        """Returns the folder of its versions; None for a model that is a single file, which has none."""
        model = self._control.known(name)
        home = model.places[0] if model is not None and model.places else None
        return None if home is None or home.is_file() else home

    def loaded(self, model: ModelState) -> None:
        if model.places and not model.places[0].is_file():
            self.known(model.name, model.places[0])  # it may have been loaded before there were rollouts
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
        self.do(self._follow(model.name))

    async def _follow(self, name: str) -> None:
        """Go on with a model's rollout, or begin one. What is asked meanwhile is done by the call under
        way."""
        self._asked.add(name)
        if name in self._busy:
            return
        self._busy.add(name)
        try:
            while name in self._asked:
                self._asked.discard(name)
                await self._go_on(name)
        except Exception as error:
            log.exception("rollout-failed", model=name)
            watched = self._models.get(name)
            if watched is not None:
                self._fail(watched, f"the rollout failed: {error}")
        finally:
            self._busy.discard(name)

    async def _go_on(self, name: str) -> None:
        watched = self._models.get(name)
        if watched is None or watched.record.rollout.over:
            await self._begin_if_new(name, watched)
        watched = self._models.get(name)
        if watched is not None and not watched.record.rollout.over:
            await self._bring(watched)

    async def _begin_if_new(self, name: str, watched: WatchedRollout | None) -> None:
        """Begins with a version that was not judged yet, where its settings ask for a rollout."""
        model, home = self._control.known(name), self.home(name)
        if model is None or home is None or home.is_file() or not model.serving:
            return
        present = await asyncio.to_thread(version_folders, home)
        stable = max(model.serving, default=0) if watched is None else int(watched.record.rollout.stable)
        config = next((served.config for served in model.serving.values()), None)
        if config is None or "registry" in config.extra or name in self._held:
            return  # what follows a registry is rolled out when an alias moves
        gone = stable not in model.serving and stable not in present  # and another had to serve
        if gone or (watched is not None and _swapped(watched.record, config, model)):
            stable = max(model.serving)
            self.take(name, stable)
        plan = rollout_settings(config)
        if plan is None or stable not in model.serving:
            return
        if watched is None:
            watched = WatchedRollout(of_the_first(name, plan, str(stable), time.time()), self._file(name))
            self._watch(watched)
            watched.save(self.disk)
        candidate = plan.candidate or max(present, default=0)
        if candidate == stable or candidate not in present or (plan.candidate is None and candidate < stable):
            return
        judged = watched.record.sent_back.get(str(candidate))
        if judged is not None and judged in (
            _CHANGED,
            await asyncio.to_thread(digest_of, home, str(candidate)),
        ):
            return
        with contextlib.suppress(WrongState, Unavailable):  # another start was faster, or it is tried later
            await self.start(name, plan, str(stable), str(candidate), "a new version is in the folder")

    async def start(
        self,
        name: str,
        plan: RolloutSettings,
        stable: str,
        candidate: str,
        why: str,
        *,
        by_hand: bool = False,
    ) -> None:
        """From here on its versions are what the rollout says; `bring` loads them."""
        if (held := self._held.get(name)) is not None and held.elsewhere:
            raise WrongState(held.why)
        home, before = self.home(name), self.find(name)  # the first version may be written down meanwhile
        assert home is not None  # the callers have looked
        if unfit := not_for_two(self._control.known(name)):
            raise WrongState(f"'{name}' cannot be rolled out: {unfit}")
        digest = await asyncio.to_thread(digest_of, home, candidate)
        if self.find(name) is not before:
            raise WrongState(f"another rollout of '{name}' was started at the same time")
        record = Record(name, plan, Rollout(stable, candidate, since=monotonic(), why=why), by_hand)
        record.digests[candidate] = digest
        if self.shared is None:
            self.new(record)
        else:
            await self.shared.begin(record, None if before is None else before.record)

    def new(self, record: Record) -> None:
        """Watches this rollout from here on."""
        name, before = record.model, self._models.get(record.model)
        if before is not None:
            record.sent_back, record.rollbacks = before.record.sent_back, before.record.rollbacks
            record.history = before.record.history if before.record.begun else []
        file = self._file(name)
        if self._held.pop(name, None) is not None and file is not None:
            self.disk.submit(set_aside, file)
        watched, rollout = WatchedRollout(record, file), record.rollout
        record.note(time.time(), "", rollout.why)
        self._watch(watched)
        log.info("rollout", model=name, **rollout.facts())
        watched.save(self.disk)
        self.publish()

    def _file(self, name: str) -> Path | None:
        home = self.home(name)
        file = None if self._folder is None or home is None else file_for(self._folder, name, home)
        return None if file is None or self._claim(file) else file

    def take(self, name: str, version: int) -> None:
        """Another version is stable from the next load on, without a rollout: none is under way."""
        watched = self._models.get(name)
        if watched is not None:
            record = watched.record
            record.rollout = replace(record.rollout, stable=str(version))
            self._engine.fleet.prefer(name, record.rollout.serving)
            watched.save(self.disk)
            self.publish()

    def bring(self, name: str) -> None:
        """After `start`: load the candidate; and after an end, what serves."""
        watched, model = self._models.get(name), self._control.known(name)
        over = watched is not None and watched.record.rollout.over
        if model is not None and (model.serving or not over):
            self.do(self._unload_loser(name) if over else self._follow(name))

    # ---- the candidate ----------------------------------------------------------------------------------

    async def _bring(self, watched: WatchedRollout) -> None:
        """Load what it wants, look at it, and let it go on."""
        record = watched.record
        name = record.model
        if self.shared is not None and await self.shared.waits_for_files(watched):
            return
        if why := await self._load_wanted(record):
            self._fail(watched, why)
            return
        if record.rollout.over or self._models.get(name) is not watched:
            self.do(self._unload_loser(name))  # it was ended while its candidate was being loaded
            return
        if missing := self._missing(record):
            why = f"version {missing[0]} does not exist"
            if not self._retire_without(watched, missing[0], why):
                self._fail(watched, why)
            return
        if not watched.ready:
            await self._look_at(watched)
        elif self._identities(record) != watched.identities:
            self._fail(watched, "its settings changed")

    async def _load_wanted(self, record: Record) -> str:
        """Returns why that cannot be done, if it cannot. Where the version that serves is not there either,
        it is loaded first, alone, and then both."""
        before, most = resident_gb(), record.plan.guards.memory_gb
        for _ in range(2):
            asked = self._control.under_way.get(record.model)
            if not self._missing(record) and (asked is None or asked.done()):  # it may be to unload it
                break
            try:
                await self._control.load(record.model)
            except CarpoolError as error:
                return f"version {record.rollout.candidate} does not load: {error.message}"
            taken = resident_gb() - before
            if most is not None and taken > most:
                return f"loading it took {taken:.2f} GB, more than memory_gb = {most:g}"
        return ""

    def _missing(self, record: Record) -> list[str]:
        model = self._control.known(record.model)
        serving = () if model is None else model.serving
        return [version for version in record.rollout.wanted if int(version) not in serving]

    def _identities(self, record: Record) -> dict[str, object]:
        model = self._control.known(record.model)
        assert model is not None
        return {version: model.serving[int(version)].identity for version in record.rollout.wanted}

    async def _look_at(self, watched: WatchedRollout) -> None:
        record = watched.record
        model, home = self._control.known(record.model), self.home(record.model)
        if model is None or home is None:
            return
        if unfit := not_for_two(model):  # it was begun with other settings
            self._fail(watched, unfit)
            return
        versions = record.rollout.stable, record.rollout.candidate
        stable, candidate = (model.serving[int(version)] for version in versions)
        different = differences(stable, candidate)
        if different:
            self._fail(watched, f"version {candidate.version} is another model: {'; '.join(different[:4])}")
            return
        files = await asyncio.to_thread(fingerprint_of, model.places)
        for version in versions:
            digest = await asyncio.to_thread(digest_of, home, version)
            if record.digests.setdefault(version, digest) != digest:
                self._fail_changed(watched, version)
                return
        record.curves = {served.version: curve_document(served) for served in (stable, candidate)}
        record.capacity = await asyncio.to_thread(
            carries, carrier(stable), carrier(candidate), list(record.rates)
        )
        if record.rollout.over or self._missing(record):
            return  # it was ended, or the model unloaded, meanwhile
        watched.stamps = {version: files.of(int(version)) for version in versions}
        watched.identities = self._identities(record)
        watched.ready = True
        record.rollout = record.rollout.going(monotonic())
        self.decide(watched)
        self.publish()

    def _fail(self, watched: WatchedRollout, why: str) -> None:
        if not (watched.record.rollout.over or self._control.stops):  # which a stop is no reason for
            why = without_paths(why, self._engine.folders)
            if self.shared is not None:
                why = f"{self.shared.replica}: {why}"
            self.change(watched, failed(watched.record.rollout, monotonic(), why))

    # ---- decisions --------------------------------------------------------------------------------------

    def decide(self, watched: WatchedRollout) -> None:
        """Takes the rollout as far as it goes now. Looked at after every report and twice a second."""
        record = watched.record
        while not (record.rollout.over or self._control.closed):
            rollout, counts = record.rollout, watched.counts
            state = rollout.stage[0]
            watched.guards = look(record.plan, state, counts)
            capacity = "" if record.capacity.get("enough", True) else record.capacity["sentence"]
            verdict = together(watched.guards, capacity)
            counted = counts.compared_here if state is State.SHADOW else counts.candidate.answers
            if rollout.state is State.CHECKED and record.plan.evaluate and watched.labelled is None:
                self._labelled.evaluate(watched)
            known = watched.labelled
            after = advance(
                rollout, record.plan, monotonic(), verdict, counted, loaded=watched.ready, labelled=known
            )
            if after.alike(rollout):
                record.rollout = after
                return
            if self.shared is not None and goes_on(after):
                self.shared.propose(watched, after)
                return
            if verdict.breach:
                record.rollbacks[verdict.guard] = record.rollbacks.get(verdict.guard, 0) + 1
                if (row := self._engine.fleet.row_of(record.model, rollout.candidate)) is not None:
                    row.add(ROLLBACKS[verdict.guard])
            self.change(watched, after)

    def change(self, watched: WatchedRollout, after: Rollout, *, shared: bool = False) -> None:
        """Publishes one catalogue: from here on all front ends do as this state says. `shared`: another
        replica has made the change."""
        record, decided = watched.record, monotonic()
        before, record.rollout = record.rollout, after
        total = watched.counts
        record.note(time.time(), str(before.state), after.why, total)
        if self.shared is None:
            if after.stage != before.stage and not after.over:
                record.counts.new_stage(after.stage[0])
        else:
            record.counts = Counts()  # all that was counted before is kept together
            if after.over:  # what it was judged by
                record.counts, watched.others = total, Counts()
            if not shared:
                self.shared.decided(record.model, record.mark, after)
                record.mark = record.mark._replace(change=record.mark.change + 1)
        watched.epoch = max(watched.epoch + 1, time.time_ns() // 1000)
        self._engine.fleet.prefer(record.model, after.serving)
        self.publish()
        self.do(self._measure_switch(watched, decided))
        failed = after.state in (State.ROLLED_BACK, State.FAILED)
        self._engine.fleet.keep_row(record.model, after.candidate if failed else None)
        level = log.warning if failed else log.info
        level("rollout", model=record.model, **after.facts())
        if after.over or after.state is State.RETIRED:
            record.ended()
            watched.ready = False
        watched.save(self.disk)
        for tell in self.listeners:
            tell(record)
        if after.over or after.state is State.RETIRED:
            self.do(self._unload_loser(record.model))

    def agree(self, watched: WatchedRollout, first: Rollout) -> None:
        """Takes over what another replica wrote `first`, where this one came to the same state by itself at
        the same time: all report one reason, and a pause in which stable answers everything holds for all."""
        record, mine = watched.record, watched.record.rollout
        if mine.state is State.PAUSED and not mine.alike(first):
            self.change(watched, first, shared=True)
        elif mine.why != first.why:
            record.reword(first.why)
            watched.save(self.disk)

    async def _measure_switch(self, watched: WatchedRollout, decided: float) -> None:
        await self._server.everyone_saw()
        watched.seen_ms = (monotonic() - decided) * 1e3
        log.debug("rollout-seen-by-all", model=watched.record.model, ms=round(watched.seen_ms, 2))

    async def _unload_loser(self, name: str) -> None:
        model, watched = self._control.known(name), self._models.get(name)
        if model is None or watched is None or self._control.closed:
            return
        wanted = {int(version) for version in watched.record.rollout.wanted}
        if not model.serving or model.serving.keys() <= wanted:
            await self._follow(name)  # a version may have come meanwhile
            return
        try:
            await self._control.load(name)
        except CarpoolError as error:
            log.warning("not-unloaded", model=name, error=error.message)

    def publish(self) -> None:
        known = [watched for watched in self._models.values() if watched is not None]
        routes = {watched.record.model: self.route(watched) for watched in known}
        self._say(routes={name: route._asdict() for name, route in routes.items() if route is not None})
        for watched in known:
            self._show(watched)
        self._tell_states()
        self._server.publish(self._said)

    def route(self, watched: WatchedRollout) -> RolloutSplit | None:
        """Returns what front ends do for it, if they have anything to do."""
        rollout = watched.record.rollout
        if not watched.ready or rollout.over:
            return None
        if self.shared is not None and self.shared.cut_off and rollout.serving == rollout.stable:
            return None
        return route_of(watched.record, watched.epoch)

    def _tell_states(self) -> None:
        """Reports the states with the next catalogue, for the console."""
        known = [self.find(name) for name in self._models]
        records = [watched.record for watched in known if watched is not None]
        self._say(states={record.model: str(record.rollout.state) for record in records})

    def _say(self, **changed: Mapping[str, object]) -> None:
        """Has the next catalogue say this of rollouts."""
        self._said = {**self._said, **changed}
        self._server.say(self._said)

    # ---- time -------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._arrivals.due(monotonic()):
                self._arrivals.note(requests_so_far(self._engine.table), monotonic())
            for watched in [found for found in self._models.values() if found is not None]:
                try:
                    await self._look(watched, monotonic())
                except Exception:
                    log.exception("rollout-tick-failed", model=watched.record.model)
            for name in [name for name, held in self._held.items() if held.elsewhere]:
                self._take_over(name)

    async def _look(self, watched: WatchedRollout, now: float) -> None:
        record = watched.record
        if record.rollout.over:
            if watched.trouble and now - watched.saved_at >= _SAVE_S:
                watched.save(self.disk)  # its end is what must not be lost
            return
        if watched.ready and now - watched.looked_at >= _LOOK_S:
            watched.looked_at = now
            model = self._control.known(record.model)
            if model is not None and model.places:
                self._check_files(watched, await asyncio.to_thread(fingerprint_of, model.places))
        if watched.ready or record.rollout.state is State.RETIRED:
            self.decide(watched)
        elif watched.missing:
            self.bring(record.model)
        self._show(watched)
        if now - watched.saved_at >= _SAVE_S:
            watched.save(self.disk)

    # ---- what others see --------------------------------------------------------------------------------

    def _show(self, watched: WatchedRollout) -> None:
        """Shows it on the metrics page, in the candidate's row, while it is loaded."""
        record = watched.record
        row = self._engine.fleet.row_of(record.model, record.rollout.candidate)
        if row is not None and record.begun:
            write_row(row, record.rollout, record.plan, watched.guards)

    def find(self, name: str) -> WatchedRollout | None:
        """Returns the last rollout of a model, or the one under way."""
        watched = self._models.get(name)
        return watched if watched is not None and watched.record.begun else None

    def moved(self, watched: WatchedRollout, after: Rollout) -> None:
        """Moves a rollout by hand."""
        before = watched.record.rollout
        if self.shared is not None and goes_on(after):
            self.shared.propose(watched, after)
            return
        if before.held and not after.held and not after.over:
            watched.record.counts.forget()  # an operator has looked at what was broken
        if after is not before:
            self.change(watched, after)
            self.decide(watched)

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _swapped(record: Record, config: ModelConfig, model: ModelState) -> bool:
    """The newest that is loaded has taken over without a rollout."""
    sent_back = tuple(map(int, record.sent_back))
    return swapped_in(config, record.rollout, record.by_hand, model.serving, sent_back)
