"""What was measured of a model and what is believed of it now, for whoever asks the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carpool.core.capacity import promised_batch, slo_capacity
from carpool.core.curve import BatchCurve
from carpool.core.policy import Promise
from carpool.core.shape import shape_of
from carpool.engine.served import Served
from carpool.servers.host import EngineHost


def teach_profiles(host: EngineHost) -> None:
    """The question `profile`: {"name": …, "version": …} → the document below."""

    async def answer(arguments: Mapping[str, Any]) -> Any:
        name, version = str(arguments.get("name", "")), str(arguments.get("version", ""))
        return profile_document(host.engine.find(name, version))

    host.teach("profile", answer)


def profile_document(served: Served) -> dict[str, Any]:
    """Times in ms. `points` were measured at loading; `curve` is what batches are planned with now."""
    profile, scheduler = served.profile, served.driver.scheduler
    policy = served.config.policy
    measured = () if profile is None else profile.points
    return {
        "name": served.name,
        "version": served.version,
        "points": [
            {"size": p.size, "ms": p.seconds * 1e3, "spread": p.spread, "runs": p.runs} for p in measured
        ],
        "measured_at": None if profile is None else profile.measured_at,
        "instances": len(scheduler.instances),
        "threads": None if profile is None else profile.layout.threads,
        "curve": [[size, seconds * 1e3] for size, seconds in scheduler.curve.points],
        "fit": _fit(scheduler.curve),
        "speed": {
            "factor": scheduler.drift.factor,
            "told": scheduler.drift.told,
            "instances": [[i.speed.mean, i.speed.cautious] for i in scheduler.instances],
        },
        "promise": _promise(scheduler.curve, policy, len(scheduler.instances)),
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


def _promise(curve: BatchCurve, policy: object, instances: int) -> dict[str, Any] | None:
    if not isinstance(policy, Promise):
        return None
    return {
        "slo_ms": policy.slo * 1e3,
        "largest_batch": max(1, min(policy.max_batch, curve.fits(policy.slo))),
        "promised_batch": promised_batch(curve, policy.slo),
        "capacity_rps": slo_capacity(curve, policy.slo, instances),
    }
