"""Says whether an error is the fault of the version that it came from, or of the request."""

from __future__ import annotations

from carpool import errors
from carpool.errors import CarpoolError

_WRONG_REQUESTS = (
    errors.InvalidInput,
    errors.TooLarge,
    errors.Replaced,
    errors.Cancelled,
    errors.Unauthenticated,
    errors.Forbidden,
    errors.Unsupported,
)
_NOBODYS = ("engine-restarted", "engine-stalled", "not-serving", "stopping", "overload", "no-slots")
_LATE = (errors.Refused, errors.DeadlineExceeded)


def may_run_again(error: CarpoolError) -> bool:
    """What is wrong with a request is wrong with it everywhere; the rest may be the version's fault."""
    return not isinstance(error, _WRONG_REQUESTS)


def fault_of(error: CarpoolError) -> str:
    """Returns what an error says about the version that it came from: errors, late, or nothing."""
    if isinstance(error, _LATE):
        return "late"
    if isinstance(error, (*_WRONG_REQUESTS, errors.NotFound)) or error.reason in _NOBODYS:
        return ""
    return "errors"
