"""Requests that ask the same while the first of them is computed: they wait for that one answer.

Each keeps its own deadline, and may leave when it likes; the first one's client may leave, too, without
ending it for the others. Whether two are the same is told from their bytes, which both still have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from carpool.wire.head import Buffer

MOST_JOINED = 64
Caller = TypeVar("Caller")


class Computed(Generic[Caller]):
    """What one request computes, and who waits for it."""

    __slots__ = ("_pieces", "_said", "first", "joined")

    def __init__(self, first: Caller, said: bytes, pieces: Sequence[Buffer]) -> None:
        self.first = first
        self.joined: dict[Caller, None] = {}  # in their order
        self._said = said
        self._pieces: Sequence[Buffer] | None = pieces

    def is_same(self, said: bytes, pieces: Sequence[Buffer]) -> bool:
        mine = self._pieces
        if mine is None or said != self._said or len(mine) != len(pieces):
            return False
        for one, other in zip(mine, pieces, strict=True):
            whole = bytes(one) if isinstance(one, memoryview) else one  # which cannot do the next
            if len(whole) != len(other) or not whole.startswith(other):
                return False
        return True

    @property
    def has_room(self) -> bool:
        return len(self.joined) < MOST_JOINED - 1

    def forget_bytes(self) -> None:
        """Their memory is used for something else from here on: nobody can join any more."""
        self._pieces = None


class Twins(Generic[Caller]):
    """Of one front end, by fast digest."""

    def __init__(self) -> None:
        self._computed: dict[bytes, Computed[Caller]] = {}

    def find(self, digest: bytes, said: bytes, pieces: Sequence[Buffer]) -> Computed[Caller] | None:
        """One that can be joined."""
        found = self._computed.get(digest)
        if found is None or not found.has_room or not found.is_same(said, pieces):
            return None
        return found

    def begin(self, digest: bytes, computed: Computed[Caller]) -> None:
        """From here on it is the one to join: another there is full, or asks for something else."""
        self._computed[digest] = computed

    def end(self, digest: bytes, computed: Computed[Caller]) -> None:
        if self._computed.get(digest) is computed:
            del self._computed[digest]
