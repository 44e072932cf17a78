"""This module has the error tree. Every error a user can cause carries one sentence and a stable reason
word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

_LONGEST_WAIT_S = 3600

E = TypeVar("E", bound=BaseException)


def without_stack(error: E) -> E:
    """Returns the error with nothing left but what it says, for code that stores or answers it.

    Its stack holds frames, and those hold the request with its body, which most often leads back to the
    error: such a ring is freed by the collector alone, and that comes late. An error behind it may hold the
    whole document that could not be read.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class CarpoolError(Exception):
    """Base of everything Carpool raises on purpose."""

    reason = "internal"
    while_loading = False  # of a model that was read, and failed then

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.field = field
        self.numbers: Mapping[str, float] = numbers or {}  # of the message, for programs


class InvalidInput(CarpoolError):  # the caller sent something that cannot be right; `field` names it
    reason = "invalid-input"


class ConfigError(CarpoolError):  # a setting is wrong; the message names the file and the key
    reason = "invalid-config"


class NotFound(CarpoolError):  # no such model or version
    reason = "not-found"


class Gone(NotFound):  # it was here, and is not any more: the client sends it again
    reason = "gone"


class Unauthenticated(CarpoolError):  # the client is not known: no key, or one that is not known
    reason = "unauthenticated"


class Forbidden(CarpoolError):  # who asks may not do this
    reason = "forbidden"


class Unsupported(CarpoolError):  # understood, but not done here
    reason = "unsupported"


class TooLarge(CarpoolError):  # over a size limit
    reason = "too-large"


class Refused(CarpoolError):
    """The gate said no, or gave up early to save the rest. Carries what the caller needs to decide on a
    retry: the predicted wait and when to come back."""

    reason = "overload"
    rendered: dict[str, Any] | None = None
    """By protocol: what clients are sent. Only an error that answers many requests caches it."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        predicted_ms: float | None = None,
        retry_after_s: float | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, numbers=numbers)
        self.predicted_ms = predicted_ms
        self.retry_after_s = retry_after_s

    def again(self) -> Refused:
        """Returns a copy for another request: one exception that is raised twice keeps both stacks."""
        same = Refused.__new__(Refused, self.message)
        same.__dict__.update(self.__dict__)
        return same


class Replaced(CarpoolError):  # a newer frame of the same source took its place
    reason = "replaced"


class WrongState(CarpoolError):  # understood, but it does not fit how things stand now
    reason = "wrong-state"


class DeadlineExceeded(CarpoolError):  # the deadline passed while waiting, or the execution timed out
    reason = "deadline"


class Cancelled(CarpoolError):  # the client left
    reason = "cancelled"


class Unavailable(CarpoolError):  # loading, draining, restarting, or one of Triton's own queue limits
    reason = "unavailable"
    retry_after_s: float | None = None  # when to come back


class Unreachable(CarpoolError):
    """The server is not there, not ready, or does not want such requests."""

    reason = "unreachable"
    exit_code = 1


def advice_for(why: str) -> str:
    """Returns what to do where no response came for this reason: a server that is not trusted does run."""
    if "certificate verify failed" in why:
        return "give the certificate of its authority, or its own: --ca FILE, or ca= in Python"
    return "is the server running?"


class ModelError(CarpoolError):  # the model raised, died, or answered with the wrong shape
    reason = "model-error"


def retry_after(error: CarpoolError) -> int | None:
    """Returns when a client that was refused may come back, in whole seconds; None where that would not
    help."""
    if isinstance(error, Refused | Unavailable) and error.retry_after_s is not None:
        seconds = error.retry_after_s
        return min(max(1, math.ceil(seconds)), _LONGEST_WAIT_S) if math.isfinite(seconds) else 1
    return 1 if isinstance(error, Unavailable) else None


def prefixed(error: CarpoolError, words: str, kind: type[CarpoolError] | None = None) -> CarpoolError:
    """Returns the same error with these words before its own, of another kind if that is given. It is another
    object: several requests may have been answered with this one."""
    said = words + error.message
    if isinstance(error, Refused):
        return Refused(
            said,
            reason=error.reason,
            predicted_ms=error.predicted_ms,
            retry_after_s=error.retry_after_s,
            numbers=error.numbers,
        )
    return (kind or type(error))(said, reason=error.reason, field=error.field, numbers=error.numbers)
