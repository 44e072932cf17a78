"""What a sweep learns before its first run, and keeps for the runs that come later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from carpool.core.curve import BatchCurve
from carpool.errors import InvalidInput
from carpool.lab.sweep.sweep_prediction import Belief


@dataclass(frozen=True, slots=True)
class Found:
    """`rates` in requests per second, each with its load."""

    model: str
    slo_ms: float
    rates: list[tuple[float, float | None]]
    belief: Belief
    requests: str  # what is sent, in words

    def as_json(self) -> dict[str, Any]:
        belief = {
            "points": [list(point) for point in self.belief.curve.points],
            "max_batch": self.belief.curve.max_batch,
            "instances": self.belief.instances,
            "source": self.belief.source,
            "max_delay_ms": self.belief.max_delay_ms,
        }
        return {
            "model": self.model,
            "slo_ms": self.slo_ms,
            "rates": self.rates,
            "belief": belief,
            "requests": self.requests,
        }


def read_found(document: dict[str, Any]) -> Found:
    try:
        known = document["belief"]
        curve = BatchCurve([(int(s), float(t)) for s, t in known["points"]], int(known["max_batch"]))
        delay = known["max_delay_ms"]
        return Found(
            model=str(document["model"]),
            slo_ms=float(document["slo_ms"]),
            rates=[(float(rate), None if load is None else float(load)) for rate, load in document["rates"]],
            belief=Belief(
                curve,
                int(known["instances"]),
                str(known["source"]),
                max_delay_ms=None if delay is None else float(delay),
            ),
            requests=str(document["requests"]),
        )
    except (KeyError, TypeError, ValueError):
        raise InvalidInput("--out: its sweep.json is damaged: name a new folder", field="--out") from None
