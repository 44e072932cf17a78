"""What the engine and the runner say to each other.

Each instance has a socket of its own, for batches:

    engine → runner    FAMILY   what requests of one kind have in common, told once to each instance
                       FORGET   all of these
                       RUN      a seat for each request: where it lies and where its outputs go
    runner → engine    DONE      the batch that was asked for last, with what became of each request

Everything else goes over a control socket (`link/control.py`), with documents as files (`documents.py`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.models.loading import Ready
from carpool.link.records import AS_DECLARED, OK
from carpool.link.typed_json import read_document, write_document

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class Asked:
    """Which version to load."""

    config: ModelConfig
    version: ModelVersion


@dataclass(frozen=True, slots=True)
class Opening:
    """One more instance of what was loaded before, with what was found out then."""

    asked: Asked
    ready: Ready
    threads: int | None  # of an instance


@dataclass(frozen=True, slots=True)
class OpenedAs:
    number: int
    device: str


@dataclass(frozen=True, slots=True)
class Prepared:
    ready: Ready
    threads: int | None
    opened: list[OpenedAs]
    packages: list[str]  # that were imported


@dataclass(frozen=True, slots=True)
class Failure:
    """As `link/failures.py` writes it."""

    status: int
    text: str


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
            file.write(write_document(document))
        yield fd
    finally:
        os.close(fd)


def from_file(kind: type[T], fd: int) -> T:
    """Closes it. ValueError where it holds nothing of that kind."""
    with open(fd, "rb") as file:
        file.seek(0)
        return read_document(kind, file.read())
