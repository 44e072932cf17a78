"""Closed forms: what a device can carry within a promise, before anything is simulated.

t(B) = a + b·B, ρ = λ·b. For derivations and how close each comes to simulation, see docs/scheduling.md.
"""

from __future__ import annotations

from math import inf, sqrt

from carpool.core.curve import BatchCurve


def promised_batch(curve: BatchCurve, slo: float) -> int:
    """The most efficient batch with 2·t(B) ≤ SLO; 0 where there is none.

    Twice, because a request may arrive just after a batch started: it waits for that one, then rides.
    """
    return curve.efficient[curve.fits(slo / 2)]


def slo_capacity(curve: BatchCurve, slo: float, instances: int = 1) -> float:
    """Images per second that can be promised: max B/t(B) with 2·t(B) ≤ SLO."""
    batch = promised_batch(curve, slo)
    return instances * curve.throughput(batch) if batch else 0.0


def fluid_bound(curve: BatchCurve, slo: float, rate: float, instances: int = 1) -> float:
    """The most images per second that can be answered in time: max B/t(B) with t(B) + B/λ ≤ SLO.

    A batch takes at least B/λ to gather. An estimate: somebody who knows the future can beat it slightly.
    """
    rates = (
        curve.throughput(size)
        for size in range(1, curve.max_batch + 1)
        if curve.times[size] + size / rate <= slo
    )
    return min(rate, instances * max(rates, default=0.0))


def steady_batch(curve: BatchCurve, rate: float, instances: int = 1) -> tuple[float, float]:
    """(images, seconds) of the batch that forms by itself when nobody waits on purpose."""
    fixed, per_image = curve.fit()
    load = rate / instances * per_image
    if load >= 1:
        return inf, inf
    seconds = fixed / (1 - load)
    return max(1.0, rate / instances * seconds), max(seconds, curve.times[1])


def expected_p99(curve: BatchCurve, rate: float, instances: int = 1) -> float:
    """Seconds; good to a few percent up to ρ = 0.7, then on the safe side."""
    fixed, per_image = curve.fit()
    load = rate / instances * per_image
    images, seconds = steady_batch(curve, rate, instances)
    if images == inf:
        return inf
    swing = 2.3 * per_image * sqrt(images * (2 + 2 * load) / (1 - load * load))
    return max(2 * seconds, 1.5 * (fixed + per_image)) + swing
