"""Predicts whether a candidate could sustain the recent traffic, before it gets any requests: the simulator
plays the busiest observed minute against the curve that was measured when the candidate was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.numerals import numeral
from carpool.core.objectives import Promise

_SECONDS, _REQUESTS = 20.0, 20_000  # of virtual time, and at most so many of them: a second or two of work
_FEW = 100  # so many at least: at a low rate they take longer in virtual time, and no more work
_TOO_MANY = 0.01  # refused or late, beyond what the simulator says of stable
_MINUTE_S = 60.0
MINUTES = 24 * 60
"""Of which the rate of arrivals is remembered."""


class MinuteRates:
    """Requests a second in each of the last minutes, answered or not, whether or not a rollout is under way:
    what the check of the next one plays."""

    def __init__(self, now: float) -> None:
        self.rates: dict[str, list[float]] = {}  # by model
        self._totals: Mapping[str, float] = {}  # all that came until the last look
        self._at = now

    def due(self, now: float) -> bool:
        return now - self._at >= _MINUTE_S

    def note(self, totals: Mapping[str, float], now: float) -> None:
        for name, total in totals.items():
            rates = self.rates.setdefault(name, [])
            rates.append(max(0.0, total - self._totals.get(name, 0.0)) / (now - self._at))
            del rates[:-MINUTES]
        self._totals, self._at = totals, now


class Carrier(NamedTuple):
    """Describes one version: how fast it is, how many of it there are, and what it promises."""

    version: str
    curve: BatchCurve
    instances: int
    policy: object


def carries(stable: Carrier, candidate: Carrier, rates: Sequence[float]) -> dict[str, Any]:
    """`enough` is false for a candidate that must not be promoted by itself; the sentence says why. Takes a
    second or two: not for the loop's thread."""
    promise = candidate.policy
    if not isinstance(promise, Promise):
        return {"enough": True, "sentence": "without an SLO there is no capacity to compare"}
    mine, others = (_capacity(one, promise) for one in (candidate, stable))
    found = {
        "candidate_rps": round(mine, 2),
        "stable_rps": round(others, 2),
        "slo_ms": promise.slo * 1e3,
        "minutes": len(rates),
    }
    told = (
        f"version {candidate.version} sustains {numeral(mine)}/s within {numeral(promise.slo * 1e3)} ms, "
        f"version {stable.version} {numeral(others)}/s"
    )
    peak = max(rates, default=0.0)
    if peak <= 0.0:
        enough = mine > 0.0 or others <= 0.0  # what carries nothing carries less than anything that may come
        return {
            **found,
            "enough": enough,
            "sentence": f"{told}; no arrivals were recorded to compare with",
        }
    lost, before = (_lost(one, promise, peak) for one in (candidate, stable))
    found |= {"peak_rps": round(peak, 2), "lost": round(lost, 4), "lost_by_stable": round(before, 4)}
    busiest = f"{told}; the busiest minute had {numeral(peak)}/s"
    if lost <= before + _TOO_MANY:
        return {**found, "enough": True, "sentence": f"{busiest}, which it would sustain too"}
    sentence = (
        f"{busiest}: at 100 % it would reject {numeral(lost * 100)} %, stable {numeral(before * 100)} %"
    )
    return {**found, "enough": False, "sentence": sentence}


def _capacity(one: Carrier, promise: Promise) -> float:
    return slo_capacity(one.curve, promise.slo, one.instances)


def _lost(one: Carrier, promise: Promise, rate: float) -> float:
    """Returns the share of such traffic that would not be answered in time."""
    from carpool.sim.simulation import Scenario, measure  # most servers never check a candidate

    seconds = max(4.0 * promise.slo, min(_SECONDS, _REQUESTS / rate), _FEW / rate)
    policy = one.policy if isinstance(one.policy, Promise) else promise
    scenario = Scenario(one.curve, promise.slo, policy, rate, instances=one.instances, seconds=seconds)
    return 1.0 - measure(scenario).attainment
