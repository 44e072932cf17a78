"""Answers that need more than bytes: errors, with the one table of statuses, and what leaves compressed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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
    retry_after,
    without_stack,
)
from carpool.frontend.http.exchange import JSON_FIELDS, Exchange
from carpool.wire.v2 import encode_error


class WrongMethod(CarpoolError):
    reason = "method-not-allowed"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"{method} is not allowed here; allowed is {self.allowed}")


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


def choose_encoding(accepted: bytes | None) -> bytes | None:
    """The best answer to an Accept-Encoding field: gzip, deflate, or None for the plain body."""
    if not accepted:
        return None
    quality: dict[bytes, float] = {}
    for part in accepted.lower().split(b","):
        name, _, parameter = part.partition(b";")
        quality[name.strip()] = _quality(parameter)
    anything = quality.get(b"*", 0.0)
    gzip = quality.get(b"gzip", quality.get(b"x-gzip", anything))
    deflate = quality.get(b"deflate", anything)
    if max(gzip, deflate, quality.get(b"identity", 0.0)) <= 0 or quality.get(b"identity", 0.0) > max(
        gzip, deflate
    ):
        return None
    return b"gzip" if gzip >= deflate else b"deflate"


def _quality(parameter: bytes) -> float:
    name, _, value = parameter.partition(b"=")
    if name.strip() != b"q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def compress(body: bytes, encoding: bytes, level: int = 6) -> bytes:
    """`body` in one of the encodings that `choose_encoding` names."""
    compressor = zlib.compressobj(
        level, zlib.DEFLATED, 16 + zlib.MAX_WBITS if encoding == b"gzip" else zlib.MAX_WBITS
    )
    return compressor.compress(body) + compressor.flush()
