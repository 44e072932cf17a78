"""Stores answers as they leave, in memory: the least recently used go when the bytes are more than allowed.

What is asked for once is never stored. A table of 32,768 places remembers digests that were seen; an answer
is stored when its digest is met there the second time, so that traffic without repeats takes no memory and
evicts nothing. S3-FIFO would have a few more hits on some traces, and is not worth a second queue before one
of those is measured.

What was asked is stored, too, while a quarter of the memory is enough for it: to compare 100 KB takes a tenth
of the time of their keyed digest. For the rest that digest says whether a request is the same.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.wire.head import Buffer

PLACES = 32768
_ASKED_PART = 4
_OVERHEAD = 512  # bytes of an entry besides its answer: what Python takes for it


class Owner(Protocol):
    """Defines the owner of an entry, which is called when the entry comes and goes."""

    def entered(self, size: int) -> None: ...
    def left(self, size: int, why: str) -> None: ...


@dataclass(slots=True)
class Entry:
    owner: Owner
    sure: bytes  # the keyed digest of what was asked
    kept: EncodedAnswer
    at: float
    ends: float
    asked: Sequence[bytes] | None = None  # itself, in pieces, of which the first says all but the bytes

    @property
    def size(self) -> int:
        return len(self.kept.body) + _OVERHEAD

    def is_same(self, said: bytes, pieces: Sequence[Buffer]) -> bool:
        """Returns whether it is the same, while what was asked is stored."""
        mine = self.asked
        return mine is not None and said == mine[0] and same_bytes(mine[1:], pieces)


def same_bytes(some: Sequence[Buffer], others: Sequence[Buffer]) -> bool:
    """Compares both piece by piece."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        # Views that are compared by == are, byte by byte, in twenty times the time.
        whole = bytes(one) if isinstance(one, memoryview) else one
        if len(whole) != len(other) or not whole.startswith(other):
            return False
    return True


class Doorkeeper:
    """Which digests were seen lately: 128 KB, whatever comes. Each has one place, where the last counts. Half
    of a digest's bits are enough: a request that is taken for another is stored once for nothing."""

    def __init__(self) -> None:
        self._places = array("I", bytes(4 * PLACES))

    def seen_before(self, digest: int) -> bool:
        """Returns whether a digest of 64 bits was seen before, and notes it."""
        places, place, mark = self._places, digest % PLACES, digest >> 32
        if places[place] == mark:
            return True
        places[place] = mark
        return False


class Room:
    """Counts bytes that a front end may keep, for all of its models. `make` frees some when they are too
    many."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0


class AnswerStore:
    """Stores the answers of one front end, by fast digest."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.entries: OrderedDict[int, Entry] = OrderedDict()
        self._asked: OrderedDict[int, int] = OrderedDict()  # bytes of what was asked, where it is stored
        self._asked_used = 0

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, digest: int, now: float) -> Entry | None:
        entry = self.entries.get(digest)
        if entry is None:
            return None
        if now >= entry.ends:
            self._drop(digest, "ttl")
            return None
        self.entries.move_to_end(digest)
        if entry.asked is not None:
            self._asked.move_to_end(digest)
        return entry

    def put(self, digest: int, entry: Entry) -> None:
        if entry.size > self._room.most:
            return
        if digest in self.entries:
            self._drop(digest, "replaced")
        self.entries[digest] = entry
        self._room.used += entry.size
        entry.owner.entered(entry.size)
        if entry.asked is not None:
            self._asked[digest] = size = sum(map(len, entry.asked))
            self._asked_used += size
            self._room.used += size
            while self._asked_used > self._room.most // _ASKED_PART:
                self._forget_asked(next(iter(self._asked)))
        while self._room.used > self._room.most and len(self.entries) > 1:
            self._drop(next(iter(self.entries)), "room")

    def clear(self, owns: Callable[[Owner], bool], why: str) -> None:
        for digest in [digest for digest, entry in self.entries.items() if owns(entry.owner)]:
            self._drop(digest, why)

    def _drop(self, digest: int, why: str) -> None:
        if digest in self._asked:
            self._forget_asked(digest)
        entry = self.entries.pop(digest)
        self._room.used -= entry.size
        entry.owner.left(entry.size, why)

    def _forget_asked(self, digest: int) -> None:
        size = self._asked.pop(digest)
        self.entries[digest].asked = None
        self._asked_used -= size
        self._room.used -= size
