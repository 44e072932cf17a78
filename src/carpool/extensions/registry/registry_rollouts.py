"""Decides what becomes of a model whose addresses in a registry moved: a rollout, of which the registry
hears.

The candidate's address is rolled out as [rollout] says, or as its defaults do; so is the stable one where
there is a [rollout], and else it takes over at once. A registry that is down stops nothing of this: a
rollout's own record says which version serves, and the registry is notified when it answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import NamedTuple

from carpool.engine.models.served import Served
from carpool.errors import Unavailable
from carpool.extensions.registry.registry_watch import RegistryWatch
from carpool.extensions.registry.source import NotReady, Pin
from carpool.extensions.rollout.rollout_file import Record
from carpool.extensions.rollout.rollout_states import Rollout, State, retired
from carpool.extensions.rollout.rollouts import Rollouts
from carpool.extensions.rollout.settings import RolloutSettings, rollout_settings
from carpool.observe.logs import logger

log = logger("registry")

_MOST_NEWS = 100  # of a registry that does not answer: the older ones are lost


class _News(NamedTuple):
    """One change of state, as the registry is to hear it."""

    rollout: Rollout
    before: int  # the version that was stable when it began
    sentence: str
    metrics: dict[str, float]


class RegistryRollouts:
    """Runs wholly in the engine's loop."""

    def __init__(self, watch: RegistryWatch, rollouts: Rollouts) -> None:
        self._watch = watch
        self._rollouts = rollouts
        self._news: dict[str, deque[_News]] = {}
        self._telling: dict[str, asyncio.Task[None]] = {}
        rollouts.listeners.append(self._changed)

    # ---- from the registry

    async def moved(self, model: str, stable: Pin | None, candidate: Pin | None) -> None:
        target = stable or candidate
        assert target is not None
        serving = self._serving(model)
        followed = self._watch.followed(model)
        assert followed is not None  # the watch, which calls this, has it
        state, known = followed.state, self._rollouts.find(model)
        record = None if known is None else known.record
        if record is not None and int(record.rollout.serving) in serving.keys() - {state.serve[0]}:
            await self._adopt(record)  # the folder does not know yet; after that it is called again
            return
        if record is not None and not record.rollout.over:
            under_way = int(record.rollout.candidate)
            if under_way == target.version:
                self._hear(model, _news(record)._replace(metrics={}))  # the server may have ended before
                return
            if stable is None and under_way in (pin.version for pin in state.pins):
                return  # it is called again when that is over
            self._end(model, f"{target.address} points to version {target.version}", target.version)
        if stable is not None and rollout_settings(next(iter(serving.values())).config) is None:
            await self._swap(model, stable.version)
            target = candidate
        if target is not None:
            await self._roll_out(model, target)

    async def moved_back(self, model: str) -> None:
        self._end(model, "the registry's addresses were moved back")

    def _serving(self, model: str) -> Mapping[int, Served]:
        found = self._watch.serving(model)
        if not found:
            raise NotReady(f"{model} is not loaded: its versions wait")
        return found

    def _end(self, model: str, why: str, target: int = 0) -> None:
        """What is under way goes back; what has taken over already stays, unless it is left for the version
        before it."""
        watched = self._rollouts.find(model)
        if watched is None or watched.record.rollout.over:
            return
        rollout = watched.record.rollout
        if rollout.state is State.RETIRED:
            return
        if rollout.serving == rollout.candidate and str(target) not in ("0", rollout.stable):
            self._rollouts.moved(watched, retired(rollout, monotonic(), why))
        else:
            self._rollouts.moved(watched, rollout.moved(State.ROLLED_BACK, monotonic(), why))

    def _stable(self, model: str) -> int:
        watched, followed = self._rollouts.find(model), self._watch.followed(model)
        if watched is not None:
            return int(watched.record.rollout.stable)
        return 0 if followed is None else followed.state.serve[0]

    async def _swap(self, model: str, version: int) -> None:
        before = self._stable(model)
        if before == version:
            return  # it is what the rollout that ended went back to
        self._rollouts.take(model, version)
        try:
            await self._watch.swap(model, version)
        except BaseException:
            self._rollouts.take(model, before)
            raise

    async def _roll_out(self, model: str, pin: Pin) -> None:
        serving, stable = self._serving(model), self._stable(model)
        if stable == pin.version:
            return
        if stable not in serving:
            raise NotReady(f"version {stable} of {model} is not loaded: version {pin.version} waits")
        if (held := self._rollouts.held(model)) is not None:
            raise NotReady(held.why)
        plan = rollout_settings(next(iter(serving.values())).config) or RolloutSettings()
        why = f"{pin.address} points to it"
        try:
            await self._rollouts.start(model, plan, str(stable), str(pin.version), why)
        except Unavailable as error:  # where replicas share rollouts
            raise NotReady(error.message) from None
        self._watch.count_moves(model, self._watch.moves(model) + 1.0)
        self._rollouts.bring(model)

    # ---- to the registry

    def _changed(self, record: Record) -> None:
        if self._watch.followed(record.model) is not None or not self._watch.opened.is_set():
            self._hear(record.model, _news(record))

    def _hear(self, model: str, news: _News) -> None:
        """Notifies the registry in the order of the news, without waiting for it."""
        self._news.setdefault(model, deque(maxlen=_MOST_NEWS)).append(news)
        telling = self._telling.get(model)
        if telling is None or telling.done():
            self._telling[model] = asyncio.get_running_loop().create_task(self._tell(model))

    async def _tell(self, model: str) -> None:
        await self._watch.opened.wait()
        news = self._news[model]
        while news:
            try:
                await self._tell_one(model, news.popleft())
            except Exception:  # ours: the next one may fare better
                log.exception("registry-not-notified", model=model)

    async def _tell_one(self, model: str, news: _News) -> None:
        rollout, known = news.rollout, self._rollouts.find(model)
        candidate, followed = int(rollout.candidate), self._watch.followed(model)
        if known is None or followed is None:
            return
        if rollout.state is State.FULL or rollout.over:
            await self._adopt(known.record, candidate)
        if not followed.settings.write_back:
            return
        await self._watch.write_back(model, candidate, str(rollout.state), news.sentence, news.metrics)
        if rollout.state is State.RETIRED and news.before != candidate:
            await self._watch.write_back(model, news.before, str(State.RETIRED), news.sentence)

    async def _adopt(self, record: Record, judged: int = 0) -> None:
        """What serves by now: something else may have been begun since one of its candidates was judged."""
        news = _news(record)
        await self._watch.adopt(
            record.model,
            (int(record.rollout.serving),),
            state="full",
            rollout=news.sentence,
            judged=judged or int(record.rollout.candidate),
            instead_of=news.before,
        )


def _news(record: Record) -> _News:
    rollout = record.rollout
    lines = reversed(record.history)
    begun = next((line for line in lines if line["to"] == State.LOADING), record.history[-1])
    since = datetime.fromtimestamp(begun["time"], UTC).isoformat(timespec="seconds")
    step = f", step {rollout.step} of {len(record.plan.canary)}" if rollout.step else ""
    sentence = (
        f"{begun['stable']} to {rollout.candidate}, begun {since}: {rollout.state}{step}: {rollout.why}"
    )
    return _News(rollout, int(begun["stable"]), sentence, _metrics(record))


def _metrics(record: Record) -> dict[str, float]:
    """Returns those of the state that ended just now: its counts were written down before they began anew."""
    counts, share = record.history[-1]["counts"], record.rollout.traffic(record.plan).share
    found = {"share": share, "compared": counts["compared"], "differ": counts["differ"]}
    if record.history[-1]["from"] in (State.CANARY, State.PAUSED):
        for side in ("stable", "candidate"):
            found |= {f"{side}.{key}": counts[side][key] for key in ("answers", "errors", "late")}
    return {f"carpool.{key}": float(number) for key, number in found.items()}
