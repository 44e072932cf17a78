"""What is kept of a rollout, so that it goes on where it stood after the end of its server, however sudden.

One JSON file for each model. It is written under another name, forced to the disk and then renamed: a reader
finds the old one or the new one, whole. Times in it are seconds that were spent, never a clock's.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from carpool.config.rollout_settings import RolloutSettings
from carpool.config.rollout_table import as_document, plan_of
from carpool.errors import ConfigError
from carpool.rollout.rollout_guards import Counts, read_counts
from carpool.rollout.rollout_states import Rollout, State

FORMAT = 1
MINUTES = 24 * 60
"""Of which the rate of arrivals is remembered."""
MOST_HISTORY = 200
_MOST_BYTES = 4 << 20
_MAX_SPENT = 10 * 366 * 86400.0
_PLAIN = re.compile(r"[^0-9A-Za-z._-]+")


@dataclass(slots=True)
class Record:
    """One model's rollout, the last one or the one under way."""

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

    @property
    def salt(self) -> str:
        return self.digests.get(self.rollout.candidate, self.rollout.candidate)

    def note(self, at: float, before: str, why: str) -> None:
        """`at` is Unix time, for people."""
        rollout = self.rollout
        line = {
            "time": round(at, 3),
            "from": before,
            "to": str(rollout.state),
            "step": rollout.step,
            "stable": rollout.stable,
            "candidate": rollout.candidate,
            "why": why,
            "counts": self.counts.as_document(),
        }
        self.history = [*self.history, line][-MOST_HISTORY:]


def file_for(folder: Path, model: str, home: Path) -> Path:
    """Two servers of one user may each have a model of this name: its folder's path tells them apart."""
    place = blake2b(os.fsencode(home.absolute()), digest_size=6).hexdigest()
    return folder / "rollouts" / f"{_PLAIN.sub('_', model)[:80]}-{place}.json"


def write_record(path: Path, record: Record, now: float) -> None:
    """Raises `OSError`. Not for the loop's thread."""
    write_document(path, as_json(record, now))


def as_json(record: Record, now: float) -> bytes:
    """In the loop's thread, since it reads what that changes."""
    rollout = record.rollout.stopped(now)
    return orjson.dumps(
        {
            "format": FORMAT,
            "model": record.model,
            "plan": as_document(record.plan),
            "by_hand": record.by_hand,
            "state": str(rollout.state),
            "step": rollout.step,
            "stable": rollout.stable,
            "candidate": rollout.candidate,
            "spent": round(rollout.spent, 3),
            "before": None if rollout.before is None else str(rollout.before),
            "held": rollout.held,
            "why": rollout.why,
            "digests": record.digests,
            "counts": record.counts.as_document(),
            "history": record.history,
            "rates": [round(rate, 3) for rate in record.rates],
            "capacity": record.capacity,
            "curves": record.curves,
            "rollbacks": record.rollbacks,
        }
    )


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
    """What was kept, if anything; and a sentence about a file that could not be read, which is out of the way
    then: the server starts all the same."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror or error}"
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError("it is too large")
        return _record(orjson.loads(data)), ""
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        aside = path.with_name(f"{path.name}.unreadable-{int(time.time())}")
        try:
            path.replace(aside)
        except OSError as stuck:
            return None, f"{path} cannot be understood ({error}) nor moved away: {stuck.strerror or stuck}"
        return None, f"{path} cannot be understood ({error}): it is {aside.name} now"


def _record(document: Mapping[str, Any]) -> Record:
    if document["format"] != FORMAT:
        raise ValueError(f"its format is {document['format']}, not {FORMAT}")
    spent = float(document["spent"])
    if not 0.0 <= spent <= _MAX_SPENT:
        raise ValueError("the time spent is no time")
    plan = plan_of(document["plan"], "plan")
    before = document["before"]
    rollout = Rollout(
        str(document["stable"]),
        str(document["candidate"]),
        State(document["state"]),
        int(document["step"]),
        spent,
        None,
        None if before is None else State(before),
        bool(document["held"]),
        str(document["why"]),
    )
    if (rollout.before or rollout.state) is State.CANARY and not 1 <= rollout.step <= len(plan.canary):
        raise ValueError(f"its canary has no step {rollout.step}")
    if (rollout.state is State.PAUSED) != (rollout.before is not None):
        raise ValueError("what was paused is not said")
    return Record(
        str(document["model"]),
        plan,
        rollout,
        bool(document["by_hand"]),
        {str(version): str(digest) for version, digest in document["digests"].items()},
        read_counts(document["counts"]),
        [dict(line) for line in document["history"]][-MOST_HISTORY:],
        [float(rate) for rate in document["rates"]][-MINUTES:],
        dict(document["capacity"]),
        dict(document["curves"]),
        {str(guard): int(count) for guard, count in document["rollbacks"].items()},
    )
