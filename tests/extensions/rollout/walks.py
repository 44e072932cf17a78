"""Random walks through rollouts, in virtual time: the real code of control, states, files and routing, with
models that load by waiting a moment.

A walk adds, changes and removes versions, starts, promotes, pauses, resumes and aborts, shows guards good and
bad answers, restarts the server and kills it, also in the middle of a write. After each step, and at every
catalogue that front ends see, three things are asked: does any version answer more than it was given, is the
status true, and does only that answer which may. What may is kept by `Allowance`, which knows what was done
to the server and nothing of its code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import selectors
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.config.server import ServerSettings
from carpool.core.curve import BatchCurve
from carpool.engine import engine_host
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.engine.fleet.fleet import Fleet
from carpool.engine.models.served import VersionState
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.rollout import (
    labelled_check,
    rollout_desk,
    rollouts,
    shared_rollouts,
    watched_rollout,
)
from carpool.extensions.rollout.rollout_desk import RolloutDesk
from carpool.extensions.rollout.routing import Routing
from carpool.link.catalog import Batching, Catalog, ModelEntry
from carpool.observe.statistics import BatchStatistics
from carpool.types import Signature
from engine.scripted import weights
from extensions.rollout import staged

HOURS = 0.005  # of a step: 18 s
LEAST = 20
PLAN = f"shadow_h = {HOURS}\ncanary_h = {HOURS}\nstandby_h = {4 * HOURS}\nleast = {LEAST}\n"
PLANS = (
    f"{PLAN}shadow = 0\ncanary = [0.1, 0.5]\n",
    f"{PLAN}shadow = 1.0\ncanary = [0.25]\n",
    f'{PLAN}shadow = 0\ncanary = [0.25]\nguards = {{ on_breach = "pause" }}\n',
    None,  # every rollout is one by hand
)
BY_HAND: tuple[dict[str, Any], ...] = (
    {"shadow": 0, "canary": [0.5]},
    {"shadow": 0.5, "canary": [0.2, 0.4]},
    {"shadow": 0, "canary": [0.3], "guards": {"on_breach": "pause"}},
)
JUDGED = ("shadow", "canary", "full", "standby")
SENT_BACK = ("rolled-back", "failed")
ENDS = ("done", *SENT_BACK)
SETTLE_S = 4.0
_TINY = 1e-9


class Violation(AssertionError):
    """What must never be, seen."""


# ---- time and threads


class _NoSockets(selectors.SelectSelector):
    """Waiting for nothing takes no time: the clock is moved instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing would ever happen again"
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Threads are work that is done a moment later, at once or at the end of that moment."""

    def __init__(self, random: Random, start: float) -> None:
        self._sockets = _NoSockets()
        self._sockets.now = start
        super().__init__(self._sockets)
        self._random = random

    def time(self) -> float:
        return self._sockets.now

    def run_in_executor(self, _executor: Any, work: Callable[..., Any], *given: Any) -> Any:
        done = self.create_future()
        late = self._random.random() < 0.3
        found = None if late else _outcome(work, *given)

        def finish() -> None:
            value, error = found or _outcome(work, *given)
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(value)

        self.call_later(self._random.choice((0.0, 0.0, 0.001, 0.3)), finish)
        return done


def _outcome(work: Callable[..., Any], *given: Any) -> tuple[Any, BaseException | None]:
    try:
        return work(*given), None
    except Exception as error:
        return None, error


class Disk:
    """In the place of the thread that writes: in order, each a moment later."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: work(*given)))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(loop._random.choice((0.0, 0.0, 0.2)), self._next)
        return future

    def _next(self) -> None:
        if self._jobs:
            future, work = self._jobs.pop(0)
            value, error = _outcome(work)
            if not future.set_running_or_notify_cancel():
                return
            future.set_exception(error) if error is not None else future.set_result(value)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        while self._jobs:
            self._next()


# ---- models


class FakeServed:
    """A version that is loaded when a moment has passed."""

    runs_nothing = writes = hosted = False
    profile = None
    able, vision, choices = True, None, ()
    rows: Sequence[str] = ()

    def __init__(self, config: ModelConfig, version: ModelVersion, slot: Any, identity: object) -> None:
        self.name, self.version, self.config = config.name, str(version.number), config
        self.identity, self.slot, self.state = identity, slot, VersionState.LOADING
        self.signature = Signature(config.name, (), ())
        self.labels: dict[str, Any] = {}
        self.counters = SimpleNamespace(batches=BatchStatistics())
        self.scheduler = SimpleNamespace(belief=SimpleNamespace(runs=BatchCurve([(1, 0.01)])), instances=[0])
        self.runtime = self

    async def check(self) -> None:
        """It is in order."""

    async def load(self, _tell: object) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(loop._random.choice((0.0, 0.05, 1.0)))
        if (self.config.path / self.version / "weights").read_text().startswith("broken"):
            raise ModelError(f"{self.name}: broken weights")

    def offer(self, _gate: object) -> None:
        self.state = VersionState.READY

    def withdraw(self) -> None:
        self.state = VersionState.UNAVAILABLE

    def route(self) -> Any:
        return object()

    def groups(self) -> None:
        """Its requests are no groups of others."""

    def work_beside(self) -> None:
        """There is no background work."""

    def rebind(self) -> None:
        """It has no steps."""

    async def retire(self) -> None:
        """Nobody rides."""

    async def unload(self, _timeout: float) -> None:
        """There is nothing to free."""


def _build(self: Fleet, config: ModelConfig, version: ModelVersion, identity: object, _upload: object) -> Any:
    return FakeServed(config, version, self._table.directory.assign("m", str(version.number)), identity)


def _entry(_self: EngineHost, key: int, served: Any) -> ModelEntry:
    return ModelEntry(key, served.name, served.version, served.signature, Batching("eager"))


# ---- what may answer


@dataclass
class Run:
    """A rollout as whoever asked for it knows it: what its candidate may answer, stage by stage."""

    candidate: str
    stages: list[float]
    stage: int = 0

    @property
    def share(self) -> float:
        return self.stages[min(self.stage, len(self.stages) - 1)]


@dataclass
class Allowance:
    trusted: str
    run: Run | None = None
    sent_back: dict[str, str] = field(default_factory=dict)  # by version: what its files were
    ended: tuple[Run, str, dict[str, str]] | None = None  # the last run that ended, and what was so before
    ended_at: int = 0  # the length of the history then

    def end(self, state: str, files: str, history: int) -> None:
        run = self.run
        assert run is not None
        self.ended, self.run = (run, self.trusted, dict(self.sent_back)), None
        self.ended_at = history
        if state in SENT_BACK:
            self.sent_back[run.candidate] = files
        else:
            if run.share < 1.0:
                raise Violation(f"version {run.candidate} took over at a share of {run.share}")
            self.trusted = run.candidate
            self.sent_back.pop(run.candidate, None)

    def undo(self) -> None:
        """The end was not written when the server was killed."""
        assert self.ended is not None
        self.run, self.trusted, self.sent_back = self.ended
        self.ended = None


# ---- the walk


class Walk:
    def __init__(self, folder: Path, seed: int) -> None:
        self.random = Random(seed)
        self.folder, self.home = folder, folder / "models" / "m"
        self.plan = self.random.choice(PLANS)
        self.files: dict[str, str] = {}  # by version: what its file says
        self.said: list[str] = []
        self.asked: str | None = None  # the version that somebody asked to start
        self.host: EngineHost | None = None
        self.dead = False
        self.wrong: Violation | None = None
        self.durable: dict[str, Any] | None = None  # the last document that was written whole
        self.acknowledged = False  # the last end was, so that it must last
        self.kill_in: tuple[int, str] | None = None  # after so many writes, and where in the last of them
        self._number = itertools.count(1)
        staged.settings(folder / "models", self.plan, head="")
        for version in range(1, self.random.choice((2, 2, 3))):
            self._write(str(version))
        self.allowed = Allowance(self._first())

    # -- files

    def _write(self, version: str, value: str = "good") -> None:
        self.files[version] = f"{value} {next(self._number)}"
        weights(self.folder / "models", "m", int(version), self.files[version])

    def _newest(self) -> str:
        return str(max(map(int, self.files)))

    def _first(self) -> str:
        """Who serves at a first start."""
        known = sorted(map(int, self.files))
        return str(known[-2] if self.plan is not None and len(known) > 1 else known[-1])

    def keep(self, path: Path, document: bytes) -> None:
        """`write_document` of whatever life this is; the dead write nothing."""
        if self.dead:
            return
        if self.kill_in is not None:
            left, where = self.kill_in
            self.kill_in = (left - 1, where)
            if left <= 0:
                self.dead = True
                if where == "torn":
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.with_name(f".{path.name}.1").write_bytes(document[: len(document) // 2])
                if where != "after":
                    return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document)
        self.durable = orjson.loads(document)

    # -- lives

    def lives(self, steps: int) -> None:
        while steps > 0:
            loop = VirtualLoop(self.random, self.random.uniform(0.0, 1e6))
            asyncio.set_event_loop(loop)
            self.dead, self.kill_in = False, None
            with _patched(self, loop):
                try:
                    steps = loop.run_until_complete(self._life(steps))
                finally:
                    self.dead = True
                    self.desk.rollouts._claims.close()  # as the kernel does for a process that has died
                    while left := asyncio.all_tasks(loop):
                        for task in left:
                            task.cancel()
                        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
                    loop.close()
                    asyncio.set_event_loop(None)

    async def _life(self, steps: int) -> int:
        self._after_restart()
        settings = ServerSettings(state_dir=self.folder / "state", allow_rollouts=True)
        self.host = host = EngineHost(partial(Engine, self.folder / "models"), settings=settings)
        host.start_parts()
        desk = host.parts.needed("rollout")
        assert isinstance(desk, RolloutDesk)
        self.desk = desk
        self.routing = Routing()
        host.listen(self.routing.follow)
        host.listen(self._seen)
        await host.engine.start(patient=True)
        host.set_ready(True)
        await self._settle()
        while steps > 0 and not self.dead:
            steps -= 1
            step = self.random.choices(list(STEPS), list(STEPS.values()))[0]
            if self.random.random() < 0.08:
                self.kill_in = self.random.randrange(3), self.random.choice(("before", "torn", "after"))
            self.said.append(step)
            if step == "kill":
                self.dead = True
            elif step == "restart":
                await host.drain(1.0)
                self.dead = True
            else:
                try:
                    await getattr(self, f"_{step}")()
                except CarpoolError as error:
                    self.said[-1] += f": {error.message}"
                await self._settle()
        return steps

    def _after_restart(self) -> None:
        """What was not written when the server was killed did not happen."""
        kept, allowed = self.durable, self.allowed
        if kept is None:
            self.allowed = Allowance(self._first())
            return
        if allowed.ended is not None and len(kept["history"]) < allowed.ended_at:
            if self.acknowledged:
                raise self._violation(f"the end of version {kept['candidate']} was acknowledged, and is lost")
            allowed.undo()
        if kept["state"] in (*ENDS, "retired"):
            allowed.run = None
        elif allowed.run is None or allowed.run.candidate != kept["candidate"]:
            raise self._violation(f"version {kept['candidate']} came back after its end")

    # -- what is looked at

    def _violation(self, what: str) -> Violation:
        return Violation(f"{what}\n  plan: {self.plan!r}\n  steps: {'; '.join(self.said)}")

    def _answers(self) -> dict[str, float]:
        """By version, the share of the requests that name none."""
        assert self.host is not None
        split, newest = self.routing.splits.get("m"), self.host.catalog.newest.get("m")
        if split is not None:
            share = split.route.share
            return {split.stable.version: 1.0 - share, split.candidate.version: share}
        return {} if newest is None else {newest.version: 1.0}

    def _seen(self, _catalog: Catalog) -> None:
        """A front end has it. What is wrong is told when the step is over: who publishes must not notice."""
        if self.dead or self.wrong is not None:
            return
        try:
            self._follow()
            for version, share in self._answers().items():
                most = self._most(version)
                if share > most + _TINY:
                    raise self._violation(f"version {version} answers {share}, and may {most}")
        except Violation as wrong:
            self.wrong = wrong

    def _follow(self) -> None:
        """Rollouts that began, and ended, are noticed; only those may that somebody asked for."""
        watched, allowed = self.desk.rollouts.find("m"), self.allowed
        if watched is None:
            return
        rollout = watched.record.rollout
        state, candidate = str(rollout.state), rollout.candidate
        if allowed.run is None and not (rollout.over or state == "retired"):
            files = self.files.get(candidate, "")
            new = self.plan is not None and int(candidate) > int(allowed.trusted)
            if self.asked != candidate and not (new and allowed.sent_back.get(candidate) != files):
                raise self._violation(f"nobody asked for a rollout of version {candidate}")
            plan = watched.record.plan
            stages = [*([0.0] if plan.shadows else []), *plan.canary, 1.0]
            allowed.run, self.asked, self.acknowledged = Run(candidate, stages), None, False
        elif allowed.run is not None and (rollout.over or state == "retired"):
            allowed.end(state, self.files.get(candidate, ""), len(watched.record.history))

    def _most(self, version: str) -> float:
        allowed = self.allowed
        if version == allowed.trusted:
            return 1.0
        if allowed.run is not None and allowed.run.candidate == version:
            return allowed.run.share
        swapped = self.plan is None and allowed.run is None and version == self._newest()
        swapped = swapped and version not in allowed.sent_back
        last = 0 if self.durable is None else int(self.durable["candidate"])
        gone = allowed.trusted not in self.files and version not in allowed.sent_back
        if (swapped and int(version) > last) or gone:
            allowed.trusted = version  # without [rollout] the newest serves; and somebody has to
            return 1.0
        return 0.0

    async def _settle(self) -> None:
        if not self.dead:
            await asyncio.sleep(SETTLE_S)
        watched = self.desk.rollouts.find("m")
        if watched is not None and not self.dead:
            await watched.kept()
        if self.wrong is not None:
            raise self.wrong
        if self.dead:
            return
        self._follow()
        self._check_status(self.desk.status("m"))

    def _check_status(self, status: dict[str, Any]) -> None:
        answers = {version: share for version, share in self._answers().items() if share}
        state, stable, share = status["state"], status["stable"], status["share"]
        self.said[-1:] = (
            [f"{self.said[-1]} ({state} {stable} {status['candidate']} {share})"] if self.said else []
        )
        if not answers:
            if self.plan is not None and self.allowed.trusted in self.files:
                raise self._violation(f"nothing answers: {status}")
            return
        said = {stable: 1.0 - share, status["candidate"]: share} if share else {stable: 1.0}
        if answers != {version: part for version, part in said.items() if part}:
            raise self._violation(f"the status says {said}, and {answers} answer")
        if state == "none":
            return
        counts = status["counts"]
        if "every guard is proven" in status["why"] and not counts["candidate"]["answers"]:
            raise self._violation(f"proven by nothing: {status['why']}")
        guards = status["guards"]
        if counts["compared"] and guards and guards["disagreement"]["limit"] is not None:
            words = f"{counts['differ']:,} of {counts['compared']:,} differ"
            if words not in guards["disagreement"]["sentence"]:
                raise self._violation(f"{words}, and the guard says {guards['disagreement']}")
        if self.durable is not None and status["state"] != self.durable["state"]:
            raise self._violation(f"{state} is not what was written: {self.durable['state']}")

    # -- what is done

    async def _look(self) -> None:
        assert self.host is not None
        await self.host.engine.control.look()

    async def _add(self) -> None:
        version = str(int(self._newest()) + 1) if self.files else "1"
        if len(self.files) < 5:
            self._write(version, self.random.choice(("good", "good", "good", "broken")))
        if self.random.random() < 0.7:
            await self._look()

    async def _remove(self) -> None:
        if len(self.files) > 1:
            version = self.random.choice(sorted(self.files))
            shutil.rmtree(self.home / version)
            del self.files[version]
        if self.random.random() < 0.5:
            await self._look()

    async def _change(self) -> None:
        self._write(self.random.choice(sorted(self.files)))
        if self.random.random() < 0.5:
            await self._look()

    async def _start(self) -> None:
        more: dict[str, Any] = {}
        version = self._newest()
        if self.random.random() < 0.7:
            version = self.random.choice(sorted(self.files))
            more["version"] = int(version)
        if self.random.random() < 0.5:
            more["plan"] = self.random.choice(BY_HAND)
        self.said[-1] += f" {version} {more.get('plan', '')}"
        self.asked = version
        await self._act("start", **more)

    async def _act(self, action: str, **more: Any) -> None:
        assert self.host is not None
        await self.host.ask("rollout/act", {"model": "m", "action": action, **more})

    async def _promote(self) -> None:
        run = self.allowed.run
        if run is not None:
            run.stage += 1
        try:
            await self._act("promote")
        except CarpoolError:
            if run is not None:
                run.stage -= 1
            raise

    async def _pause(self) -> None:
        await self._act("pause")

    async def _resume(self) -> None:
        await self._act("resume")

    async def _abort(self) -> None:
        await self._act("abort")
        if self.dead:
            return
        self._follow()
        self.acknowledged = self.allowed.run is None
        if self.durable is not None and self.durable["state"] not in (*ENDS, "retired"):
            raise self._violation("an abort was acknowledged that is not written")

    async def _wait(self) -> None:
        await asyncio.sleep(self.random.choice((1.0, 20.0, 90.0)))

    async def _report(self, differ: int, errors: int) -> bool:
        """What front ends saw since the last catalogue, if there are two versions for them to see."""
        assert self.host is not None
        split = self.routing.splits.get("m")
        if split is None:
            return False
        seen = {
            "model": "m",
            "epoch": split.route.epoch,
            "stable": {"answers": 600, "errors": 0, "late": 0},
            "candidate": {"answers": 600, "errors": errors, "late": 0},
            "comparisons": [("", number < differ) for number in range(600)],
            "seen": 0,
            "skipped": {},
            "fallbacks": errors,
            "ids": [],
            "differences": [],
        }
        await self.host.ask("rollout/seen", {"seen": [seen]})
        return True

    async def _prove(self) -> None:
        """Good answers, and time for one step."""
        run = self.allowed.run
        if run is not None:
            run.stage += 1
        await self._report(0, 0)
        await asyncio.sleep(HOURS * 3600.0 + 1.0)

    async def _breach(self) -> None:
        before = self.desk.status("m")
        state = before.get("paused_in") or before["state"]
        if state in ("shadow", "canary") and self.random.random() < 0.5:
            seen = await self._report(300, 0)
        else:
            seen = await self._report(0, 300)
        if self.dead or not seen or state not in JUDGED:
            return
        after = self.desk.status("m")
        if after["state"] not in SENT_BACK and not (after["state"] == "paused" and not after["share"]):
            raise self._violation(f"a breach in {state} led to {after['state']}: {after['guards']}")


STEPS = {  # and how often
    "add": 16,
    "look": 8,
    "remove": 5,
    "change": 3,
    "start": 14,
    "promote": 14,
    "pause": 5,
    "resume": 5,
    "abort": 12,
    "prove": 12,
    "breach": 8,
    "wait": 6,
    "restart": 6,
    "kill": 6,
}


@contextlib.contextmanager
def _patched(walk: Walk, loop: VirtualLoop) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (rollouts, rollout_desk, watched_rollout, labelled_check, shared_rollouts):
            patch.setattr(module, "monotonic", loop.time)
        patch.setattr(rollouts, "ThreadPoolExecutor", Disk)
        patch.setattr(rollouts, "resident_gb", lambda: 0.0)
        patch.setattr(watched_rollout, "write_document", walk.keep)
        patch.setattr(Fleet, "build", _build)
        patch.setattr(Fleet, "row_of", lambda *_: None)  # its counters
        patch.setattr(engine_host.EngineHost, "_entry", _entry)
        yield


def walk(folder: Path, seed: int, steps: int = 14) -> None:
    """Raises `Violation`."""
    one = Walk(folder, seed)
    try:
        one.lives(steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
