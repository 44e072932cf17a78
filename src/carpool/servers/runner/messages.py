"""What the engine and the runner say to each other.

Each instance has a socket of its own, for batches:

    engine → runner    FAMILY   what requests of one kind have in common, told once to each instance
                       FORGET   all of these
                       RUN      a seat for each request: where it lies and where its outputs go
    runner → engine    DONE      the batch that was asked for last, with what became of each request

Everything else goes over a control socket (`link/control.py`), with documents as files. They are pickled:
both sides are this very code, and the runner is started by the engine, which alone holds the other end.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from carpool.servers.link.records import AS_DECLARED, OK

FAMILY: Final = 1
FORGET: Final = 2
RUN: Final = 3
DONE: Final = 4

TO_RUNNER = struct.Struct("<II")
"""Kind, payload bytes."""

FROM_RUNNER = struct.Struct("<IIIIIdfff")
"""Kind, payload bytes, images, batches that memory did not suffice for, flags; seconds in all, and of input,
infer and output."""

CLEAN: Final = 1  # nothing failed
ALIVE: Final = 2  # the instance can take another batch

SEAT = struct.Struct("<QQQQQ")
"""Arena, family, offsets of input and output, capacity."""

IDENTITY = struct.Struct("<Q")
_ENDING = struct.Struct("<HHI")

MAX_FAMILIES = 4096
"""That an instance is to remember."""


class Ending(NamedTuple):
    """What became of one request: a failure's status and text, or the outputs' form and its payload."""

    status: int
    form: int
    payload: bytes = b""


AS_EXPECTED = Ending(OK, AS_DECLARED)


def write_endings(endings: Sequence[Ending]) -> bytes:
    """Nothing where all went as expected, which is the rule."""
    if endings.count(AS_EXPECTED) == len(endings):
        return b""
    return b"".join(_ENDING.pack(end.status, end.form, len(end.payload)) + end.payload for end in endings)


def read_endings(payload: bytes, count: int) -> list[Ending]:
    """ValueError where it is not what `write_endings` wrote for so many."""
    if not payload:
        return [AS_EXPECTED] * count
    endings: list[Ending] = []
    position = 0
    for _ in range(count):
        if position + _ENDING.size > len(payload):
            raise ValueError("fewer endings than requests")
        status, form, size = _ENDING.unpack_from(payload, position)
        position += _ENDING.size
        endings.append(Ending(status, form, payload[position : position + size]))
        position += size
    if position != len(payload):
        raise ValueError("more endings than requests")
    return endings


@contextmanager
def as_file(document: object) -> Iterator[int]:
    """A file with this in it, to be sent along with a message, whatever its length."""
    fd = os.memfd_create("carpool-document", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            pickle.dump(document, file)
        yield fd
    finally:
        os.close(fd)


def from_file(fd: int) -> Any:
    """Closes it."""
    with open(fd, "rb") as file:
        file.seek(0)
        return pickle.load(file)
