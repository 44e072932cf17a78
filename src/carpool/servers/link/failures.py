"""Errors across the link: the class as a number, the rest as the JSON that clients get."""

from __future__ import annotations

from carpool.errors import (
    Cancelled,
    CarpoolError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    Replaced,
    TooLarge,
    Unavailable,
    Unsupported,
)
from carpool.servers.link.records import GONE
from carpool.wire.head import load_object
from carpool.wire.v2 import encode_error

_CLASSES: tuple[type[CarpoolError], ...] = (
    CarpoolError,
    InvalidInput,
    ConfigError,
    NotFound,
    Unsupported,
    TooLarge,
    Refused,
    Replaced,
    DeadlineExceeded,
    Cancelled,
    Unavailable,
    ModelError,
)
_NUMBERS = {kind: number for number, kind in enumerate(_CLASSES, GONE + 1)}


def write_failure(error: CarpoolError) -> tuple[int, bytes]:
    """A status and a payload. A class that the other side may not know goes as the nearest it does."""
    for kind in type(error).__mro__:
        if kind in _NUMBERS:
            return _NUMBERS[kind], encode_error(error)
    raise TypeError(f"{type(error).__name__} is no CarpoolError")


def read_failure(status: int, payload: bytes) -> CarpoolError:
    number = status - GONE - 1
    kind = _CLASSES[number] if 0 <= number < len(_CLASSES) else CarpoolError
    document = load_object(payload, "error")
    message, reason = str(document.pop("error", "")), str(document.pop("reason", kind.reason))
    field, predicted, retry = (
        document.pop(name, None) for name in ("field", "predicted_ms", "retry_after_s")
    )
    numbers = {name: value for name, value in document.items() if type(value) in (int, float)}
    if kind is Refused:
        return Refused(message, reason=reason, predicted_ms=predicted, retry_after_s=retry, numbers=numbers)
    return kind(message, reason=reason, field=field, numbers=numbers)
