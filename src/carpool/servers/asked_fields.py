"""What a client says beside its request, in headers over HTTP and in metadata over gRPC."""

from __future__ import annotations

import re

from carpool.core.job import INFINITY
from carpool.errors import InvalidInput

DEADLINE = "X-Carpool-Deadline-Ms"
SOURCE = "X-Carpool-Source"
MAX_SOURCE_CHARS = 128

_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def read_budget(field: bytes | None) -> float:
    """Seconds from the request's head to the client's deadline."""
    if field is None:
        return INFINITY
    budget = float(field) / 1e3 if _MILLISECONDS.fullmatch(field) else 0.0
    if not budget:
        raise InvalidInput(f"{DEADLINE} must be a number of milliseconds above 0", field=DEADLINE)
    return budget


def read_source(field: bytes | None) -> str:
    if field is None:
        return ""
    try:
        source = field.decode()
    except UnicodeDecodeError:
        source = "\0"
    if len(source) > MAX_SOURCE_CHARS or not source.isprintable():
        raise InvalidInput(
            f"{SOURCE} must be printable text of at most {MAX_SOURCE_CHARS} characters", field=SOURCE
        )
    return source
