"""What was measured of a model and what is believed of it now, for whoever asks the engine."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from carpool.core.curve import BatchCurve, promised_batch, shape_of, slo_capacity
from carpool.core.policy import Knobs, Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.engine_host import EngineHost
from carpool.engine.models.served import Served
from carpool.engine.profile.recent import RECENT_S, RecentBatches


def teach_profiles(host: EngineHost) -> None:
    """The question `profile`: {"name": …, "version": …} → the document below."""

    async def answer(arguments: Mapping[str, Any]) -> Any:
        name, version = str(arguments.get("name", "")), str(arguments.get("version", ""))
        return profile_document(host.engine.find(name, version), monotonic())

    host.teach("profile", answer)


def profile_document(served: Served, now: float) -> dict[str, Any]:
    """Times in ms. `points` were measured at loading; `believed` is what batches are planned with now."""
    profile, scheduler = served.profile, served.driver.scheduler
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
        "instances": len(scheduler.instances),
        "threads": None if profile is None else profile.layout.threads,
        "fit": _fit(scheduler.drift.profile),
        "curve": [[size, seconds * 1e3] for size, seconds in scheduler.curve.points],
        "believed": _believed(scheduler),
        "speed": {
            "factor": scheduler.drift.factor,
            "told": scheduler.drift.told,
            "relearned": scheduler.curve is not scheduler.drift.profile,
            "instances": [[i.speed.mean, i.speed.cautious] for i in scheduler.instances],
        },
        "promise": _promise(scheduler.curve, policy, len(scheduler.instances)),
        "knobs": _knobs(policy),
        "recent": _recent(served.recent, now),
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


def _knobs(policy: object) -> dict[str, Any] | None:
    if not isinstance(policy, Knobs):
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
    """The operating point: the mean batch of the last seconds, and what it took."""
    sizes = batches.sizes(now)
    count = sum(size.batches for size in sizes)
    return {
        "seconds": RECENT_S,
        "batches": count,
        "mean_batch": sum(s.images * s.batches for s in sizes) / count if count else None,
        "mean_ms": sum(s.seconds * s.batches for s in sizes) / count * 1e3 if count else None,
        "sizes": [[s.images, s.batches, s.seconds * 1e3] for s in sizes],
    }
