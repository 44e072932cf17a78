"""Decides what has to be proven of a candidate before it goes on, and what sends it back.

Every guard is an interval that may be looked at after every request (`core.evidence`): broken when its lower
end is over the limit, proven when its upper end is under it, and else it waits. What is not proven is not
promoted: without traffic a rollout waits for ever, and says so.

Errors, late answers and complaints are rare, so it is asked whose they are: of all that happened to both, how
many times as often to the candidate. Where hardly anything goes wrong there is nothing to compare:
then it is enough that it happens to at most one of fifty of the candidate's answers.

When the candidate has taken over, no version answers beside it: then it is held against what stable did
before, in the last step that both were in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite
from typing import Any, NamedTuple

from carpool.core.evidence import Interval, good_until_below, interval, times_as_often
from carpool.extensions.rollout.rollout_states import TAKEN_OVER, GuardVerdict, State
from carpool.extensions.rollout.settings import RolloutSettings

GUARDS = ("disagreement", "late", "errors", "feedback", "slower")
RARE = 0.02
_HALF = 0.5  # of the answers: more slow ones than others
_MOST_COUNTED = 10**12
_NUMBERS = ("compared", "differ", "compared_here", "seen", "fallbacks")  # of `Counts`
_WHY_SKIPPED = {
    "busy": "the device had no free time",
    "late": "they waited too long for free time of the device",
    "slots": "there was no memory to hold them",
    "thinned": "their source had been compared just before, or enough others had",
    "failed": "they could not be run or compared",
}


@dataclass(slots=True)
class Side:
    """Counts what happened to one version's answers in one state."""

    answers: int = 0
    errors: int = 0
    late: int = 0  # beyond the promise, or refused for want of time
    complaints: int = 0
    timed: int = 0  # those whose time was compared with stable's
    slow: int = 0  # of these, more than `slower` times as long as stable usually takes

    def add(self, more: Mapping[str, Any]) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + count_of(more, each.name))


@dataclass(slots=True)
class Counts:
    """Sides count anew in each stage, since its share is another; comparisons go on."""

    stable: Side = field(default_factory=Side)
    candidate: Side = field(default_factory=Side)
    compared: int = 0
    differ: int = 0
    compared_here: int = 0  # in this state
    seen: int = 0  # compared too, but of a source that was counted just before
    skipped: dict[str, int] = field(default_factory=dict)  # by reason
    fallbacks: int = 0

    def new_stage(self, state: State) -> None:
        """Of stable, what it did is remembered where it does nothing any more."""
        self.candidate, self.compared_here = Side(), 0
        if state not in TAKEN_OVER:
            self.stable = Side()

    def plus(self, other: Counts) -> Counts:
        """Returns both together, as a new one."""
        total = read_counts(self.as_document())
        total.stable.add(asdict(other.stable))
        total.candidate.add(asdict(other.candidate))
        for each in _NUMBERS:
            setattr(total, each, getattr(total, each) + getattr(other, each))
        for why, count in other.skipped.items():
            total.skipped[why] = total.skipped.get(why, 0) + count
        return total

    def forget(self) -> None:
        """Forgets the counts, since an operator looked at it and let it go on."""
        self.stable, self.candidate, self.compared_here = Side(), Side(), 0
        self.compared = self.differ = 0

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def read_counts(document: Mapping[str, Any]) -> Counts:
    """Reads what `as_document` wrote; what is no count raises `ValueError`."""
    counts = Counts()
    for name, side in (("stable", counts.stable), ("candidate", counts.candidate)):
        side.add(document[name])
    for each in _NUMBERS:
        setattr(counts, each, count_of(document, each))
    counts.skipped = {str(why): count_of(document["skipped"], why) for why in document["skipped"]}
    if counts.differ > counts.compared:
        raise ValueError(f"{counts.differ} of {counts.compared} comparisons cannot differ")
    return counts


def count_of(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name, 0)
    if type(value) is not int or not 0 <= value <= _MOST_COUNTED:
        raise ValueError(f"{name} is no count")
    return value


class GuardResult(NamedTuple):
    """`verdict` is breach, proven, waits or off. `rare`: it happened to at most so much of the candidate's
    answers, for which `RARE` is enough."""

    name: str
    limit: float | None
    low: float
    high: float
    verdict: str
    sentence: str
    rare: float | None = None

    def as_document(self) -> dict[str, Any]:
        return {**self._asdict(), "high": self.high if isfinite(self.high) else None}


def look(plan: RolloutSettings, state: State, counts: Counts) -> list[GuardResult]:
    limits, confidence = plan.guards, _confidence(plan)
    return [_guard(name, getattr(limits, name), state, counts, confidence) for name in GUARDS]


def _confidence(plan: RolloutSettings) -> float:
    """Returns the confidence of each guard, so that all of them together have the one that is asked for."""
    used = [name for name in GUARDS if getattr(plan.guards, name) is not None]
    return 1.0 - (1.0 - plan.guards.confidence) / max(1, len(used))


def comparisons_needed(plan: RolloutSettings, state: State, counts: Counts) -> list[str]:
    """Returns, for an operator who wonders what it waits for, how many more, and what became of the others.
    Takes a few milliseconds."""
    if state not in (State.SHADOW, State.CANARY):
        return []
    said, limit = [], plan.guards.disagreement
    more = 0 if limit is None else good_until_below(counts.differ, counts.compared, limit, _confidence(plan))
    if state is State.SHADOW:
        more = max(more, plan.least - counts.compared_here)
    if more > 0:
        said.append(f"{more:,} more comparisons are needed, if none of them differs")
    lost = {why: count for why, count in counts.skipped.items() if count and why in _WHY_SKIPPED}
    if sum(lost.values()) > counts.compared + counts.seen:
        worst = max(lost, key=lambda why: lost[why])
        said.append(
            f"{sum(lost.values()):,} requests were not compared, {lost[worst]:,} of them because "
            f"{_WHY_SKIPPED[worst]}"
        )
    elif not (counts.compared or counts.seen or lost):
        said.append("no request was received that could be compared")
    return said


def _guard(name: str, limit: float | None, state: State, counts: Counts, confidence: float) -> GuardResult:
    if limit is None:
        return GuardResult(name, None, 0.0, inf, "off", "switched off")
    if name == "disagreement":
        found = interval(counts.differ, counts.compared, confidence)
        told = f"{counts.differ:,} of {counts.compared:,} differ ({_shares(found)}, limit {limit * 100:g} %)"
        return _judged(name, limit, found, told if counts.compared else _nothing_compared(counts))
    if name != "errors" and state is State.SHADOW:
        return GuardResult(name, limit, 0.0, inf, "proven", "asked in the canary")
    if name == "slower":
        return _slower(limit, counts.candidate, confidence)
    mine, others = counts.candidate, counts.stable
    attribute = {"late": "late", "errors": "errors", "feedback": "complaints"}[name]
    bad, other_bad = getattr(mine, attribute), getattr(others, attribute)
    answers, other_answers = (
        max(mine.answers, bad),
        max(others.answers, other_bad),
    )  # complaints may come first
    if name == "feedback" and not bad + other_bad:
        return GuardResult(name, limit, 0.0, inf, "proven", "there were no complaints")
    if not answers:
        return GuardResult(name, limit, 0.0, inf, "waits", "the candidate has not answered yet")
    own = interval(bad, answers, confidence)
    if state in TAKEN_OVER and not other_answers:
        told = (
            f"{name}: {bad:,} of {answers:,} ({_shares(own)}, limit {RARE * 100:g} %, since stable has none)"
        )
        verdict = _judged(name, RARE, own, told).verdict
        return GuardResult(name, limit, 0.0, inf, verdict, told, own.high)
    found = times_as_often(bad, other_bad, answers / (answers + other_answers), confidence)
    told = (
        f"{name}: {bad:,} of {answers:,}, stable {other_bad:,} of {other_answers:,} "
        f"({_times(found)}, limit {limit:g} times)"
    )
    judged = _judged(name, limit, found, told)._replace(rare=own.high)
    if judged.verdict != "waits":
        return judged
    told += f"; at most {own.high * 100:.2g} % of the candidate's responses"
    if own.high <= RARE:
        return judged._replace(verdict="proven", sentence=told)
    return judged._replace(sentence=f"{told}, proven at {RARE * 100:g} %")


def _slower(limit: float, mine: Side, confidence: float) -> GuardResult:
    """More than half of its answers take so many times as long as stable usually does."""
    if not mine.timed:
        return GuardResult(
            "slower", _HALF, 0.0, 1.0, "waits", "no latency was compared with that of stable yet"
        )
    found = interval(mine.slow, mine.timed, confidence)
    told = (
        f"{mine.slow:,} of {mine.timed:,} took more than {limit:g} times as long as stable usually does "
        f"({_shares(found)}, limit {_HALF * 100:g} %)"
    )
    return _judged("slower", _HALF, found, told)


def _nothing_compared(counts: Counts) -> str:
    lost = {why: count for why, count in counts.skipped.items() if count and why in _WHY_SKIPPED}
    if not lost:
        return "nothing was compared yet"
    return f"nothing was compared yet, mostly because {_WHY_SKIPPED[max(lost, key=lambda why: lost[why])]}"


def _judged(name: str, limit: float, found: Interval, told: str) -> GuardResult:
    verdict = "breach" if found.low > limit else "proven" if found.high <= limit else "waits"
    return GuardResult(name, limit, found.low, found.high, verdict, told)


def _shares(found: Interval) -> str:
    return f"{found.low * 100:.1f}–{found.high * 100:.1f} %"


def _times(found: Interval) -> str:
    if not (found.low or isfinite(found.high)):
        return "neither has any"
    high = f"{found.high:.1f}" if isfinite(found.high) else "any number of"
    return f"{found.low:.1f} to {high} times as often"


def together(guards: list[GuardResult], capacity: str = "") -> GuardVerdict:
    """`capacity` is the sentence about a candidate that could not carry the traffic."""
    for guard in guards:
        if guard.verdict == "breach":
            return GuardVerdict(breach=guard.sentence, guard=guard.name)
    waits = [*dict.fromkeys(_waiting(guards)), *([capacity] if capacity else [])]
    return GuardVerdict(proven=not waits, waits_for="; ".join(waits), capacity=capacity)


def _waiting(guards: list[GuardResult]) -> Iterator[str]:
    for guard in guards:
        if guard.verdict == "waits":
            yield f"{guard.sentence}: not proven yet"
