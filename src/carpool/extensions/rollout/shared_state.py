"""Defines what the replicas of a model know together about its rollout: one value, and the rules by which it
grows.

Whatever replicas read and write, and in whatever order, they come to the same value, since `merged` takes the
higher of two: a later rollout is higher than an earlier one; of one rollout, sent back is higher than done,
done than failed, and failed than all that is under way; and else the one that has changed more often is. So a
replica that was away, however long, brings back nothing that was aborted. Going on is a change that is made
only in the place where the value lies, from the value that lies there (`went`); towards stable a replica goes
by itself and puts that on top of what the others have come to (`on_top`).

Each replica counts for itself, and what they counted adds up. A replica that is started again is another one.
There is no clock in it: of times, the seconds that were spent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from carpool.errors import ConfigError
from carpool.extensions.rollout.rollout_file import Mark, Record, read_mark, read_rollout, rollout_document
from carpool.extensions.rollout.rollout_guards import Counts, read_counts
from carpool.extensions.rollout.rollout_states import Rollout, State
from carpool.extensions.rollout.settings import RolloutSettings
from carpool.extensions.rollout.settings_reader import as_document, plan_of

_FORMAT = 1
_MOST_BYTES = 4 << 20
_MOST_PARTS = 500
_MOST_NAME = 80
_ENDS = {State.FAILED: 1, State.RETIRED: 2, State.DONE: 2, State.ROLLED_BACK: 3}


class NewerFormat(ValueError):
    """Means that a newer release wrote it, which knows more: it is left alone."""


@dataclass(frozen=True, slots=True)
class Part:
    """Describes what one replica says of itself in this state."""

    beat: int = 0  # counted up whenever it says something
    ready: bool = False  # it has loaded the candidate
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class SharedRollout:
    mark: Mark
    plan: RolloutSettings
    rollout: Rollout  # its clock stands
    by_hand: bool = False
    digests: Mapping[str, str] = field(default_factory=dict)
    before: Counts = field(default_factory=Counts)  # what all counted before this state
    parts: Mapping[str, Part] = field(default_factory=dict)  # by replica

    @property
    def rank(self) -> tuple[int, str, int, int]:
        return rank(self.mark, self.rollout)

    def counted(self, without: str = "") -> Counts:
        """Returns what was counted by all replicas, but for one."""
        total = self.before
        for name, part in self.parts.items():
            total = total if name == without else total.plus(part.counts)
        return total

    def noted(self, replica: str, part: Part, spent: float) -> SharedRollout:
        rollout = replace(self.rollout, spent=max(self.rollout.spent, spent))
        return replace(self, rollout=rollout, parts={**self.parts, replica: part})

    def went(self, after: Rollout, live: Collection[str], *, forget: bool = False) -> SharedRollout:
        """Returns the next state. Sides count anew in another stage; with `forget`, an operator has looked at
        what was broken."""
        before = self.counted()
        if forget:
            before.forget()
        elif not after.over and after.stage != self.rollout.stage:
            before.new_stage(after.stage[0])
        parts = {name: replace(part, counts=Counts()) for name, part in self.parts.items() if name in live}
        mark = self.mark._replace(change=self.mark.change + 1)
        return replace(self, mark=mark, rollout=after, before=before, parts=parts)


def rank(mark: Mark, rollout: Rollout) -> tuple[int, str, int, int]:
    return mark.run, mark.start, _ENDS.get(rollout.state, 0), mark.change


def merged(mine: SharedRollout | None, other: SharedRollout | None) -> SharedRollout | None:
    """Returns the higher of two, whichever is known first; two that are alike, with the parts of both."""
    if mine is None or other is None:
        return mine or other
    if mine.rank != other.rank:
        return mine if mine.rank > other.rank else other
    high, low = (mine, other) if _tie(mine) >= _tie(other) else (other, mine)
    parts = dict(high.parts)
    for name, part in low.parts.items():
        if name not in parts or _newer(part, parts[name]):
            parts[name] = part
    spent = max(high.rollout.spent, low.rollout.spent)
    return replace(high, rollout=replace(high.rollout, spent=spent), parts=parts)


def _newer(part: Part, than: Part) -> bool:
    return (part.beat, _bytes(part)) > (than.beat, _bytes(than))


def _tie(shared: SharedRollout) -> tuple[bool, bytes]:
    """Of two that should not both be, one that is paused, and else any, but always the same."""
    bare = replace(shared, rollout=replace(shared.rollout, spent=0.0), parts={})
    return shared.rollout.state is State.PAUSED, as_bytes(bare)


def on_top(shared: SharedRollout, mark: Mark, after: Rollout, live: Collection[str]) -> SharedRollout:
    """Returns what one replica decided by itself at `mark`, an end or a pause, put on top of what all know by
    now. Another rollout that has begun since is none of its business."""
    now = shared.rollout
    if shared.mark[:2] != mark[:2] or now.state is State.ROLLED_BACK:
        return shared
    if after.state is State.ROLLED_BACK:
        back = replace(now, stable=shared.mark.first) if shared.mark.first else now
        return shared.went(_stands(back.moved(State.ROLLED_BACK, 0.0, after.why)), live)
    if now.over or now.state is State.RETIRED:
        return shared
    if after.state is State.FAILED:
        return shared.went(_stands(now.moved(State.FAILED, 0.0, after.why)), live)
    if now.state is State.PAUSED:
        return shared if now.held >= after.held else shared.went(replace(now, held=True, why=after.why), live)
    paused = replace(now, state=State.PAUSED, before=now.state, held=after.held, why=after.why)
    return shared.went(paused, live)


def _stands(rollout: Rollout) -> Rollout:
    return replace(rollout, since=None)


def of_record(record: Record, now: float) -> SharedRollout:
    """Returns what one replica alone has kept."""
    return SharedRollout(
        record.mark, record.plan, record.rollout.stopped(now), record.by_hand, dict(record.digests)
    )


def as_bytes(shared: SharedRollout) -> bytes:
    parts = sorted(shared.parts.items())
    if len(parts) > _MOST_PARTS:  # of replicas that come and go: those that have seen least are left out
        parts = sorted(sorted(parts, key=lambda one: -_weight(one[1]))[:_MOST_PARTS])
    return orjson.dumps(
        {
            "format": _FORMAT,
            "mark": list(shared.mark),
            "plan": as_document(shared.plan),
            "by_hand": shared.by_hand,
            **rollout_document(shared.rollout),
            "digests": dict(sorted(shared.digests.items())),
            "counts": shared.before.as_document(),
            "parts": {name: _document(part) for name, part in parts},
        },
        option=orjson.OPT_SORT_KEYS,
    )


def _weight(part: Part) -> int:
    counts = part.counts
    return counts.compared + counts.candidate.answers + counts.stable.answers


def _document(part: Part) -> dict[str, Any]:
    return {"beat": part.beat, "ready": part.ready, "counts": part.counts.as_document()}


def _bytes(part: Part) -> bytes:
    return orjson.dumps(_document(part), option=orjson.OPT_SORT_KEYS)


def from_bytes(data: bytes) -> SharedRollout:
    """Returns what `as_bytes` wrote; anything else raises `ValueError`."""
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        document = orjson.loads(data)
        if document["format"] != _FORMAT:
            raise NewerFormat(f"a replica writes the format {document['format']!r:.40}, not {_FORMAT}")
        plan = plan_of(document["plan"], "plan")
        return SharedRollout(
            read_mark(document["mark"]),
            plan,
            read_rollout(document, plan),
            bool(document["by_hand"]),
            {str(version): str(digest) for version, digest in document["digests"].items()},
            read_counts(document["counts"]),
            {str(name)[:_MOST_NAME]: _part(part) for name, part in document["parts"].items()},
        )
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ValueError(str(error)) from None


def _part(document: Mapping[str, Any]) -> Part:
    beat = document["beat"]
    if type(beat) is not int or not 0 <= beat < 1 << 62:
        raise ValueError("a replica's heartbeat is not a count")
    return Part(beat, bool(document["ready"]), read_counts(document["counts"]))
