"""Answers as they leave, kept in memory: the least recently used go when the bytes are more than allowed.

What is asked for once is never kept. A table of 65,536 places remembers digests that were seen; an answer is
kept when its digest is met there the second time, so that traffic without repeats takes no memory and makes
nobody leave. S3-FIFO would keep a little more of some traces, and is not worth a second queue before one of
those is seen.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PLACES = 65536
_PLACE_BYTES = 2
_OVERHEAD = 512  # bytes of an entry besides its answer: what Python takes for it


class Kept(NamedTuple):
    """An answer without what belongs to one request alone: its id and its times."""

    body: bytes
    header_length: int | None = None  # of a v2 answer with binary tensors: how much of it is JSON


class Owner(Protocol):
    """Whose entry it is: told when it comes and goes."""

    def entered(self, size: int) -> None: ...
    def left(self, size: int, why: str) -> None: ...


@dataclass(slots=True)
class Entry:
    owner: Owner
    sure: bytes  # the keyed digest of what was asked
    kept: Kept
    at: float
    ends: float

    @property
    def size(self) -> int:
        return len(self.kept.body) + _OVERHEAD


class Doorkeeper:
    """Which digests were seen lately: 512 KB, whatever comes. Each has one place, where the last counts."""

    def __init__(self) -> None:
        self._places = array("Q", bytes(8 * PLACES))

    def seen_before(self, digest: bytes) -> bool:
        """And note it."""
        place = int.from_bytes(digest[:_PLACE_BYTES], "little")
        mark = int.from_bytes(digest[_PLACE_BYTES : _PLACE_BYTES + 8], "little")
        if self._places[place] == mark:
            return True
        self._places[place] = mark
        return False


class Room:
    """Bytes that a front end may keep, for all of its models. `make` frees some when they are too many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0


class AnswerStore:
    """Of one front end, by fast digest."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes, now: float) -> Entry | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if now >= entry.ends:
            self._drop(digest, "ttl")
            return None
        self._entries.move_to_end(digest)
        return entry

    def put(self, digest: bytes, entry: Entry) -> None:
        if entry.size > self._room.most:
            return
        if digest in self._entries:
            self._drop(digest, "replaced")
        self._entries[digest] = entry
        self._room.used += entry.size
        entry.owner.entered(entry.size)
        while self._room.used > self._room.most and len(self._entries) > 1:
            self._drop(next(iter(self._entries)), "room")

    def clear(self, owns: Callable[[Owner], bool], why: str) -> None:
        for digest in [digest for digest, entry in self._entries.items() if owns(entry.owner)]:
            self._drop(digest, why)

    def _drop(self, digest: bytes, why: str) -> None:
        entry = self._entries.pop(digest)
        self._room.used -= entry.size
        entry.owner.left(entry.size, why)
