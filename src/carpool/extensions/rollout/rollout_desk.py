"""Answers what front ends report and ask about rollouts: what they saw, how one stands, what to do,
complaints."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from carpool.config.repository import version_folders
from carpool.config.rules import nearest, shown
from carpool.engine.engine_host import without_paths
from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.errors import ConfigError, Forbidden, InvalidInput, NotFound, WrongState
from carpool.extensions.rollout.counted import FEEDBACK, SKIPPED
from carpool.extensions.rollout.disagreements import Disagreements
from carpool.extensions.rollout.rollout_checks import not_for_two, status_document
from carpool.extensions.rollout.rollout_guards import comparisons_needed, count_of
from carpool.extensions.rollout.rollout_states import Rollout, act, actions
from carpool.extensions.rollout.rollouts import Rollouts
from carpool.extensions.rollout.settings import RolloutSettings, rollout_settings
from carpool.extensions.rollout.settings_reader import as_document, plan_of
from carpool.extensions.rollout.watched_rollout import WatchedRollout
from carpool.observe.logs import logger

log = logger("rollout")

ACTIONS = ("start", "promote", "pause", "resume", "abort")
_TOWARDS_STABLE = ("pause", "abort")  # always open to keys that may control models
_APART_S = 5.0  # between two comparisons of one source, whichever front ends saw them
_MOST_SOURCES = 10_000
_MOST_IDS, _ID_S = 100_000, 86400.0
_LONGEST = 500  # characters of a reason
_MOST_LISTED = 200
_MOST_KEEPING = 64 << 20
_LOADING_AGAIN = "after a restart: its versions are being loaded"


class RolloutDesk:
    def __init__(self, server: EngineServer) -> None:
        settings = server.settings
        self._engine = server.engine
        self._open = settings.option("allow_rollouts") or settings.model_control_mode == "explicit"
        self.rollouts = Rollouts(server)
        self._answered: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # by model and id
        self._keeping: deque[tuple[Future[None], int]] = deque()  # what is being written, and its bytes
        self._judged: OrderedDict[tuple[str, str], str] = OrderedDict()  # the verdict on an id
        self._kept: dict[
            str, tuple[object, Disagreements]
        ] = {}  # by model, with the settings it was made for
        self.part = EnginePart(
            questions={
                "status": self._rollout,
                "act": self._rollout,
                "seen": self._seen,
                "disagreements": self._disagreements,
                "feedback": self._feedback,
            },
            loads=self.rollouts,
            close=self.rollouts.close,
            state=self,
        )

    # ---- how it stands, and what to do with it ----------------------------------------------------------

    async def _rollout(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        name = str(arguments["model"])
        if self._engine.control.known(name) is None:
            raise self._engine.control.unknown(name)
        action = arguments.get("action")
        if action is not None:
            await self._act(name, action, arguments)
            watched = self.rollouts.find(name)
            if watched is not None:
                await watched.kept()
        return self.status(name)

    async def _act(self, name: str, action: object, arguments: Mapping[str, Any]) -> None:
        if not isinstance(action, str) or action not in ACTIONS:
            raise InvalidInput(
                f"action cannot be {shown(str(action))}; {nearest(str(action), ACTIONS)}", field="action"
            )
        if not (self._open or arguments.get("admin") or action in _TOWARDS_STABLE):
            raise Forbidden(
                f"to {action} a rollout by request, start the server with --allow-rollouts, "
                "--model-control-mode explicit or --admin-key-file"
            )
        reason = arguments.get("reason", "")
        if not isinstance(reason, str) or len(reason) > _LONGEST or not reason.isprintable():
            raise InvalidInput(f"reason must be a text of at most {_LONGEST} characters", field="reason")
        if action == "start":
            await self._start(name, arguments, reason)
            return
        watched = self.rollouts.find(name)
        if watched is None:
            raise NotFound(f"nothing of '{name[:80]}' is being rolled out", reason="no-rollout")
        plan, shared = watched.record.plan, self.rollouts.shared
        if action == "promote" and watched.loads_again:
            raise WrongState("its versions are not loaded: it cannot be promoted", field="action")

        def acted(rollout: Rollout) -> Rollout:
            return act(rollout, plan, action, monotonic(), reason)

        if shared is None:
            self.rollouts.moved(watched, acted(watched.record.rollout))
        else:
            await shared.act(watched, acted)

    async def _start(self, name: str, arguments: Mapping[str, Any], reason: str) -> None:
        """Idempotent: what is under way already is not started again."""
        model, home = self._engine.control.known(name), self.rollouts.home(name)
        if model is None or home is None or not model.serving:
            raise WrongState(f"'{name[:80]}' is not served from a folder of versions: load it first")
        present = await asyncio.to_thread(version_folders, home)
        plan, by_hand = self._plan(
            rollout_settings(next(iter(model.serving.values())).config), arguments.get("plan")
        )
        asked = arguments.get("version")
        candidate = plan.candidate or max(present, default=0)
        if asked is not None:
            candidate = int(checked_version(asked))
        watched = self.rollouts.find(name)
        if watched is not None and not watched.record.rollout.over:
            if watched.record.rollout.candidate == str(candidate):
                return
            under_way = watched.record.rollout.candidate
            raise WrongState(f"version {under_way} of '{name}' is being rolled out: abort that first")
        if candidate not in present:
            there = ", ".join(map(str, sorted(present)))
            raise NotFound(
                f"'{name}' has no version {candidate}; there are {there}", reason="unknown-version"
            )
        stable = max(model.serving) if watched is None else int(watched.record.rollout.stable)
        if stable not in model.serving:
            raise WrongState(f"version {stable} of '{name}', which serves, is not loaded: load it first")
        if candidate == stable:
            raise WrongState(f"version {candidate} of '{name}' serves already", field="version")
        why = f"by hand: {reason}" if reason else "by hand"
        await self.rollouts.start(name, plan, str(stable), str(candidate), why, by_hand=by_hand)
        self.rollouts.bring(name)

    def _plan(self, known: RolloutSettings | None, given: object) -> tuple[RolloutSettings, bool]:
        """Returns what the request says over what the model's settings say."""
        if given is None or given == {}:
            return known or RolloutSettings(), known is None
        if not isinstance(given, dict):
            raise InvalidInput("plan must be an object with the keys of [rollout]", field="plan")
        base = {} if known is None else as_document(known)
        for key, value in base.items():  # of a table, what the request does not name stays as well
            if isinstance(value, dict) and isinstance(given.get(key), dict):
                base[key] = {**value, **given[key]}
            else:
                base[key] = given.get(key, value)
        try:
            plan = plan_of({**given, **base}, "plan")
        except ConfigError as error:
            raise InvalidInput(error.message, field="plan") from None
        if plan.keep.folder not in ("", (known or RolloutSettings()).keep.folder):
            raise InvalidInput("plan: keep.folder is for the model's settings to name", field="plan")
        return plan, True

    def status(self, name: str) -> dict[str, Any]:
        watched = self.rollouts.find(name)
        if watched is not None:
            record = watched.record
            shared, counts = self.rollouts.shared, watched.counts
            missing = f"version {watched.missing} is not on this replica yet" if watched.missing else ""
            more = {
                "counts": counts.as_document(),
                **({"why": _LOADING_AGAIN} if watched.loads_again else {}),
                "guards": {guard.name: guard.as_document() for guard in watched.guards},
                "needs": comparisons_needed(record.plan, record.rollout.state, counts),
                "actions": list(actions(record.rollout)),
                "plan": as_document(record.plan),
                "history": record.history,
                "seen_ms": watched.seen_ms,
                "trouble": self._not_loaded(name) or missing or watched.trouble,
                **({} if shared is None else {"shared": shared.status(name)}),
            }
            return status_document(record, monotonic(), self.rollouts.route(watched), more)
        model = self._engine.control.known(name)
        serving = {} if model is None else model.serving
        unfit, held = not_for_two(model), self.rollouts.held(name)
        return {
            "model": name,
            "state": "none",
            "stable": str(max(serving)) if serving else None,
            "candidate": None,
            "share": 0.0,
            "why": "nothing is being rolled out" + (f": {unfit}" if unfit else ""),
            "guards": {},
            "needs": [],
            "actions": [] if unfit or (held is not None and held.elsewhere) else ["start"],
            "history": [],
            "trouble": "" if held is None else without_paths(held.why, self._engine.folders),
        }

    def _not_loaded(self, name: str) -> str:
        """Returns why no version of this model answers, if none does."""
        model = self._engine.control.known(name)
        if model is None or model.serving:
            return ""
        why = next((line.reason for line in model.lines(()) if line.reason), "it is not loaded")
        return without_paths(why, self._engine.folders).removeprefix(f"{name}: ")

    # ---- what front ends saw ----------------------------------------------------------------------------

    async def _seen(self, arguments: Mapping[str, Any]) -> None:
        """Takes reports in bulk: counts of both sides, comparisons, what was skipped, ids, pictures that
        differ."""
        for seen in arguments["seen"]:
            watched = self.rollouts.find(str(seen["model"]))
            if watched is None:
                continue
            self._remember(watched.record.model, seen["ids"])
            if watched.record.rollout.over or seen["epoch"] != watched.epoch:
                continue  # of a state that is over
            try:
                self._count(watched, seen)
            except ValueError as error:
                log.error("not-counted", model=watched.record.model, error=str(error))
                continue
            for line in seen["differences"]:
                self._keep(watched, line)
            self.rollouts.decide(watched)

    def _count(self, watched: WatchedRollout, seen: Mapping[str, Any]) -> None:
        counts, sources, now = watched.record.counts, watched.sources, monotonic()
        counts.stable.add(seen["stable"])
        counts.candidate.add(seen["candidate"])
        counts.fallbacks += count_of(seen, "fallbacks")
        counts.seen += count_of(seen, "seen")
        for why in seen["skipped"]:
            if why in SKIPPED:
                counts.skipped[why] = counts.skipped.get(why, 0) + count_of(seen["skipped"], why)
        for source, differs in seen["comparisons"]:
            last = sources.pop(source, None) if source else None
            if last is not None and now - last < _APART_S:
                sources[source] = last
                counts.seen += 1
                continue
            if source:
                sources[source] = now
                if len(sources) > _MOST_SOURCES:
                    sources.popitem(last=False)
            counts.compared += 1
            counts.compared_here += 1
            counts.differ += bool(differs)

    # ---- disagreements ----------------------------------------------------------------------------------

    def _ring(self, watched: WatchedRollout) -> Disagreements | None:
        keep, name = watched.record.plan.keep, watched.record.model
        if not keep.folder:
            return None
        known = self._kept.get(name)
        if known is None or known[0] != keep:
            known = self._kept[name] = keep, Disagreements(keep, name)
        return known[1]

    def _keep(self, watched: WatchedRollout, line: Mapping[str, Any]) -> None:
        record = watched.record
        picture = base64.b64decode(line["picture"])
        kept = {
            "time": round(time.time(), 3),
            "versions": [record.rollout.stable, record.rollout.candidate],
            **{key: value for key, value in line.items() if key != "picture"},
        }

        def write() -> None:
            ring = self._ring(watched)
            try:
                if ring is not None:
                    ring.add(kept, picture)
            except OSError as error:
                watched.trouble = f"images that differ cannot be stored: {error.strerror or error}"

        waiting = self._keeping
        while waiting and waiting[0][0].done():
            waiting.popleft()
        if waiting and sum(size for _, size in waiting) + len(picture) > _MOST_KEEPING:
            watched.trouble = "images that differ arrive faster than they can be stored"
            return
        waiting.append((self.rollouts.disk.submit(write), len(picture)))

    async def _disagreements(self, arguments: Mapping[str, Any]) -> Any:
        """Returns the list, or with a number one picture in base64."""
        watched = self.rollouts.find(str(arguments["model"]))
        loop, disk = asyncio.get_running_loop(), self.rollouts.disk
        ring = None if watched is None else await loop.run_in_executor(disk, self._ring, watched)
        number = arguments.get("number")
        if number is None:
            if ring is None:
                return {"kept": False, "why": "no folder is named in keep of [rollout]", "disagreements": []}
            after, limit = int(arguments.get("after", 0)), int(arguments.get("limit", 50))
            work = partial(ring.worst, after, max(0, min(limit, _MOST_LISTED)))
            return {"kept": True, "disagreements": await loop.run_in_executor(disk, work)}
        picture = None if ring is None else await loop.run_in_executor(disk, ring.picture, int(number))
        if picture is None:
            raise NotFound(f"there is no image {number}", reason="no-picture")
        return base64.b64encode(picture).decode()

    # ---- feedback ---------------------------------------------------------------------------------------

    def _remember(self, model: str, ids: list[tuple[str, str]]) -> None:
        now = monotonic()
        for identity, version in ids:
            self._answered[model, identity] = version, now
        while len(self._answered) > _MOST_IDS or (
            self._answered and now - next(iter(self._answered.values()))[1] > _ID_S
        ):
            self._answered.popitem(last=False)

    async def _feedback(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns which version answered, and whether it counts."""
        name, identity, verdict = (arguments[key] for key in ("model", "id", "verdict"))
        watched = self.rollouts.find(name)
        if watched is None or watched.record.rollout.over:
            return {"counted": False, "why": "nothing is being rolled out"}
        version = self._version_of(name, identity)
        side = _side(watched, version)
        if side is None:
            raise NotFound(
                f"there is no response {shown(identity)}, or it is too old", field="id", reason="unknown-id"
            )
        if (name, identity) in self._judged:
            return {"counted": False, "version": version, "why": "it was judged already"}
        self._judged[name, identity] = verdict
        if len(self._judged) > _MOST_IDS:
            self._judged.popitem(last=False)
        row = self._engine.fleet.row_of(name, version)
        if row is not None:
            row.add(FEEDBACK[verdict])
        if verdict != "right":
            side.complaints += 1
            self.rollouts.decide(watched)
        return {"counted": True, "version": version}

    def _version_of(self, name: str, identity: str) -> str:
        """Returns the version of an id that a client chose, which was remembered; or of one that came with an
        answer."""
        found = self._answered.get((name, identity))
        if found is not None:
            return found[0]
        version, dash, _ = identity.partition("-")
        return version if dash and version.isdigit() else ""


def _side(watched: WatchedRollout, version: str) -> Any:
    rollout, counts = watched.record.rollout, watched.record.counts
    return {rollout.candidate: counts.candidate, rollout.stable: counts.stable}.get(version)


def checked_version(text: object) -> str:
    """Returns the version that a request names, checked."""
    if type(text) is int and 0 < text < 10**18:
        return str(text)
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or not 0 < len(text) <= 18:
        raise InvalidInput("version must be a number like 2", field="version")
    return str(int(text))
