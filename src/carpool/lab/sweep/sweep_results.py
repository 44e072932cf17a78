"""What the runs say together: points over their repeats, the best of each setting, and the noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean, median
from typing import Any

from carpool.core.numerals import numeral as _n
from carpool.lab.fleet_plan import ENOUGH
from carpool.lab.load.tally import Histogram
from carpool.lab.sweep.sweep_prediction import Predicted
from carpool.lab.sweep.sweep_runs import MeasuredRun, Setting, unpack


@dataclass(frozen=True, slots=True)
class PointRow:
    """Describes a setting at a rate over its repeats; void if none of them counts. Keys of `points` in
    results.json."""

    setting: str
    rate: float
    load: float | None
    runs: int
    void_runs: int
    offered: int
    answered: int
    good: int
    refused: dict[str, int]
    failed: int  # and given up or left unanswered
    offered_rps: float  # really, by the luck of random arrivals; `rate` was meant
    goodput_rps: float
    attainment: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    response: Histogram
    batches: dict[int, int]

    @property
    def void(self) -> bool:
        return self.runs == self.void_runs

    def keeps(self, slo_ms: float) -> bool:
        """Returns whether nearly every request was answered, and within the SLO."""
        return not self.void and self.attainment >= ENOUGH and self.p99_ms <= slo_ms


@dataclass(frozen=True, slots=True)
class Noise:
    """Describes how far repeats of the same point lie apart, as shares; None without repeats."""

    goodput: float | None
    goodput_worst: float | None
    p99: float | None
    p99_worst: float | None
    steal: float
    void_runs: int


def rows_of(runs: Iterable[MeasuredRun], settings: Sequence[str]) -> list[PointRow]:
    """Returns rows in the order of the settings, and of rising rates."""
    known = [run for run in runs if run.setting in settings]
    ordered = sorted(known, key=lambda run: (settings.index(run.setting), run.rate, run.repeat))
    grouped = groupby(ordered, key=lambda run: (run.setting, run.rate))
    return [_row(list(group)) for _, group in grouped]


def _row(runs: list[MeasuredRun]) -> PointRow:
    """Takes the requests of all repeats together, so that the p99 rests on as many as there are."""
    counted = [run for run in runs if not run.void] or runs
    response, batches, refused = Histogram(), Counter[int](), Counter[str]()
    for run in counted:
        response.merge(unpack(run.response))
        batches.update(run.batches)
        refused.update(run.refused)
    offered, good = sum(run.offered for run in counted), sum(run.good for run in counted)
    failed = sum(run.timed_out + run.unanswered + sum(run.failed.values()) for run in counted)
    p50, p99 = (value * 1e3 for value in response.percentiles((0.5, 0.99)))
    # Over batches, not over answers: large batches are few. A request counts as one image.
    many = sum(count / size for size, count in batches.items() if size)
    return PointRow(
        setting=runs[0].setting,
        rate=runs[0].rate,
        load=runs[0].load,
        runs=len(runs),
        void_runs=sum(bool(run.void) for run in runs),
        offered=offered,
        answered=sum(run.answered for run in counted),
        good=good,
        refused=dict(refused.most_common()),
        failed=failed,
        offered_rps=fmean(run.offered / run.seconds if run.seconds else run.rate for run in counted),
        goodput_rps=fmean(run.goodput_rps for run in counted),
        attainment=good / offered if offered else 0.0,
        p50_ms=p50,
        p99_ms=p99,
        mean_batch=sum(batches.values()) / many if many else 0.0,
        response=response,
        batches=dict(sorted(batches.items())),
    )


def best_of(rows: Iterable[PointRow], slo_ms: float) -> PointRow | None:
    """Returns the row with the most answered in time among the points that keep the promise; None if none
    does."""
    kept = [row for row in rows if row.keeps(slo_ms)]
    return max(kept, key=lambda row: row.goodput_rps, default=None)


def noise_of(runs: Iterable[MeasuredRun]) -> Noise:
    runs = list(runs)
    ordered = sorted((run for run in runs if not run.void), key=lambda run: (run.setting, run.rate))
    pairs = [list(group) for _, group in groupby(ordered, key=lambda run: (run.setting, run.rate))]
    repeated = [group for group in pairs if len(group) > 1]
    goodput = [_apart([run.goodput_rps for run in group]) for group in repeated]
    p99 = [_apart([run.p99_ms for run in group]) for group in repeated]
    return Noise(
        goodput=median(goodput) if goodput else None,
        goodput_worst=max(goodput, default=None),
        p99=median(p99) if p99 else None,
        p99_worst=max(p99, default=None),
        steal=max((run.steal for run in runs), default=0.0),
        void_runs=sum(bool(run.void) for run in runs),
    )


def _apart(values: Sequence[float]) -> float:
    mean = fmean(values)
    return (max(values) - min(values)) / mean if mean else 0.0


# ---- in words


def sentences(rows: Sequence[PointRow], settings: Sequence[str], slo_ms: float) -> list[str]:
    """Returns the best point of each setting, and what became of it at the highest rate."""
    found = []
    for name in settings:
        own = [row for row in rows if row.setting == name]
        if own:
            found.append(f"{name}: {_best_words(own, slo_ms)}{_top_words(own, slo_ms)}")
    return found


def _best_words(own: Sequence[PointRow], slo_ms: float) -> str:
    best = best_of(own, slo_ms)
    if best is not None:
        return f"{_n(best.goodput_rps)}/s within {slo_ms:g} ms {_at(best)}, p99 {_n(best.p99_ms)} ms."
    valid = [row for row in own if not row.void]
    if not valid:
        return "every point is void, because the generator was late."
    nearest = max(valid, key=lambda row: (row.attainment, row.goodput_rps))
    return (
        f"no point had {ENOUGH:.0%} answered within {slo_ms:g} ms; nearest {_at(nearest)}: "
        f"{_share(nearest.attainment)} of {_n(nearest.rate)}/s."
    )


def _top_words(own: Sequence[PointRow], slo_ms: float) -> str:
    top = max(own, key=lambda row: row.rate)
    if top.void or top.keeps(slo_ms):
        return ""
    refused = sum(top.refused.values())
    said = f", {_share(refused / top.offered)} rejected" if refused and top.offered else ""
    return (
        f" {_at(top).capitalize()}, the highest, {_n(top.goodput_rps)}/s are answered within the "
        f"SLO{said}, p99 of responses {_n(top.p99_ms)} ms."
    )


def noise_words(noise: Noise) -> str:
    said = []
    if noise.goodput is None or noise.p99 is None:
        said.append("No point was measured twice, so the noise is not known: --repeats 2 measures it.")
    else:
        said.append(
            f"Repeats of the same point differ by {noise.goodput:.0%} in goodput and {noise.p99:.0%} in "
            f"p99 (median; at most {noise.goodput_worst:.0%} and {noise.p99_worst:.0%})."
        )
    if noise.steal >= 0.01:
        said.append(f"The hypervisor gave up to {noise.steal:.0%} of the processor to others.")
    if noise.void_runs:
        runs = "1 run is" if noise.void_runs == 1 else f"{noise.void_runs} runs are"
        said.append(f"{runs} void, because the generator was late.")
    return " ".join(said)


def _at(row: PointRow) -> str:
    return f"at {_n(row.rate)}/s" if row.load is None else f"at load {row.load:g} ({_n(row.rate)}/s)"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


@dataclass(frozen=True)
class Results:
    """The field names are the keys of `--json`; there, `points` have the best of each setting marked."""

    model: str
    target: str
    requests: str  # what was sent
    slo_ms: float
    curve: str
    curve_from: str
    instances: int
    capacity_rps: float  # as `carpool plan` says, from the curve
    settings: tuple[Setting, ...]
    seconds: float
    planned_runs: int
    runs: tuple[MeasuredRun, ...]
    prediction: tuple[Predicted, ...]
    machine: str
    date: str
    command: str
    versions: dict[str, str]

    @property
    def names(self) -> list[str]:
        return [setting.name for setting in self.settings]

    @cached_property
    def rows(self) -> list[PointRow]:
        return rows_of(self.runs, self.names)

    @property
    def noise(self) -> Noise:
        return noise_of(self.runs)

    def best(self, setting: str) -> PointRow | None:
        return best_of((row for row in self.rows if row.setting == setting), self.slo_ms)

    def is_best(self, row: PointRow) -> bool:
        """Returns whether it is the best of its setting."""
        return self.best(row.setting) is row

    def words(self) -> list[str]:
        """Returns the findings, the best setting first."""
        rows = self.rows
        best = best_of(rows, self.slo_ms)
        order = sorted(self.names, key=lambda name: best is None or name != best.setting)
        found = sentences(rows, order, self.slo_ms)
        if len(self.runs) < self.planned_runs:
            left = self.planned_runs - len(self.runs)
            found.append(f"Ended early: {left} of {self.planned_runs} runs were not made.")
        return found

    def noise_words(self) -> str:
        return noise_words(self.noise)

    def predicted(self, setting: str, rate: float) -> Predicted | None:
        return next((p for p in self.prediction if p.setting == setting and p.rate == rate), None)

    def cells(self, row: PointRow) -> dict[str, str]:
        """Returns a row of a table, by the titles of its columns."""
        predicted = self.predicted(row.setting, row.rate)
        return {
            "setting": row.setting,
            "load": "–" if row.load is None else f"{row.load:g}",
            "offered/s": _n(row.offered_rps, 4),
            "within SLO/s": _n(row.goodput_rps, 4),
            "plan/s": "–" if predicted is None else _n(predicted.goodput_rps, 4),
            "within SLO": _share(row.attainment),
            "p50 ms": _n(row.p50_ms, 4),
            "p99 ms": _n(row.p99_ms, 4),
            "plan p99": "–" if predicted is None else _n(predicted.p99_ms, 4),
            "batch": f"{row.mean_batch:.1f}",
            "refused": ", ".join(f"{reason} {count:,}" for reason, count in row.refused.items()) or "0",
            "failed": f"{row.failed:,}",
        }

    def as_json(self) -> dict[str, Any]:
        points = [asdict(row) | {"void": row.void, "best": self.is_best(row)} for row in self.rows]
        for point in points:
            del point["response"]
        return asdict(self) | {
            "settings": [asdict(setting) | {"name": setting.name} for setting in self.settings],
            "points": points,
            "noise": asdict(self.noise),
            "words": [*self.words(), self.noise_words()],
        }
