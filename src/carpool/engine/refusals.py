"""The scheduler's words become errors that a client can act on: one sentence with the numbers in it."""

from __future__ import annotations

from carpool.core.job import INFINITY, Job, Reason, Refusal
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, Refused, Unavailable

_WHY = {
    Reason.CANNOT_FINISH: "would finish {predicted} ms after it arrived, its deadline is {budget} ms",
    Reason.OVERLOAD: "is offered more than it can answer in time; a new request would drag the others down",
    Reason.OVER_SHARE: "is saturated, and this source already has its fair share of it",
    Reason.QUEUE_FULL: "has a full queue",
    Reason.GIVEN_UP: "is saturated; after {waited} ms this request was given up for those behind it",
}


def refused(model: str, job: Job, refusal: Refusal, *, knobs: bool) -> CarpoolError:
    """A no at the gate."""
    if refusal.reason is Reason.TOO_LARGE:
        return InvalidInput(f"{model} takes no request of {job.images} images", reason="too-many-images")
    if refusal.reason is Reason.QUEUE_FULL and knobs:
        return Unavailable("Exceeds maximum queue size", reason="queue-full")
    predicted = refusal.predicted_finish - job.arrived
    return Refused(
        _sentence(model, refusal.reason, job, predicted=predicted),
        reason=refusal.reason.value,
        predicted_ms=predicted * 1e3 if predicted < INFINITY else None,
        # Who would be late on an idle server gains nothing by coming back.
        retry_after_s=refusal.retry_after if refusal.retry_after > 0 else None,
    )


def given_up(model: str, job: Job, reason: Reason, now: float, retry_after: float) -> CarpoolError:
    """Accepted, and not run after all."""
    if reason is Reason.TIMEOUT:
        return Unavailable("Request timeout expired", reason="timeout")
    waited = now - job.arrived
    if reason is Reason.DEADLINE and job.deadline <= job.arrived:
        return DeadlineExceeded(f"{model}: the deadline had passed before the whole request was here")
    if reason is Reason.DEADLINE:
        return DeadlineExceeded(f"{model}: the deadline passed after {waited * 1e3:.0f} ms in the queue")
    return Refused(
        _sentence(model, reason, job, waited=waited), reason=reason.value, retry_after_s=retry_after
    )


def _sentence(model: str, reason: Reason, job: Job, *, predicted: float = 0.0, waited: float = 0.0) -> str:
    budget = max(0.0, job.deadline - job.arrived)
    numbers = {"predicted": predicted, "budget": budget, "waited": waited}
    shown = {name: f"{value * 1e3:.3g}" for name, value in numbers.items() if value < INFINITY}
    return f"{model} " + _WHY[reason].format_map({name: shown.get(name, "?") for name in numbers})
