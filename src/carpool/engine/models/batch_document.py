"""Writes what is known of the times of a model that answers in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from carpool.core.curve import BatchCurve, promised_batch, shape_of, slo_capacity
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.observe.statistics import RECENT_S, RecentBatches

if TYPE_CHECKING:
    from carpool.engine.models.served import Served


def batch_document(served: Served, scheduler: Scheduler, seats: int, now: float) -> dict[str, Any]:
    """Returns times in ms. `points` were measured at loading; `believed` is what batches are planned with
    now. An instance has as many `seats` in the scheduler as it runs requests at once."""
    profile = served.profile
    policy = served.config.policy
    measured = () if profile is None else profile.points
    return {
        "name": served.name,
        "version": served.version,
        "mode": served.config.mode.value,
        "max_batch": max(1, served.signature.max_batch),
        "points": [
            {"size": p.size, "ms": p.seconds * 1e3, "spread": p.spread, "runs": p.runs} for p in measured
        ],
        "measured_at": None if profile is None else profile.measured_at or None,
        "provisional": None if profile is None else profile.provisional or None,
        "instances": len(scheduler.instances) // seats,
        "threads": None if profile is None else profile.layout.threads,
        "memory_bytes": None if profile is None else profile.memory.service or None,
        "fit": _fit(scheduler.trend.profile),
        "curve": [[size, seconds * 1e3] for size, seconds in scheduler.belief.runs.points],
        "believed": _believed(scheduler),
        "speed": {
            "factor": scheduler.trend.factor,
            "told": scheduler.trend.told,
            "relearned": scheduler.belief.runs is not scheduler.trend.profile,
            "handover_ms": scheduler.belief.handover.counted * 1e3,
            "instances": [[i.speed.mean, i.speed.cautious] for i in list(scheduler.instances)[::seats]],
        },
        "promise": _promise(scheduler.curve, policy, len(scheduler.instances)),
        "knobs": _fixed(policy),
        "recent": _recent(served.counters.recent, now),
        "choices": list(served.choices),
    }


def _fit(curve: BatchCurve) -> dict[str, Any]:
    shape = shape_of(curve.points)
    return {
        "fixed_ms": shape.fixed * 1e3,
        "per_image_ms": shape.per_image * 1e3,
        "residuals": [list(residual) for residual in shape.residuals],
        "knee": shape.knee,
        "line_from": shape.line_from,
        "line_until": shape.line_until,
    }


def _believed(scheduler: Scheduler) -> list[list[float]]:
    """The curve at the speed that the instances have now: its corners, padded sizes at their cost."""
    curve = scheduler.curve
    available = sum(instance.available for instance in scheduler.instances) or len(scheduler.instances)
    slower = available / scheduler.instances.pace
    sizes = {1, curve.max_batch, *(size for size, _ in curve.points)}
    for bucket in curve.buckets:
        sizes |= {bucket, bucket + 1}
    return [[size, curve.times[size] * slower * 1e3] for size in sorted(sizes) if size <= curve.max_batch]


def _promise(curve: BatchCurve, policy: object, instances: int) -> dict[str, Any] | None:
    if not isinstance(policy, Promise):
        return None
    return {
        "slo_ms": policy.slo * 1e3,
        "largest_batch": max(1, min(policy.max_batch, curve.fits(policy.slo))),
        "promised_batch": promised_batch(curve, policy.slo),
        "capacity_rps": slo_capacity(curve, policy.slo, instances),
    }


def _fixed(policy: object) -> dict[str, Any] | None:
    if not isinstance(policy, FixedBatching):
        return None
    return {
        "max_batch": policy.max_batch,
        "preferred": list(policy.preferred),
        "max_delay_ms": policy.max_delay * 1e3,
        "priority_levels": policy.priority_levels,
        "preserve_ordering": policy.preserve_ordering,
        "max_queue_size": policy.limits.max_size,
        "timeout_ms": policy.limits.timeout * 1e3,
    }


def _recent(batches: RecentBatches, now: float) -> dict[str, Any]:
    """Returns the operating point: the mean batch of the last seconds, and what it took."""
    sizes = batches.sizes(now)
    count = sum(size.batches for size in sizes)
    return {
        "seconds": RECENT_S,
        "batches": count,
        "mean_batch": sum(s.images * s.batches for s in sizes) / count if count else None,
        "mean_ms": sum(s.seconds * s.batches for s in sizes) / count * 1e3 if count else None,
        "sizes": [[s.images, s.batches, s.seconds * 1e3] for s in sizes],
    }
