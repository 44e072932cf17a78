"""The scheduler's words become errors that a client can act on: one sentence with the numbers in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool.core.job import INFINITY, GivenUp, Job, Reason, Refusal
from carpool.core.numerals import numeral
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, Refused, Replaced, Unavailable

if TYPE_CHECKING:
    from carpool.core.scheduler import Scheduler

SPARE = "spare"
"""The reason of work that nobody waits for and that was skipped: no client ever reads it."""

_WHY = {
    Reason.CANNOT_FINISH: (
        "would finish {predicted_ms} ms after it arrived, its deadline is {deadline_ms} ms; "
        "{waiting} images wait"
    ),
    Reason.OVERLOAD: (
        "is offered {offered_rps} images/s and can answer at most {answerable_rps} in time; "
        "a new request would drag the others down ({waiting} images wait)"
    ),
    Reason.OVER_SHARE: (
        "is saturated; this source asks {offered_rps} images/s, and its fair share is {answerable_rps}"
    ),
    Reason.QUEUE_FULL: "has a full queue: {waiting} images wait, and at most {max_waiting} may",
    Reason.GIVEN_UP: (
        "is saturated; after {waited_ms} of its {deadline_ms} ms this request was given up "
        "for those behind it"
    ),
}
_LONGEST_NAME = 80
_SOON_S = 0.001  # a new request has its whole promise ahead: asking again helps, even at once


class RefusalInNumbers(Refused):
    """A refusal in numbers, put into words when somebody looks at them: that is for a front end to do, of
    which there are several, and not for the one engine while it is flooded."""

    def __init__(self, model: str, job: Job, refusal: Refusal) -> None:
        Exception.__init__(self)
        self._model = model
        self.budget = job.deadline - job.arrived
        self.predicted = refusal.predicted_finish - job.arrived
        self.refusal = refusal
        self.reason = refusal.reason._value_  # what `value` looks up at every call

    def to_words(self) -> CarpoolError:
        return in_words(self._model, self.budget, self.predicted, self.refusal)

    def __getattr__(self, name: str) -> object:
        if name not in _WORDS:
            raise AttributeError(name)
        self.__dict__ |= {known: getattr(self.to_words(), known) for known in _WORDS}
        return self.__dict__[name]

    def __str__(self) -> str:
        return self.message


_WORDS = ("message", "field", "numbers", "predicted_ms", "retry_after_s")


def in_words(model: str, budget: float, predicted: float, refusal: Refusal) -> CarpoolError:
    """For who has the numbers: its time, and when it would have finished, or was given up, from its arrival
    on."""
    if refusal.reason is Reason.GIVEN_UP:
        return given_up(model, Job(0.0, budget), refusal.reason, predicted, refusal.retry_after)
    known = refusal._replace(predicted_finish=predicted)
    return refused(model, Job(0.0, budget), known, knobs=False)


def turned_away(model: str, job: Job, refusal: Refusal, *, knobs: bool) -> CarpoolError:
    """As `refused`, for who may not need the words."""
    if knobs or refusal.reason not in _WHY:
        return refused(model, job, refusal, knobs=knobs)
    return RefusalInNumbers(model, job, refusal)


def dropped(model: str, job: Job, reason: Reason, now: float, retry_after: float) -> CarpoolError:
    """As `given_up`, for who may not need the words."""
    if reason is not Reason.GIVEN_UP:
        return given_up(model, job, reason, now, retry_after)
    return RefusalInNumbers(
        model, job, Refusal(reason, predicted_finish=max(now, job.arrived), retry_after=retry_after)
    )


def refused(model: str, job: Job, refusal: Refusal, *, knobs: bool) -> CarpoolError:
    """A no at the gate."""
    reason = refusal.reason
    numbers = _numbers(job, refusal)
    if reason is Reason.TOO_LARGE:
        why = f"{model} takes no request of {job.images} images: at most {refusal.most} at once"
        return InvalidInput(why, reason="too-many-images", numbers=numbers)
    if reason is Reason.REPLACED:
        return replaced(model, job.source)
    if reason is Reason.RESTARTING:
        again = {"retry_after_s": _round(refusal.retry_after)} if refusal.retry_after > 0 else {}
        why = f"{model} is down and is being restarted"
        return Unavailable(why, reason=reason.value, numbers={**numbers, **again})
    if reason is Reason.QUEUE_FULL and knobs:
        return Unavailable("Exceeds maximum queue size", reason="queue-full", numbers=numbers)
    predicted = refusal.predicted_finish - job.arrived
    predicted_ms = _round(predicted * 1e3) if predicted < INFINITY else None
    told = numbers if predicted_ms is None else {**numbers, "predicted_ms": predicted_ms}
    return Refused(
        _sentence(model, reason, told),
        reason=reason.value,
        predicted_ms=predicted_ms,
        # Who would be late on an idle server gains nothing by coming back.
        retry_after_s=refusal.retry_after if refusal.retry_after > 0 else None,
        numbers=numbers,
    )


def given_up(model: str, job: Job, reason: Reason, now: float, retry_after: float) -> CarpoolError:
    """Accepted, and not run after all."""
    waited = max(0.0, now - job.arrived)
    numbers = {"waited_ms": _round(waited * 1e3)} | _deadline(job)
    if reason is Reason.TIMEOUT:
        return Unavailable("Request timeout expired", reason="timeout", numbers=numbers)
    if reason is Reason.REPLACED:
        return replaced(model, job.source, numbers)
    if reason is Reason.DEADLINE and job.deadline <= job.arrived:
        return DeadlineExceeded(f"{model}: the deadline had passed before the whole request was here")
    if reason is Reason.DEADLINE:
        deadline = numeral(numbers["deadline_ms"], 4)
        why = f"the deadline of {deadline} ms passed in the queue"
        if now < job.deadline:  # told before it has passed: a batch and the way to the client take time
            why = f"after {numeral(numbers['waited_ms'], 4)} of its {deadline} ms in the queue "
            why += "no answer could reach the client in time"
        return DeadlineExceeded(f"{model}: {why}", numbers=numbers)
    return Refused(
        _sentence(model, reason, numbers), reason=reason.value, retry_after_s=retry_after, numbers=numbers
    )


def skipped(model: str) -> Unavailable:
    """Work that nobody waits for, and that there was no slack for."""
    return Unavailable(f"{model} has no time to spare for it", reason=SPARE)


def replaced(model: str, source: str, numbers: dict[str, float] | None = None) -> Replaced:
    """A live source has sent something newer."""
    name = source if len(source) <= _LONGEST_NAME else source[:_LONGEST_NAME] + "…"
    waited = f" after {numeral(numbers['waited_ms'], 4)} ms in the queue" if numbers else ""
    return Replaced(
        f"{model}: a newer frame of source '{name}' took this one's place{waited}", numbers=numbers
    )


def _numbers(job: Job, refusal: Refusal) -> dict[str, float]:
    numbers = _deadline(job)
    if refusal.reason not in (Reason.TOO_LARGE, Reason.REPLACED):
        numbers["waiting"] = refusal.waiting
    if refusal.reason is Reason.QUEUE_FULL:
        numbers["max_waiting"] = refusal.most
    if refusal.asked:
        numbers |= {"offered_rps": _round(refusal.asked), "answerable_rps": _round(refusal.answerable)}
    return numbers


def _deadline(job: Job) -> dict[str, float]:
    budget = max(0.0, job.deadline - job.arrived)
    return {"deadline_ms": _round(budget * 1e3)} if budget < INFINITY else {}


def _round(value: float) -> float:
    return round(value, 3)


def _sentence(model: str, reason: Reason, numbers: dict[str, float]) -> str:
    known = dict.fromkeys(
        ("predicted_ms", "deadline_ms", "waiting", "max_waiting", "offered_rps", "answerable_rps"), "?"
    )
    shown = {name: numeral(value, 4) for name, value in numbers.items()}
    return f"{model} " + _WHY[reason].format_map(known | shown)


def until_welcome(core: Scheduler, gone: GivenUp, now: float, told: dict[object, float]) -> float:
    """When the same request would be let in again. `told` keeps the answers of one turn.

    Hundreds may be given up at once, and those who look alike are told the same.
    """
    if gone.reason is not Reason.GIVEN_UP:
        return 0.0
    job = gone.job
    alike = job.images, job.shape, job.priority, job.source
    if alike not in told:
        again = Job(
            now,
            images=job.images,
            shape=job.shape,
            priority=job.priority,
            source=job.source,
            outside=job.outside,
        )
        refusal = core.refuses(again, now)
        told[alike] = _SOON_S if refusal is None else max(_SOON_S, refusal.retry_after)
    return told[alike]
