"""Implements the states of a rollout: a pure machine, which gets the time and what the guards say.

    loading → checked → shadow → canary 1 … n → full → standby → retired → done
       │         │         │         │            │       │
       └─────────┴─────────┴─────────┴────────────┴───────┴──► rolled-back (a guard, or by hand)
       │         │         │         │
       └─────────┴─────────┴─────────┴──► failed (it does not load, does not fit, its files changed)

Beside them `paused`, from which `resume` goes on where it stood; guards act there, too. From every state,
abort leads to stable at once: what a state sends to whom (`traffic`) is a function of it alone, so that a
change is one catalogue.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from carpool.errors import WrongState
from carpool.extensions.rollout.settings import RolloutSettings


class State(StrEnum):
    LOADING = "loading"
    CHECKED = "checked"
    SHADOW = "shadow"
    CANARY = "canary"
    FULL = "full"
    STANDBY = "standby"
    RETIRED = "retired"
    PAUSED = "paused"
    DONE = "done"
    ROLLED_BACK = "rolled-back"
    FAILED = "failed"


ENDS = (State.DONE, State.ROLLED_BACK, State.FAILED)
TAKEN_OVER = (State.FULL, State.STANDBY)  # the candidate has all of it, and the old version is still there
_GUARDED = (State.SHADOW, State.CANARY, *TAKEN_OVER)
ACTIONS: Mapping[State, tuple[str, ...]] = {
    State.LOADING: ("pause", "abort"),
    State.CHECKED: ("promote", "pause", "abort"),
    State.SHADOW: ("promote", "pause", "abort"),
    State.CANARY: ("promote", "pause", "abort"),
    State.FULL: ("promote", "pause", "abort"),
    State.STANDBY: ("promote", "pause", "abort"),
    State.RETIRED: ("abort",),
    State.PAUSED: ("resume", "promote", "abort"),
    **dict.fromkeys(ENDS, ("start", "abort")),
}


class Traffic(NamedTuple):
    """Describes whom unnamed requests go to, and what is run beside them."""

    share: float = 0.0  # of the candidate
    mirrored: float = 0.0  # of the requests, on the candidate too
    compared: bool = False  # what the candidate answers is run on stable too


class GuardVerdict(NamedTuple):
    """Names what the guards say together."""

    breach: str = ""  # the sentence of the one that is broken
    guard: str = ""  # its name
    proven: bool = False
    waits_for: str = ""  # in words, what is not proven yet
    capacity: str = ""  # why the candidate could not carry the traffic, and so does not go on by itself


NO_VERDICT = GuardVerdict()


class Labelled(NamedTuple):
    """What the labelled set of `evaluate` said, in words; `worse` is None where it could not be asked."""

    sentence: str
    worse: bool | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Describes a rollout that spent `spent` seconds in this state before `since`, which is a time of this
    process's clock."""

    stable: str
    candidate: str
    state: State = State.LOADING
    step: int = 0  # of the canary, from 1 on
    spent: float = 0.0
    since: float | None = None  # None: its clock stands
    before: State | None = None  # what was paused
    held: bool = False  # a guard paused it: stable answers everything meanwhile
    why: str = ""

    @property
    def over(self) -> bool:
        return self.state in ENDS

    @property
    def stage(self) -> tuple[State, int]:
        """Returns where it is, also while it is paused there."""
        return self.before or self.state, self.step

    @property
    def serving(self) -> str:
        """Returns the version that answers requests without one, apart from the canary's share."""
        return self.candidate if (self.before or self.state) in TAKEN_OVER and not self.held else self.stable

    @property
    def wanted(self) -> tuple[str, ...]:
        """Returns the versions that have to be loaded, the serving one first."""
        if self.over or self.state is State.RETIRED:
            return (self.stable,)
        return tuple(dict.fromkeys((self.serving, self.stable, self.candidate)))

    def elapsed(self, now: float) -> float:
        return self.spent if self.since is None else self.spent + max(0.0, now - self.since)

    def traffic(self, plan: RolloutSettings) -> Traffic:
        state = self.before or self.state
        if self.over or self.held:
            return Traffic()
        if state is State.SHADOW:
            return Traffic(mirrored=plan.shadow)
        if state is State.CANARY:
            return Traffic(plan.canary[self.step - 1], compared=True)
        return Traffic(1.0) if state in TAKEN_OVER else Traffic()

    def alike(self, other: Rollout) -> bool:
        """Returns whether it is the same state of the same versions, whatever their clocks and words say."""
        mine, its = (replace(one, spent=0.0, since=None, why="") for one in (self, other))
        return mine == its

    def facts(self) -> dict[str, Any]:
        """Returns the facts for the log."""
        facts = {name: getattr(self, name) for name in ("step", "stable", "candidate", "why")}
        return {"state": str(self.state), **facts}

    def moved(self, state: State, now: float, why: str, step: int = 0) -> Rollout:
        return replace(self, state=state, step=step, spent=0.0, since=now, before=None, held=False, why=why)

    def stopped(self, now: float) -> Rollout:
        """Returns it as it is written down: its reader has another clock."""
        return replace(self, spent=self.elapsed(now), since=None)

    def going(self, now: float) -> Rollout:
        return self if self.since is not None or self.state is State.PAUSED else replace(self, since=now)


def advance(
    rollout: Rollout,
    plan: RolloutSettings,
    now: float,
    verdict: GuardVerdict,
    counted: int,
    *,
    loaded: bool,
    labelled: Labelled | None = None,
) -> Rollout:
    """Returns the next state, or this one with what it waits for. `counted` are comparisons in the shadow,
    and the candidate's answers in the canary; `loaded`: the candidate is there."""
    state = rollout.state
    if rollout.over:
        return rollout
    if verdict.breach and rollout.stage[0] in _GUARDED and not rollout.held:
        return breached(rollout, plan, now, verdict)
    if state is State.PAUSED:
        return rollout
    if state is State.LOADING:
        return rollout.moved(State.CHECKED, now, "it is loaded and fits") if loaded else rollout
    if state is State.CHECKED:
        return _checked(rollout, plan, now, verdict, labelled)
    if state is State.FULL:
        return rollout.moved(State.STANDBY, now, f"version {rollout.candidate} answers everything")
    if state is State.STANDBY:
        if rollout.elapsed(now) < plan.standby_h * 3600.0:
            return rollout
        return retired(rollout, now, "the standby time is over")
    if state is State.RETIRED:
        return rollout.moved(State.DONE, now, rollout.why)
    return _proven(rollout, plan, now, verdict, counted)


def _checked(
    rollout: Rollout, plan: RolloutSettings, now: float, verdict: GuardVerdict, labelled: Labelled | None
) -> Rollout:
    """What could not carry the traffic may be shown it, and answers none of it by itself."""
    ahead = _evaluated(rollout, plan, now, labelled)
    if verdict.capacity and ahead.state in (State.CANARY, *TAKEN_OVER):
        return replace(rollout, why=f"{verdict.capacity}: promote it by hand")
    return ahead


def _evaluated(rollout: Rollout, plan: RolloutSettings, now: float, labelled: Labelled | None) -> Rollout:
    if not plan.evaluate:
        return after(rollout, plan, now, "it is loaded and fits")
    if labelled is None:
        return replace(rollout, why=f"the labelled set {plan.evaluate} is being evaluated")
    if labelled.worse is None:
        return replace(
            rollout,
            why=f"the labelled set {plan.evaluate} gave no result: {labelled.sentence}; evaluate it by "
            "hand, then promote",
        )
    if labelled.worse:
        return failed(rollout, now, labelled.sentence)
    return after(rollout, plan, now, labelled.sentence)


def _proven(
    rollout: Rollout, plan: RolloutSettings, now: float, verdict: GuardVerdict, counted: int
) -> Rollout:
    """Shadow and canary end when their time is over, enough was seen, and every guard is proven."""
    hours = plan.shadow_h if rollout.state is State.SHADOW else plan.canary_h
    seen = "comparisons" if rollout.state is State.SHADOW else "answers"
    waits = []
    if rollout.elapsed(now) < hours * 3600.0:
        waits.append(f"{duration(rollout.elapsed(now))} of {duration(hours * 3600.0)}")
    if counted < plan.least:
        waits.append(f"{counted:,} of {plan.least:,} {seen}")
    if verdict.waits_for:
        waits.append(verdict.waits_for)
    if not waits and verdict.proven:
        if plan.promote == "proven":
            where = "the shadow" if rollout.state is State.SHADOW else f"step {rollout.step} of the canary"
            return after(rollout, plan, now, f"every guard was proven in {where}")
        waits.append("every guard is proven: promote it by hand")
    return replace(rollout, why="; ".join(waits))


def after(rollout: Rollout, plan: RolloutSettings, now: float, why: str) -> Rollout:
    """Returns the state behind this one."""
    state, step = rollout.before or rollout.state, rollout.step
    if state is State.LOADING:
        return rollout.moved(State.CHECKED, now, why)
    if state is State.CHECKED and plan.shadows:
        return rollout.moved(State.SHADOW, now, why)
    if state in (State.CHECKED, State.SHADOW, State.CANARY):
        if step < len(plan.canary):
            return rollout.moved(State.CANARY, now, why, step + 1)
        return rollout.moved(State.FULL, now, why)
    if state is State.FULL:
        return rollout.moved(State.STANDBY, now, why)
    return retired(rollout, now, why)


def retired(rollout: Rollout, now: float, why: str) -> Rollout:
    """From here on the candidate is what is stable."""
    told = f"version {rollout.candidate} took over from version {rollout.stable}: {why}"
    return replace(rollout.moved(State.RETIRED, now, told), stable=rollout.candidate)


def breached(rollout: Rollout, plan: RolloutSettings, now: float, verdict: GuardVerdict) -> Rollout:
    if plan.guards.on_breach == "pause":
        paused = rollout if rollout.state is State.PAUSED else _paused(rollout, now, verdict.breach)
        return replace(paused, held=True, why=verdict.breach)
    return rollout.moved(State.ROLLED_BACK, now, verdict.breach)


def failed(rollout: Rollout, now: float, why: str) -> Rollout:
    """Stable goes on, also where the candidate had everything already."""
    return rollout if rollout.over else rollout.moved(State.FAILED, now, why)


def _paused(rollout: Rollout, now: float, why: str) -> Rollout:
    return replace(
        rollout, state=State.PAUSED, before=rollout.state, spent=rollout.elapsed(now), since=None, why=why
    )


def act(rollout: Rollout, plan: RolloutSettings, action: str, now: float, reason: str = "") -> Rollout:
    """Acts by hand. What is so already stays as it is; what does not fit raises, with what does."""
    told = f"by hand: {reason}" if reason else "by hand"
    if action == "abort":
        if rollout.over or rollout.state is State.RETIRED:
            return rollout  # what serves is stable already
        return rollout.moved(State.ROLLED_BACK, now, told)
    if action == "pause" and rollout.state is State.PAUSED:
        return rollout
    if action == "resume" and not (rollout.over or rollout.state is State.PAUSED):
        return rollout
    allowed = actions(rollout)
    if action not in allowed:
        raise WrongState(
            f"a rollout that is {rollout.state} cannot {action}; possible actions: {' or '.join(allowed)}",
            field="action",
        )
    if action == "promote" and rollout.before is State.LOADING:
        raise WrongState(
            "a candidate that is not loaded yet cannot be promoted; possible actions: resume", field="action"
        )
    if action == "pause":
        return _paused(rollout, now, told)
    if action == "resume":
        assert rollout.before is not None
        return replace(rollout, state=rollout.before, before=None, held=False, since=now, why=told)
    return after(rollout, plan, now, told)


def actions(rollout: Rollout) -> Collection[str]:
    return ACTIONS[rollout.state]


def duration(seconds: float) -> str:
    """Returns it as a person says it: "3 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        rest = int(seconds % 60)
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"
