"""Errors as gRPC statuses: the one table, and the metadata that goes with them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import grpc

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
from carpool.frontend.call import Times
from carpool.frontend.retry import retry_after

Code = grpc.StatusCode

STATUSES: dict[type[CarpoolError], grpc.StatusCode] = {
    InvalidInput: Code.INVALID_ARGUMENT,
    ConfigError: Code.INVALID_ARGUMENT,
    TooLarge: Code.INVALID_ARGUMENT,
    Cancelled: Code.CANCELLED,
    Unauthenticated: Code.UNAUTHENTICATED,
    Forbidden: Code.PERMISSION_DENIED,
    NotFound: Code.NOT_FOUND,
    Replaced: Code.ABORTED,
    Refused: Code.RESOURCE_EXHAUSTED,
    Unsupported: Code.UNIMPLEMENTED,
    Unavailable: Code.UNAVAILABLE,
    DeadlineExceeded: Code.DEADLINE_EXCEEDED,
}
"""Everything else is the server's or the model's fault: INTERNAL."""

_PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_LONGEST = 1024  # bytes: everything but the data of a call must fit some KiB
_TIMING = 'decode;dur={:.3f}, queue;dur={:.3f}, infer;dur={:.3f}, post;dur={:.3f}, batch;desc="{}"'

Metadata = tuple[tuple[str, str], ...]


class Failure(Exception):
    """How a request failed, and where its time went if it has been to the engine."""

    def __init__(self, error: CarpoolError, times: Times | None = None) -> None:
        super().__init__(error.message)
        self.error = without_stack(error)
        self.times = times


def status_of(error: CarpoolError) -> grpc.StatusCode:
    for kind in type(error).__mro__:
        if kind in STATUSES:
            return STATUSES[kind]
    return Code.INTERNAL


def details_of(error: CarpoolError) -> str:
    """The sentence; text from outside may hold what UTF-8 cannot."""
    return error.message.encode(errors="replace")[:_LONGEST].decode(errors="ignore")


def metadata_of(error: CarpoolError, times: Times | None = None) -> Metadata:
    found = [("carpool-reason", error.reason)]
    if error.field is not None:
        # Metadata is printable ASCII: the rest is escaped as gRPC escapes its own messages.
        found.append(("carpool-field", quote(error.field[:256], _PRINTABLE, errors="replace")))
    predicted = getattr(error, "predicted_ms", None)
    if predicted is not None:
        found.append(("carpool-predicted-ms", f"{predicted:.3f}"))
    found += [(f"carpool-{name.replace('_', '-')}", f"{value:.12g}") for name, value in error.numbers.items()]
    wait = retry_after(error)
    if wait is not None:
        found.append(("retry-after", str(wait)))
    if times is not None:
        found.append(("server-timing", _TIMING.format(*times)))
    return tuple(found)


def refuse(context: Any, error: CarpoolError, times: Times | None = None) -> bytes:
    """End the call with this error; returns what its handler has to return, which is not sent.

    Not by `context.abort`: it raises an error that the context keeps, whose stack leads to the message and
    back to the context, and so messages would stay until the collector comes.
    """
    context.set_code(status_of(error))
    context.set_details(details_of(error))
    context.set_trailing_metadata(metadata_of(error, times))
    without_stack(error)
    return b""
