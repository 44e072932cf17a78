"""Which counters a failed request belongs to: one place, so that every front end counts alike."""

from __future__ import annotations

import asyncio

from carpool.errors import DeadlineExceeded, ModelError, Refused, Replaced, Unavailable
from carpool.observe.columns import FAILURE_SECONDS, FAILURES, SHED
from carpool.observe.counters import Row

_SHEDDING = (Refused, DeadlineExceeded, Unavailable)
_UNWANTED = (asyncio.CancelledError, Replaced)
_BACKENDS = (ModelError, DeadlineExceeded)


def count_failure(row: Row, error: BaseException, seconds: float) -> None:
    """Counts one request that ended in `error`, `seconds` after it arrived."""
    shed = _shed_word(error)
    row.add(FAILURES[_failure_word(error, shed)])
    row.add(FAILURE_SECONDS, max(seconds, 0.0))
    if shed:
        row.add(SHED[shed])


def _shed_word(error: BaseException) -> str:
    """The reason when the scheduler chose not to run the request, else nothing."""
    if isinstance(error, Replaced):
        return "replaced"
    # By class first: an oversized body and an oversized batch carry the same word.
    return error.reason if isinstance(error, _SHEDDING) and error.reason in SHED else ""


def _failure_word(error: BaseException, shed: str) -> str:
    if isinstance(error, _UNWANTED):
        return "CANCELED"  # the client left, or its own newer frame took the place
    if shed or isinstance(error, Refused):
        return "REJECTED"
    if isinstance(error, _BACKENDS):
        return "BACKEND"  # a deadline that is not a shed is an execution that timed out
    return "OTHER"
