"""The scheduler's decisions become errors that a client can act on: what, why, and numbers that add up."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log10
from typing import TYPE_CHECKING

from carpool.core.job import INFINITY, NO_SLACK, GivenUp, Job, Reason, Refusal, Terms
from carpool.core.numerals import apart, numeral
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, Refused, Replaced, Unavailable

if TYPE_CHECKING:
    from carpool.core.scheduler import Scheduler

_IN_NUMBERS = (Reason.CANNOT_FINISH, Reason.OVERLOAD, Reason.OVER_SHARE, Reason.QUEUE_FULL, Reason.GIVEN_UP)
_PARTS = (
    ("waited", "since it arrived"),
    ("queue", "queued batches"),
    ("running", "running batch"),
    ("input", "decoding"),
    ("batch", "its own batch"),
    ("outside", "reading and sending"),
    ("later", "later steps"),
)
_TERMS_MS = {
    "queue": "queue_ms",
    "running": "running_ms",
    "input": "input_ms",
    "batch": "batch_ms",
    "outside": "outside_ms",
    "later": "later_ms",
    "margin": "margin_ms",
}
_LONGEST_NAME = 80
_TINY_S = 1e-6  # a margin below this is rounding, not a margin
_SOON_S = 0.001  # a new request has its whole promise ahead: asking again helps, even at once
_DIGITS = (4, 6, 9, 12)  # as few as still show which of two sides is larger


class RefusalInNumbers(Refused):
    """Holds a refusal in numbers, put into words when they are first read: that is for a front end to do, of
    which there are several, and not for the one engine while it is flooded."""

    def __init__(self, model: str, refusal: Refusal) -> None:
        Exception.__init__(self)
        self._model = model
        self.refusal = refusal
        self.reason = refusal.reason._value_  # what `value` looks up at every call

    def to_words(self) -> Refused:
        return in_words(self._model, self.refusal)

    def __getattr__(self, name: str) -> object:
        if name not in _WORDS:
            raise AttributeError(name)
        self.__dict__ |= {known: getattr(self.to_words(), known) for known in _WORDS}
        return self.__dict__[name]

    def __str__(self) -> str:
        return self.message


_LONGER = "raise the deadline (slo_ms, or the request's own)"
_WORDS = ("message", "field", "numbers", "predicted_ms", "retry_after_s")


def turned_away(model: str, job: Job, refusal: Refusal, *, fixed: bool) -> CarpoolError:
    """Returns the same as `refused`, for who may not need the words."""
    if fixed or refusal.reason not in _IN_NUMBERS:
        return refused(model, job, refusal, fixed=fixed)
    return RefusalInNumbers(model, refusal)


def dropped(model: str, gone: GivenUp, now: float, retry_after: float) -> CarpoolError:
    """Returns the same as `given_up`, for who may not need the words."""
    if gone.reason is not Reason.GIVEN_UP:
        return given_up(model, gone, now, retry_after)
    terms = _terms_of(gone, now)
    refusal = Refusal(gone.reason, retry_after, room=gone.room, needed=gone.needed, terms=terms)
    return RefusalInNumbers(model, refusal)


def refused(model: str, job: Job, refusal: Refusal, *, fixed: bool) -> CarpoolError:
    """Returns a rejection at the gate."""
    reason = refusal.reason
    if reason is Reason.TOO_LARGE:
        why = f"{model} takes at most {refusal.most} images in a request, not {job.images}"
        return InvalidInput(why, reason="too-many-images", numbers=_deadline(job))
    if reason is Reason.REPLACED:
        return replaced(model, job.origin.source)
    if reason is Reason.RESTARTING:
        again = {"retry_after_s": _round(refusal.retry_after)} if refusal.retry_after > 0 else {}
        why = f"{model} is down and is being restarted"
        numbers = {**_deadline(job), "waiting": refusal.waiting}
        return Unavailable(why, reason=reason.value, numbers={**numbers, **again})
    if reason is Reason.QUEUE_FULL and fixed:
        numbers = {**_deadline(job), "waiting": refusal.waiting, "max_waiting": refusal.most}
        return Unavailable("Exceeds maximum queue size", reason="queue-full", numbers=numbers)
    return in_words(model, refusal)


def given_up(model: str, gone: GivenUp, now: float, retry_after: float) -> CarpoolError:
    """Returns the error of a job that was accepted and not run after all."""
    job, reason = gone.job, gone.reason
    terms = _terms_of(gone, now)
    numbers = {"waited_ms": _round(terms.waited * 1e3)} | _deadline(job)
    if reason is Reason.TIMEOUT:
        return Unavailable("Request timeout expired", reason="timeout", numbers=numbers)
    if reason is Reason.REPLACED:
        return replaced(model, job.origin.source, numbers)
    if reason is Reason.DEADLINE and job.deadline <= job.arrived:
        return DeadlineExceeded(f"{model}: the deadline passed before the whole request was received")
    if reason is Reason.DEADLINE:
        why = f"the deadline of {numeral(terms.deadline * 1e3, 4)} ms passed in the queue"
        if now < job.deadline:  # reported before it has passed: a batch and the way to the client take time
            late = _too_late(terms, "the response could be ready")
            waited = _ms(terms.waited)
            why = f"after {waited} ms in the queue {late}. Retry when there is less load, or {_LONGER}"
        return DeadlineExceeded(f"{model}: {why}", numbers=numbers)
    refusal = Refusal(reason, retry_after, room=gone.room, needed=gone.needed, terms=terms)
    return in_words(model, refusal)


def _terms_of(gone: GivenUp, now: float) -> Terms:
    job = gone.job
    return Terms(
        deadline=max(0.0, job.deadline - job.arrived),
        waited=max(0.0, now - job.arrived),
        batch=gone.batch,
        outside=job.outside,
        later=job.course.later,
    )


def in_words(model: str, refusal: Refusal) -> Refused:
    """Returns what was rejected, by which numbers, and what to do about it. The numbers add up."""
    terms = refusal.terms
    predicted = terms.predicted
    is_known = predicted > 0.0 and refusal.reason not in (Reason.GIVEN_UP, Reason.QUEUE_FULL)
    return Refused(
        f"{model} rejected the request{_WHY[refusal.reason](refusal)}.{_queued(refusal)}{_advice(refusal)}",
        reason=refusal.reason.value,
        predicted_ms=_round(predicted * 1e3) if is_known else None,
        # Who would be late on an idle server gains nothing by coming back.
        retry_after_s=round(refusal.retry_after, 6) if refusal.retry_after > 0 else None,
        numbers=_numbers(refusal),
    )


def _cannot_finish(refusal: Refusal) -> str:
    return f": {_too_late(refusal.terms)}"


def _overload(refusal: Refusal) -> str:
    """Three ways to be too much: requests pile up before the scheduler, a text would be late in a whole
    batch, and the batch that meets this deadline is too small for the traffic."""
    if refusal.lag > 0.0:
        lag, most = apart(refusal.lag * 1e3, refusal.most_lag * 1e3)
        return f": requests wait {lag} ms before they reach the scheduler, and at most {most} ms are accepted"
    if refusal.room == 0:
        return f": {_too_late(refusal.terms)}; a smaller batch would make other requests late"
    sustained, asked = apart(refusal.sustained, refusal.asked)
    return f": {_room(refusal, sustained)}, but {asked} images/s are offered"


def _over_share(refusal: Refusal) -> str:
    sustained, asked = apart(refusal.sustained, refusal.asked)
    return f": {_room(refusal, sustained)} of this source's share, but the source offers {asked} images/s"


def _room(refusal: Refusal, sustained: str) -> str:
    size = refusal.room
    return (
        f"its deadline of {_ms(refusal.terms.deadline)} ms leaves room for a batch of {size}, "
        f"and batches of {size} sustain {sustained} images/s"
    )


def _queue_full(refusal: Refusal) -> str:
    return (
        f": it has {_images(refusal.images)}, {_are_queued(refusal.waiting)}, "
        f"and the queue holds at most {refusal.most:,}"
    )


def _given_up(refusal: Refusal) -> str:
    terms = refusal.terms
    if terms.batch:
        return f" after {_ms(terms.waited)} ms in the queue: {_too_late(terms)}"
    left = terms.deadline - terms.predicted
    return (
        f" after {_ms(terms.waited)} ms in the queue: {_ms(left)} of its {_ms(terms.deadline)} ms are left, "
        f"enough for a batch of {refusal.room}, and the queue needs batches of {refusal.needed}"
    )


_WHY: dict[Reason, Callable[[Refusal], str]] = {
    Reason.CANNOT_FINISH: _cannot_finish,
    Reason.OVERLOAD: _overload,
    Reason.OVER_SHARE: _over_share,
    Reason.QUEUE_FULL: _queue_full,
    Reason.GIVEN_UP: _given_up,
}


def _too_late(terms: Terms, what: str = "the response would be ready") -> str:
    """That it is, in numbers whose sum shows it."""
    margin = terms.margin if terms.margin > _TINY_S else 0.0
    for digits in _DIGITS:
        said = [numeral(s * 1e3, digits) for s in (terms.predicted, max(0.0, margin), terms.deadline)]
        predicted, extra, deadline = (float(word.replace(",", "")) for word in said)
        if predicted + extra > deadline:
            break
    ready = f"{what} in {said[0]} ms{_parts(terms)}"
    if terms.deadline <= 0.0:
        return f"{ready}, and the deadline has passed"
    if margin <= _TINY_S:
        return f"{ready}; that is later than the deadline of {said[2]} ms"
    covers = "how much batch times vary here" if terms.spread else "how late requests end here"
    return (
        f"{ready}, plus a safety margin of {said[1]} ms that covers {covers}; "
        f"that is later than the deadline of {said[2]} ms"
    )


def _parts(terms: Terms) -> str:
    """Returns what the prediction is the sum of, if it is one."""
    whole_ms = terms.predicted * 1e3
    if not 0.0 < whole_ms < INFINITY:
        return ""
    decimals = max(0, 3 - floor(log10(whole_ms)))
    shown = [(f"{getattr(terms, name) * 1e3:.{decimals}f}", words) for name, words in _PARTS]
    told = [
        f"{ms.rstrip('0').rstrip('.') if '.' in ms else ms} ms {words}" for ms, words in shown if float(ms)
    ]
    return f" ({' + '.join(told)})" if len(told) > 1 else ""


def _ms(seconds: float) -> str:
    return numeral(seconds * 1e3, 4)


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count:,} images"


def _are_queued(count: int) -> str:
    return f"{_images(count)} {'is' if count == 1 else 'are'} queued"


def _queued(refusal: Refusal) -> str:
    known = refusal.reason not in (Reason.QUEUE_FULL, Reason.GIVEN_UP)
    return f" {_are_queued(refusal.waiting)[0].upper()}{_are_queued(refusal.waiting)[1:]}." if known else ""


def _advice(refusal: Refusal) -> str:
    if refusal.retry_after > 0.0:
        or_longer = f", or {_LONGER}" if refusal.reason is Reason.CANNOT_FINISH else ""
        return f" Retry after {_ms(refusal.retry_after)} ms{or_longer}."
    return f" A retry would not help: {_LONGER}." if refusal.reason is Reason.CANNOT_FINISH else ""


def skipped(model: str) -> Unavailable:
    """Returns the error of work that no client waits for, and that there was no slack for."""
    return Unavailable(f"{model} has no free time for background work", reason=NO_SLACK)


def replaced(model: str, source: str, numbers: dict[str, float] | None = None) -> Replaced:
    """A live source has sent something newer."""
    name = source if len(source) <= _LONGEST_NAME else source[:_LONGEST_NAME] + "…"
    waited = f" after {numeral(numbers['waited_ms'], 4)} ms in the queue" if numbers else ""
    return Replaced(
        f"{model}: a newer frame of source '{name}' took this one's place{waited}", numbers=numbers
    )


def _numbers(refusal: Refusal) -> dict[str, float]:
    terms, reason = refusal.terms, refusal.reason
    numbers = {"deadline_ms": _round(terms.deadline * 1e3)} if terms.deadline < INFINITY else {}
    if terms.waited and reason is Reason.GIVEN_UP:
        numbers = {"waited_ms": _round(terms.waited * 1e3)} | numbers
    if reason is not Reason.GIVEN_UP:
        numbers["waiting"] = refusal.waiting
    if reason is Reason.QUEUE_FULL:
        numbers["max_waiting"] = refusal.most
    if refusal.asked:
        numbers |= {"offered_rps": _round(refusal.asked), "answerable_rps": _round(refusal.answerable)}
    if refusal.sustained:
        numbers |= {"room": refusal.room, "sustained_rps": _round(refusal.sustained)}
    parts = {word: _round(getattr(terms, name) * 1e3) for name, word in _TERMS_MS.items()}
    return numbers | {word: ms for word, ms in parts.items() if ms}


def _deadline(job: Job) -> dict[str, float]:
    budget = max(0.0, job.deadline - job.arrived)
    return {"deadline_ms": _round(budget * 1e3)} if budget < INFINITY else {}


def _round(value: float) -> float:
    return round(value, 3)


def until_welcome(core: Scheduler, gone: GivenUp, now: float, told: dict[object, float]) -> float:
    """Returns when the same request would be let in again. The last argument caches the answers of one turn.

    Hundreds may be given up at once, and those that look alike get the same answer.
    """
    if gone.reason is not Reason.GIVEN_UP:
        return 0.0
    job = gone.job
    source = job.origin.source or job.origin.payer
    alike = job.images, job.shape, job.options.priority, source
    if alike not in told:
        again = Job(
            now,
            images=job.images,
            shape=job.shape,
            priority=job.options.priority,
            source=source,
            outside=job.outside,
        )
        refusal = core.refuses(again, now)
        told[alike] = _SOON_S if refusal is None else max(_SOON_S, refusal.retry_after)
    return told[alike]
