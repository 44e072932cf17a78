"""Writes errors for the link: the class as a number, the rest as the JSON that clients get, or in numbers."""

from __future__ import annotations

from struct import Struct

from carpool import errors
from carpool.core.job import REFUSAL_NUMBERS, Reason, refusal_of
from carpool.errors import CarpoolError, Refused, Unavailable
from carpool.link.records import GONE
from carpool.wire.head import load_object
from carpool.wire.v2 import encode_error

_CLASSES: list[type[CarpoolError]] = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CarpoolError)
]
"""In the order of their file: both ends run the same one."""
_IN_NUMBERS = GONE + 1 + len(_CLASSES)
_REASONS = list(Reason)
_numbers_record = Struct(f"<I{REFUSAL_NUMBERS}d")
"""The reason, and the numbers of the refusal."""
_NUMBERS = {kind: number for number, kind in enumerate(_CLASSES, GONE + 1)}


def write_failure(error: CarpoolError) -> tuple[int, bytes]:
    """Returns a status and a payload. A class that the other side may not know goes as the nearest it
    does."""
    from carpool.core.refusal_words import RefusalInNumbers

    if isinstance(error, RefusalInNumbers):
        refusal = error.refusal
        return _IN_NUMBERS, _numbers_record.pack(_REASONS.index(refusal.reason), *refusal.flat())
    for kind in type(error).__mro__:
        if kind in _NUMBERS:
            return _NUMBERS[kind], encode_error(error)
    raise TypeError(f"{type(error).__name__} is no CarpoolError")


def read_failure(status: int, payload: bytes, model: str = "the model") -> CarpoolError:
    if status == _IN_NUMBERS:
        from carpool.core.refusal_words import in_words

        code, *told = _numbers_record.unpack(payload)
        return in_words(model, refusal_of(_REASONS[code], told))
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
    error = kind(message, reason=reason, field=field, numbers=numbers)
    if isinstance(error, Unavailable):
        error.retry_after_s = retry
    return error
