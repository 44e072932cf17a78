"""What a call says in its metadata."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from carpool.core.job import INFINITY
from carpool.errors import InvalidInput
from carpool.frontend.access.keys import Principal
from carpool.link.asked_fields import (
    DEADLINE,
    LATEST,
    SOURCE,
    Sender,
    read_budget,
    read_latest,
    read_source,
)

COMPRESSION = "x-carpool-compression"

_DEADLINE = DEADLINE.lower()
_SOURCE = SOURCE.lower()
_LATEST = LATEST.lower()
_ALGORITHMS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

Metadata = Iterable[tuple[str, str | bytes]]


class Asking:
    """One call's wishes. `budget` is in seconds, `compression` is for its answers."""

    __slots__ = ("budget", "compression", "sender")

    def __init__(self) -> None:
        self.budget = INFINITY
        self.sender = Sender()
        self.compression: grpc.Compression | None = None


def read_metadata(metadata: Metadata, who: Principal | None = None) -> Asking:
    """Raises `InvalidInput` that names the entry at fault. `who` is whose key is among them."""
    asking = Asking()
    if who is not None and who.priority:
        asking.sender = Sender(priority=who.priority)
    for key, value in metadata:
        if not key.startswith("x-carpool-"):
            continue
        field = value if isinstance(value, bytes) else value.encode(errors="replace")
        if key == _DEADLINE:
            asking.budget = read_budget(field)
        elif key == _SOURCE:
            asking.sender = asking.sender._replace(source=read_source(field))
        elif key == _LATEST:
            asking.sender = asking.sender._replace(latest=read_latest(field))
        elif key == COMPRESSION:
            asking.compression = _algorithm(value)
    return asking


def _algorithm(value: Any) -> grpc.Compression | None:
    if value == "identity":
        return None
    if value not in _ALGORITHMS:
        raise InvalidInput(f"{COMPRESSION} must be gzip, deflate or identity", field=COMPRESSION)
    return _ALGORITHMS[value]
