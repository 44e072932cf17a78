"""When answers were late while a model was compiled behind its traffic, and what the runner did at that time.

    python -m chip.lateness OUT/start-loaded-slices.json OUT/start-loaded.log    # of an earlier run

Every quarter of a second has a count of requests that were not answered within the SLO. The server's log says
when the compiler was imported, which step of which adoption took how long, and where the collector did."""

from __future__ import annotations

import ast
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from carpool.lab.load.tally import Slice

BIN_S = 0.25
NOTHING = "nothing of these"


@dataclass
class Bin:
    """Requests that ended in a quarter of a second; `began` in seconds since 1970."""

    began: float
    answered: int = 0
    good: int = 0
    refused: int = 0
    failed: int = 0

    @property
    def bad(self) -> int:
        return self.answered - self.good + self.refused + self.failed


class Slices:
    """Called by the load generator's processes, each for its own part."""

    def __init__(self) -> None:
        self._bins: dict[int, Bin] = {}

    def __call__(self, _elapsed: float, seen: Slice) -> None:
        number = int(time.time() / BIN_S)
        one = self._bins.setdefault(number, Bin((number - 1) * BIN_S))  # of the time before the call
        for name in ("answered", "good", "refused", "failed"):
            setattr(one, name, getattr(one, name) + getattr(seen, name))

    @property
    def bins(self) -> list[Bin]:
        return [self._bins[number] for number in sorted(self._bins)]


class Step(NamedTuple):
    name: str
    began: float
    ended: float


def steps(log: Path) -> list[Step]:
    """Of a server's log in JSON, in their order."""
    found: list[Step] = []
    for event in _events(log):
        match event["event"]:
            case "compiler-imported":
                found.append(Step("import", event["began"], event["began"] + event["seconds"]))
            case "long-collections":
                found += [
                    Step("collector", one["at"] - one["seconds"], one["at"]) for one in _listed(event["seen"])
                ]
            case "batch-size-compiled":
                found += _adopted(event)
            case "instance-captured" | "instance-whole" | "compiled-written":
                at = datetime.fromisoformat(event["time"]).timestamp()
                found.append(Step(event["event"], at - event.get("seconds", 0.0), at))
    return sorted(found, key=lambda step: step.began)


def _adopted(event: dict[str, Any]) -> Iterator[Step]:
    """Each instance's steps, and the moment from which the scheduler plans with the new time."""
    for instance in _listed(event.get("steps", "[]")):
        at = instance["began"]
        for name, seconds in instance.items():
            if name != "began":
                yield Step(f"{name} {event['size']}", at, at + seconds)
                at += seconds
    at = datetime.fromisoformat(event["time"]).timestamp()
    yield Step(f"planned {event['size']}", at, at + 2 * BIN_S)


def _listed(text: str) -> list[dict[str, float]]:
    """As the log writes a list: in Python's words."""
    found: list[dict[str, float]] = ast.literal_eval(text)
    return found


def _events(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):
            event = json.loads(line)
            if isinstance(event["event"], str):
                yield event


def blamed(bins: Sequence[Bin], seen: Sequence[Step]) -> dict[str, int]:
    """Requests that were not answered in time, by what went on meanwhile. One that ends late was delayed in
    the quarter before as well: a step is blamed for both. What overlaps shares a request."""
    found: dict[str, float] = defaultdict(float)
    for one in bins:
        if one.bad:
            names = {
                step.name
                for step in seen
                if step.began < one.began + BIN_S and step.ended > one.began - BIN_S
            } or {NOTHING}
            for name in names:
                found[name] += one.bad / len(names)
    return {name: round(bad) for name, bad in sorted(found.items(), key=lambda item: -item[1])}


def drawn(bins: Sequence[Bin], seen: Sequence[Step]) -> Iterator[str]:
    """A line for each quarter of a second in which something was late, or something went on."""
    start = bins[0].began if bins else 0.0
    for one in bins:
        names = [step.name for step in seen if step.began < one.began + BIN_S and step.ended > one.began]
        if one.bad or names:
            counts = f"{one.answered:6} answered {one.bad:6} late or refused"
            yield f"  {one.began - start:7.2f} s {counts}  {', '.join(dict.fromkeys(names))}"


def told(bins: Sequence[Bin], log: Path, out: Path) -> dict[str, int]:
    """Prints the time line, and writes what it is made of to `out`."""
    seen = steps(log)
    found = blamed(bins, seen)
    document = {"bins": [asdict(one) for one in bins], "steps": seen, "blamed": found}
    out.write_text(json.dumps(document, indent=1))
    for line in drawn(bins, seen):
        print(line)
    print("  late or refused by what went on: " + ", ".join(f"{k} {v}" for k, v in found.items()), flush=True)
    return found


if __name__ == "__main__":
    written = Path(sys.argv[1])
    read = [Bin(**one) for one in json.loads(written.read_text())["bins"]]
    told(read, Path(sys.argv[2]), written)
