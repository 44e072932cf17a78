"""Keeps what is known of a rollout, so that it goes on where it stood after the end of its server, however
sudden.

One JSON file for each model. It is written under another name, forced to the disk and then renamed: a reader
finds the old one or the new one, whole. Times in it are seconds that were spent, never a clock's.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from carpool.config.regular_file import open_regular
from carpool.config.repository import VERSION
from carpool.errors import ConfigError
from carpool.extensions.rollout.capacity import MINUTES
from carpool.extensions.rollout.rollout_guards import Counts, read_counts
from carpool.extensions.rollout.rollout_states import ENDS, Rollout, State
from carpool.extensions.rollout.settings import RolloutSettings
from carpool.extensions.rollout.settings_reader import as_document, plan_of

FORMAT = 1
MOST_HISTORY = 200
_MOST_BYTES = 4 << 20
_MAX_SPENT = 10 * 366 * 86400.0
_MAX_RATE, _MAX_TIME = 1e9, 1e11
_PLAIN = re.compile(r"[^0-9A-Za-z._-]+")


class Mark(NamedTuple):
    """Which of the rollouts that replicas share this is, and how far it has come."""

    run: int = 0  # counted up by every start; 0 was not shared
    start: str = ""  # distinguishes two that were begun at the same time
    change: int = 0  # of its state, counted
    first: str = ""  # the stable version before it began


NOT_SHARED = Mark()


@dataclass(slots=True)
class Record:
    """Represents one model's rollout, the last one or the one under way."""

    model: str
    plan: RolloutSettings
    rollout: Rollout
    by_hand: bool = False  # its plan came with a request, not from the model's settings
    digests: dict[str, str] = field(default_factory=dict)  # of the versions' content
    counts: Counts = field(default_factory=Counts)
    history: list[dict[str, Any]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # requests a second in each of the last minutes
    capacity: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict)
    rollbacks: dict[str, int] = field(default_factory=dict)  # by guard
    mark: Mark = NOT_SHARED
    sent_back: dict[str, str] = field(default_factory=dict)
    """Versions that did not take over, in any rollout of the model, and the digests of their files."""

    @property
    def salt(self) -> str:
        return self.digests.get(self.rollout.candidate, self.rollout.candidate)

    @property
    def begun(self) -> bool:
        """Returns False if nothing was rolled out yet, and this only names the first version
        (`of_the_first`)."""
        return bool(self.mark.run) or not (self.rollout.over and len(self.history) == 1)

    @property
    def judged_in(self) -> State:
        """Returns the state that its guards speak of: the one it is in, or was in before its end."""
        if not self.rollout.over:
            return self.rollout.stage[0]
        states = (State(line["to"]) for line in reversed(self.history))
        return next((state for state in states if state not in (*ENDS, State.PAUSED)), State.LOADING)

    def ended(self) -> None:
        """Remember whether its candidate may serve without being named."""
        candidate = self.rollout.candidate
        known = self.sent_back.pop(candidate, "")
        if self.rollout.state in (State.ROLLED_BACK, State.FAILED):
            self.sent_back[candidate] = self.digests.get(candidate, known)
            while len(self.sent_back) > MOST_HISTORY:
                del self.sent_back[next(iter(self.sent_back))]

    def note(self, at: float, before: str, why: str, counts: Counts | None = None) -> None:
        """`at` is Unix time, for people; `counts` are those of all replicas, where there are several."""
        rollout = self.rollout
        line = {
            "time": round(at, 3),
            "from": before,
            "to": str(rollout.state),
            "step": rollout.step,
            "stable": rollout.stable,
            "candidate": rollout.candidate,
            "why": why,
            "counts": (counts or self.counts).as_document(),
        }
        self.history = [*self.history, line][-MOST_HISTORY:]

    def reword(self, why: str) -> None:
        """The state that was noted last has another reason."""
        self.rollout = replace(self.rollout, why=why)
        if self.history:
            self.history = [*self.history[:-1], {**self.history[-1], "why": why}]


def of_the_first(model: str, plan: RolloutSettings, version: str, at: float) -> Record:
    """Returns a record of the version that serves a model without a rollout, so that no version which comes
    later is taken for that one."""
    first = Record(model, plan, Rollout(version, version, State.DONE, why="it was the first"))
    first.note(at, "", first.rollout.why)
    return first


def file_for(folder: Path, model: str, home: Path) -> Path:
    """Returns the file of a model's rollout. Two servers of one user may each have a model of this name: the
    file's name depends on the path of the model's folder."""
    place = blake2b(os.fsencode(home.absolute()), digest_size=6).hexdigest()
    return folder / "rollouts" / f"{_PLAIN.sub('_', model)[:80]}-{place}.json"


def as_json(record: Record, now: float) -> bytes:
    """Writes the record in the loop's thread, since it reads what that changes."""
    return orjson.dumps(
        {
            "format": FORMAT,
            "model": record.model,
            "plan": as_document(record.plan),
            "by_hand": record.by_hand,
            **rollout_document(record.rollout.stopped(now)),
            "mark": list(record.mark),
            "digests": record.digests,
            "counts": record.counts.as_document(),
            "history": record.history,
            "rates": [round(rate, 3) for rate in record.rates],
            "capacity": record.capacity,
            "curves": record.curves,
            "rollbacks": record.rollbacks,
            "sent_back": record.sent_back,
        }
    )


def rollout_document(rollout: Rollout) -> dict[str, Any]:
    """Returns the document of one whose clock stands: what `read_rollout` reads."""
    return {
        "state": str(rollout.state),
        "step": rollout.step,
        "stable": rollout.stable,
        "candidate": rollout.candidate,
        "spent": round(rollout.spent, 3),
        "before": None if rollout.before is None else str(rollout.before),
        "held": rollout.held,
        "why": rollout.why,
    }


def write_document(path: Path, document: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(document)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename, too
    finally:
        os.close(folder)


def read_record(path: Path) -> tuple[Record | None, str]:
    """What was kept, if anything; and a sentence about a file that could not be read. It stays where it is,
    since a person is to look at it. Its reader is the next to write it: what a writer that was killed has
    left is removed."""
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f".{path.name}.*"):
            left.unlink()
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror or error}"
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        return _record(orjson.loads(data)), ""
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        return None, f"{path} cannot be parsed ({error})"


def set_aside(path: Path) -> None:
    """Makes room for a new state where one lies that cannot be read, and keeps that under another name."""
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_name(f"{path.name}.unreadable-{int(time.time())}"))


def _record(document: Mapping[str, Any]) -> Record:
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']}, not {FORMAT}")
    plan = plan_of(document["plan"], "plan")
    capacity = dict(document["capacity"])
    if not capacity.get("enough", True) and not isinstance(capacity.get("sentence"), str):
        raise ValueError("it has no reason for the missing capacity")
    record = Record(
        str(document["model"]),
        plan,
        read_rollout(document, plan),
        bool(document["by_hand"]),
        _by_version(document["digests"]),
        read_counts(document["counts"]),
        _history(document["history"]),
        [_number(rate, _MAX_RATE) for rate in document["rates"]][-MINUTES:],
        capacity,
        dict(document["curves"]),
        {str(guard): int(count) for guard, count in document["rollbacks"].items()},
        read_mark(document.get("mark") or NOT_SHARED),
        _by_version(document.get("sent_back") or {}),
    )
    if "sent_back" not in document and record.rollout.over:
        record.ended()
    return record


def _by_version(given: Mapping[str, Any]) -> dict[str, str]:
    return {_version(version): str(digest) for version, digest in given.items()}


def read_mark(given: Sequence[Any]) -> Mark:
    run, start, change, first = given
    if not (
        isinstance(run, int) and isinstance(change, int) and 0 <= run < 1 << 62 and 0 <= change < 1 << 62
    ):
        raise ValueError("it has no identity of its shared rollout")
    return Mark(run, str(start)[:64], change, _version(first) if run else "")


def read_rollout(document: Mapping[str, Any], plan: RolloutSettings) -> Rollout:
    """Nothing that the states' machine could not have come to by itself."""
    state, before, step = State(document["state"]), document["before"], int(document["step"])
    stable, candidate = (_version(document[side]) for side in ("stable", "candidate"))
    held = bool(document["held"])
    if (state is State.PAUSED) != (before is not None) or (held and state is not State.PAUSED):
        raise ValueError("it does not have the paused state")
    under_way = state if before is None else State(before)
    if before is not None and under_way in (*ENDS, State.RETIRED, State.PAUSED):
        raise ValueError(f"the state {under_way} cannot be paused")
    if step not in (range(1, len(plan.canary) + 1) if under_way is State.CANARY else (0,)):
        raise ValueError(f"its {under_way} has no step {step}")
    if stable == candidate and under_way not in (*ENDS, State.RETIRED):
        raise ValueError("its candidate is stable")
    spent = _number(document["spent"], _MAX_SPENT)
    paused = None if before is None else under_way
    return Rollout(stable, candidate, state, step, spent, None, paused, held, str(document["why"]))


def _version(text: object) -> str:
    if not isinstance(text, str) or not VERSION.fullmatch(text):
        raise ValueError(f"{text!r:.40} is not a version")
    return text


def _number(value: Any, most: float) -> float:
    if isinstance(value, bool) or not 0.0 <= value <= most:
        raise ValueError(f"{value!r:.40} is neither a time nor a rate")
    return float(value)


def _history(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not lines:
        raise ValueError("it has no history")
    return [_line(line) for line in lines][-MOST_HISTORY:]


def _line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of the history, as `note` makes it."""
    return {
        "time": _number(line["time"], _MAX_TIME),
        "from": str(line["from"]),
        "to": str(State(line["to"])),
        "step": int(line["step"]),
        "stable": _version(line["stable"]),
        "candidate": _version(line["candidate"]),
        "why": str(line["why"]),
        "counts": read_counts(line["counts"]).as_document(),
    }
