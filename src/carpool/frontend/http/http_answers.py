"""Errors as answers: the one table of statuses, and the fields that go with them."""

from __future__ import annotations

from carpool.errors import (
    Cancelled,
    CarpoolError,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    Refused,
    Replaced,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
    without_stack,
)
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.http.routes import WrongMethod
from carpool.frontend.retry import retry_after
from carpool.wire.v2 import encode_error

STATUSES: dict[type[CarpoolError], int] = {
    InvalidInput: 400,
    ConfigError: 400,
    Cancelled: 400,
    Unauthenticated: 401,
    Forbidden: 403,
    NotFound: 404,
    WrongMethod: 405,
    Replaced: 409,
    TooLarge: 413,
    Refused: 429,
    Unsupported: 501,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
"""Everything else is the server's or the model's fault: 500."""


def status_of(error: CarpoolError) -> int:
    for kind in type(error).__mro__:
        if kind in STATUSES:
            return STATUSES[kind]
    return 500


def fields_of(error: CarpoolError) -> bytes:
    """Retry-After is in whole seconds; the body's `retry_after_s` is what a patient program reads."""
    wait = retry_after(error)
    if wait is not None:
        return b"%bRetry-After: %d\r\n" % (JSON_FIELDS, wait)
    if isinstance(error, Unauthenticated):
        return JSON_FIELDS + b"WWW-Authenticate: Bearer\r\n"
    if isinstance(error, WrongMethod):
        return b"%bAllow: %b\r\n" % (JSON_FIELDS, error.allowed.encode())
    return JSON_FIELDS


def answer_error(exchange: Exchange, error: CarpoolError, more_fields: bytes = b"") -> None:
    """The end of the error, too: nobody needs to know any more where it came from."""
    without_stack(error)
    status, fields, body = rendered(error)
    exchange.respond(status, fields + more_fields, body)


def rendered(error: CarpoolError) -> tuple[int, bytes, bytes]:
    """Status, fields and body: all that is needed of an error, which may hold much more than that."""
    kept = error.rendered if isinstance(error, Refused) else None
    found: tuple[int, bytes, bytes] | None = None if kept is None else kept.get("http")
    if found is None:
        found = status_of(error), fields_of(error), encode_error(error)
        if kept is not None:
            kept["http"] = found
    return found
