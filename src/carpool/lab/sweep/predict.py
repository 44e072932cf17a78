"""What `carpool plan`'s simulator says of the same settings and rates, before anybody measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.core.curve import BatchCurve
from carpool.core.policy import Knobs, Promise
from carpool.lab.sweep.sweep_order import AS_IS, Setting
from carpool.lab.sweep.sweep_prediction import Belief
from carpool.sim.scenario import Scenario, measure

_BETWEEN = 8  # rates of the line, besides those that are measured
_MOST_REQUESTS = 20_000
_SEEDS, _FEW = 3, 1000  # so many runs where one would hold few requests


@dataclass(frozen=True, slots=True)
class Predicted:
    """One simulated point; the field names are the keys of `prediction` in results.json."""

    setting: str
    rate: float
    offered_rps: float  # by the luck of the simulated arrivals
    goodput_rps: float
    attainment: float
    p99_ms: float


def predict(
    settings: Sequence[Setting], rates: Sequence[float], belief: Belief, slo_ms: float, seconds: float
) -> list[Predicted]:
    """As long as the measured runs: a queue that grows without a promise grows for as long as they last."""
    found = []
    for setting in settings:
        for rate in _line(rates):
            largest = setting.max_batch or belief.curve.max_batch
            lasts = min(max(seconds, 4 * slo_ms / 1e3, 20 / rate), _MOST_REQUESTS / rate)
            scenario = Scenario(
                BatchCurve(belief.curve.points, largest),
                slo_ms / 1e3,
                _policy(setting, belief, largest, slo_ms),
                rate,
                instances=belief.instances,
                seconds=lasts,
                seeds=_SEEDS if lasts * rate < _FEW else 1,
            )
            out = measure(scenario)
            found.append(
                Predicted(setting.name, rate, out.offered_rps, out.goodput_rps, out.attainment, out.p99_ms)
            )
    return found


def _line(rates: Sequence[float]) -> list[float]:
    """The measured rates, and steps from a small one to the highest."""
    top = max(rates)
    return sorted({*rates, *(top * (step + 1) / _BETWEEN for step in range(_BETWEEN))})


def _policy(setting: Setting, belief: Belief, largest: int, slo_ms: float) -> Promise | Knobs:
    """A server that does not say how it batches is taken for one that keeps a promise."""
    delay_ms = belief.max_delay_ms if setting.kind == AS_IS else setting.max_delay_ms
    if delay_ms is not None:
        return Knobs(largest, max_delay=delay_ms / 1e3)
    return Promise((setting.slo_ms or slo_ms) / 1e3, largest)
