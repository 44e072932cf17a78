"""Everything a sweep found, as one value: results.json, and what the report is drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from carpool.lab.sweep.predict import Predicted
from carpool.lab.sweep.sweep_order import Setting
from carpool.lab.sweep.sweep_results import Noise, Row, best_of, noise_of, noise_words, rows_of, sentences
from carpool.lab.sweep.sweep_runs import Measured

_PLAIN = (
    *("model", "target", "requests", "slo_ms", "curve", "curve_from", "instances", "capacity_rps"),
    *("seconds", "planned_runs", "machine", "date", "command", "versions"),
)


@dataclass(frozen=True, slots=True)
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
    runs: tuple[Measured, ...]
    prediction: tuple[Predicted, ...]
    machine: str
    date: str
    command: str
    versions: dict[str, str]

    @property
    def names(self) -> list[str]:
        return [setting.name for setting in self.settings]

    @property
    def rows(self) -> list[Row]:
        return rows_of(self.runs, self.names)

    @property
    def noise(self) -> Noise:
        return noise_of(self.runs)

    def best(self, setting: str) -> Row | None:
        return best_of((row for row in self.rows if row.setting == setting), self.slo_ms)

    def words(self) -> list[str]:
        """The findings, the best setting first."""
        rows = self.rows
        best = best_of(rows, self.slo_ms)
        order = sorted(self.names, key=lambda name: best is None or name != best.setting)
        return [*sentences(rows, order, self.slo_ms), *self._unfinished()]

    def _unfinished(self) -> list[str]:
        left = self.planned_runs - len(self.runs)
        return [f"Ended early: {left} of {self.planned_runs} runs were not made."] if left > 0 else []

    def noise_words(self) -> str:
        return noise_words(self.noise)

    def predicted(self, setting: str, rate: float) -> Predicted | None:
        return next((p for p in self.prediction if p.setting == setting and p.rate == rate), None)

    def as_json(self) -> dict[str, Any]:
        best = {name: self.best(name) for name in self.names}
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "settings": [asdict(setting) | {"name": setting.name} for setting in self.settings],
            "points": [_row_json(row, best[row.setting]) for row in self.rows],
            "prediction": [asdict(point) for point in self.prediction],
            "noise": asdict(self.noise),
            "words": [*self.words(), self.noise_words()],
            "runs": [run.as_json() for run in self.runs],
        }


def _row_json(row: Row, best: Row | None) -> dict[str, Any]:
    names: Sequence[str] = [name for name in Row.__dataclass_fields__ if name != "response"]
    return {name: getattr(row, name) for name in names} | {
        "void": row.void,
        "best": best is not None and best.rate == row.rate,
    }
