"""What is asked of a sweep and which runs are finished, kept in its folder, so that it can go on later."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from carpool import __version__
from carpool.config.fingerprint import take_fingerprint
from carpool.config.repository import ModelSource
from carpool.errors import InvalidInput
from carpool.lab.load.facts import TRUSTING, Trust
from carpool.lab.load.load_report import LoadReport
from carpool.lab.load.tally import Answer, Histogram, Kind, Ticket

PROMISE, FIXED, AS_IS = "promise", "knobs", "as it is"


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes how a server batches. One that runs already is taken as it is, and then the rest may be
    unknown."""

    kind: str
    slo_ms: float | None = None
    max_delay_ms: float | None = None
    max_batch: int | None = None

    @property
    def name(self) -> str:
        """Returns a name for people and files, which is different for any two settings of a sweep."""
        if self.kind == PROMISE:
            return f"promise {self.slo_ms:g} ms"
        if self.kind == FIXED:
            batch = "" if self.max_batch is None else f", batch {self.max_batch}"
            return f"knobs {self.max_delay_ms:g} ms{batch}"
        return self.kind


@dataclass(frozen=True, slots=True)
class Point:
    """Describes one run: a setting at a rate, in requests per second. `load` is the rate over the planned
    capacity."""

    setting: str
    rate: float
    repeat: int
    load: float | None = None

    @property
    def key(self) -> tuple[str, float, int]:
        return self.setting, self.rate, self.repeat

    @property
    def seed(self) -> int:
        """Returns the same arrivals for every setting, so that only the setting differs; others in every
        repeat."""
        return self.repeat + 1


def settings_of(
    mode: str, slo_ms: float, delays_ms: Sequence[float], max_batches: Sequence[int]
) -> list[Setting]:
    """Returns the promise, the fixed settings (every delay with every largest batch), or both."""
    found = [Setting(PROMISE, slo_ms=slo_ms)] if mode in (PROMISE, "both") else []
    if mode in (FIXED, "both"):
        batches: Sequence[int | None] = max_batches or (None,)
        found += [Setting(FIXED, None, delay, batch) for delay, batch in product(delays_ms, batches)]
    return found


def points(
    settings: Sequence[str], rates: Sequence[tuple[float, float | None]], repeats: int, seed: int
) -> Iterator[Point]:
    """Rates in a shuffled order, and at each rate the settings right after one another, beginning with
    another one every time: a noisy minute then hits all settings alike, and no rate always comes last."""
    random = Random(seed)
    turn = 0
    for repeat in range(repeats):
        for rate, load in random.sample(list(rates), len(rates)):
            for number in range(len(settings)):
                yield Point(settings[(number + turn) % len(settings)], rate, repeat, load)
            turn += 1


_NOT_ASKED = ("url", "place", "source", "command", "trust")
SLO_MS = 100.0  # where neither the command nor the model promises anything


@dataclass(frozen=True, slots=True)
class SweepOrder:
    """`url` is of a server that runs; without it, `place` is the model to serve. No `rates`: by `loads`."""

    settings: tuple[Setting, ...]
    model: str
    url: str = ""
    place: Path | None = None
    source: ModelSource | None = None
    slo_ms: float | None = None
    rates: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    seconds: float = 6.0
    warmup: float = 1.0
    repeats: int = 2
    seed: int = 1
    images: tuple[Path, ...] = ()  # none: the demo's, if the model takes pictures
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    curve: str = ""
    steps: tuple[str, ...] = ()  # of a pipeline, in its place
    instances: int = 1
    command: str = "carpool sweep"
    trust: Trust = TRUSTING

    def identity(self) -> dict[str, Any]:
        """What must be equal for runs to belong together, as JSON has it."""
        asked = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_ASKED}
        files = "" if self.place is None else _hash(repr(take_fingerprint(self.place)))
        asked |= {"target": self.url or str(self.place), "model files": files, "carpool": __version__}
        plain: dict[str, Any] = json.loads(json.dumps(asked, default=_plain))
        return plain


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else asdict(value)


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


class Watcher:
    """Hears of every request that ends, and keeps what the report's charts need."""

    def __init__(self, first_counted: int) -> None:
        self._first = first_counted  # phase: those before it are warm-up
        self.response = Histogram()
        self.batches: Counter[int] = Counter()
        self.infer: dict[int, Histogram] = {}

    def __call__(self, ticket: Ticket, now: float, answer: Answer) -> None:
        if ticket.phase < self._first or answer.kind is not Kind.ANSWERED:
            return
        self.response.add(now - ticket.intended)
        if answer.timing is not None:
            self.batches[answer.timing.batch] += 1
            self.infer.setdefault(answer.timing.batch, Histogram()).add(answer.timing.infer)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun(Point):
    """The field names are the keys of `runs` in results.json. `batches`: answers by their batch's size."""

    at: str  # when it began, UTC
    seconds: float
    offered: int
    answered: int
    good: int
    refused: dict[str, int]
    failed: dict[str, int]
    timed_out: int
    unanswered: int
    goodput_rps: float
    attainment: float
    p50_ms: float
    p99_ms: float
    steal: float  # share of the processor that others took meanwhile
    void: tuple[str, ...]  # why the numbers are not the server's; empty if they are
    batches: dict[int, int] = field(default_factory=dict)
    response: dict[str, Any] = field(default_factory=dict)


_COUNTED = (
    *("seconds", "offered", "answered", "good", "refused", "failed", "timed_out", "unanswered"),
    *("goodput_rps", "attainment"),
)  # as the generator's report has them


def measured(point: Point, at: str, report: LoadReport, seen: Watcher, steal: float) -> MeasuredRun:
    total = report.total
    return MeasuredRun(
        at=at,
        p50_ms=total.response_ms.p50,
        p99_ms=total.response_ms.p99,
        steal=round(steal, 4),
        void=report.late_because,
        batches=dict(sorted(seen.batches.items())),
        response=pack(seen.response),
        **asdict(point),
        **{name: getattr(total, name) for name in _COUNTED},
    )


def read_run(document: Mapping[str, Any]) -> MeasuredRun:
    """Reads a line of JSON; ValueError, KeyError or TypeError if it is none of ours."""
    values = {name.name: document[name.name] for name in fields(MeasuredRun)}
    values["batches"] = {int(size): int(count) for size, count in document["batches"].items()}
    values["void"] = tuple(str(reason) for reason in document["void"])
    run = MeasuredRun(**values)
    unpack(run.response)
    return run


def pack(histogram: Histogram) -> dict[str, Any]:
    if not histogram.count:
        return {"buckets": []}
    buckets = [[index, count] for index, count in sorted(histogram.buckets.items())]
    return {"buckets": buckets, "least": histogram.least, "most": histogram.most, "total": histogram.total}


def unpack(document: Mapping[str, Any]) -> Histogram:
    histogram = Histogram()
    buckets = {int(index): int(count) for index, count in document["buckets"]}
    if buckets:
        histogram.buckets = buckets
        histogram.count = sum(buckets.values())
        histogram.least, histogram.most = float(document["least"]), float(document["most"])
        histogram.total = float(document["total"])
    return histogram


_IDENTITY, _RUNS = "sweep.json", "runs.jsonl"
_MOST_BYTES = 256 << 20
_LEFT = re.compile(r"server-\d+\.log|sweep\.json\.part")  # by a sweep that did not get to its first run


def digest(identity: Mapping[str, Any]) -> str:
    """Runs belong together if this is equal."""
    return _hash(json.dumps(identity, sort_keys=True, ensure_ascii=False))


@dataclass
class Journal:
    """`basis` is what was learned before the first run (the rates, the curve): the same for all of them."""

    folder: Path
    digest: str
    basis: dict[str, Any] | None
    runs: list[MeasuredRun]

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any]) -> Journal:
        """A new folder, or one in which the same was begun; anything else is refused."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            begun = folder / _IDENTITY
            before = _read_object(_text(begun)) if begun.exists() else None
        except OSError as error:
            raise InvalidInput(f"--out: {folder}: {error.strerror or error}") from None
        if before is None:
            if any(not _LEFT.fullmatch(entry.name) for entry in folder.iterdir()):
                raise InvalidInput(f"--out: {folder} is not empty and has no sweep: choose a new folder")
            return cls(folder, digest(identity), None, [])
        _check_same(folder, before.get("asked"), identity)
        own = digest(identity)
        runs = _read_runs(folder / _RUNS, own)
        with (folder / _RUNS).open("a", encoding="utf-8") as file:
            file.write("\n")  # ends a line that was cut off; an empty one is skipped
        return cls(folder, own, before.get("found"), runs)

    def begin(self, identity: Mapping[str, Any], basis: dict[str, Any]) -> None:
        """Begins a journal, which is written once, whole or not at all."""
        self.basis = basis
        text = json.dumps({"asked": identity, "found": basis}, indent=2, ensure_ascii=False)
        part = self.folder / (_IDENTITY + ".part")
        part.write_text(text + "\n", "utf-8")
        part.replace(self.folder / _IDENTITY)

    def add(self, run: MeasuredRun) -> None:
        """Kept from now on, whatever happens next."""
        line = json.dumps({"digest": self.digest} | asdict(run), ensure_ascii=False)
        with (self.folder / _RUNS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.runs.append(run)


def _check_same(folder: Path, before: Any, identity: Mapping[str, Any]) -> None:
    if not isinstance(before, dict):
        raise InvalidInput(f"--out: {folder / _IDENTITY} is not of a sweep: choose a new folder")
    differ = [
        f"{name} was {_short(before.get(name))} and is {_short(identity.get(name))} now"
        for name in dict.fromkeys((*before, *identity))
        if before.get(name) != identity.get(name)
    ]
    if differ:
        raise InvalidInput(
            f"--out: another sweep was begun in {folder}: {'; '.join(differ)}. Repeat its command, or "
            "choose a new folder"
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def _read_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {}


def _read_runs(file: Path, own: str) -> list[MeasuredRun]:
    """The last line may have been cut off by whatever ended the sweep; it is measured again."""
    found: dict[tuple[str, float, int], MeasuredRun] = {}
    for line in _text(file).splitlines() if file.exists() else ():
        document = _read_object(line)
        if document.get("digest") == own:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                run = read_run(document)
                found[run.key] = run
    return list(found.values())


def _text(file: Path) -> str:
    if file.stat().st_size > _MOST_BYTES:
        raise InvalidInput(f"--out: {file} is over {_MOST_BYTES:,} bytes: choose a new folder")
    return file.read_text("utf-8", "replace")
