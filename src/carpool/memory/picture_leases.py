"""Describes pictures that stay on a device between the steps of a pipeline, as front ends and the runner
speak of them.

A file that is to be kept has a *lease* behind it, in the same slot:

    length (8) │ the file … │ to the next 8 bytes │ token (8) │ state (4)

The front end writes the token, a number that was never used before, and takes it back when the request is
over, however it ended. The decoder keeps the file's pixels under that token for as long as the token
stands there, and writes into the state whether it has. A later step names the token and its rectangles:

    token (8) │ free (8) │ left, top, right, bottom (16) │ … one for each crop

Nothing else is said: no message frees a picture, so none can be lost. Both sides map the same memory, and
each word has one writer. The state is written before the step is answered and read after that answer, which
comes over sockets: by then it is there. A token that is taken back while the picture is being kept is seen at
the next look; until then the picture takes room, and does no harm. The memory of a slot that was released may
hold anything, but by chance never the token: no client learns it, and it is one of 2⁶⁴.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import count
from mmap import mmap
from struct import Struct

from carpool.memory.layout import FILE_AT, find_file

_token = Struct("<Q")
_state = Struct("<I")
_box = Struct("<IIII")
_ALIGNED = 8
LEASE_BYTES = _ALIGNED + _token.size + _state.size
"""Behind the file, wherever that ends."""
KEPT_FILE = FILE_AT + LEASE_BYTES
"""The size that a template gives for a file that is to be kept: of a plain one it is FILE_AT."""
_CUTS_AT = 16

ASKED = 1
KEPT = 2
NO_ROOM = 3

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels of the picture."""

_next = count(int.from_bytes(os.urandom(7), "little") << 7)  # another process begins elsewhere


def new_token() -> int:
    return next(_next) % (1 << 64) or next(_next)


def cuts_bytes(crops: int) -> int:
    """Returns how long a request for so many is: never as long as one for a file."""
    return _CUTS_AT + crops * _box.size


def crops_in(size: int) -> int:
    """Returns how many crops a request of this length is for; 0 if it cannot be one."""
    crops, rest = divmod(size - _CUTS_AT, _box.size)
    return 0 if rest or crops < 1 else crops


def _lease_at(end: int) -> int:
    return -(-end // _ALIGNED) * _ALIGNED


class Lease:
    """Represents the front end's side, of a file in a slot."""

    def __init__(self, view: memoryview) -> None:
        """Begins it. ValueError where it does not fit behind the file."""
        _, end = find_file(view, 0)
        self._at = at = _lease_at(end)
        if at + _token.size + _state.size > len(view):
            raise ValueError("a slot without room for a lease")
        self._view = view
        self.token = new_token()
        _state.pack_into(view, at + _token.size, ASKED)
        _token.pack_into(view, at, self.token)

    @property
    def kept(self) -> bool:
        """After the step was answered."""
        found: int = _state.unpack_from(self._view, self._at + _token.size)[0]
        return found == KEPT

    def end(self) -> None:
        """Before the slot is released; again is harmless."""
        if len(self._view):
            _token.pack_into(self._view, self._at, 0)
            self._view = memoryview(b"")


class LeaseSeen:
    """Represents the runner's side."""

    __slots__ = ("_at", "_memory", "token")

    def __init__(self, memory: mmap, end: int) -> None:
        """Reads the lease of a file that ends there. ValueError where that is too near the end of the
        memory."""
        self._at = at = _lease_at(end)
        if at + _token.size + _state.size > len(memory):
            raise ValueError("a lease beyond its memory")
        self._memory = memory
        self.token: int = _token.unpack_from(memory, at)[0]

    @property
    def stands(self) -> bool:
        found: int = _token.unpack_from(self._memory, self._at)[0]
        return found == self.token != 0

    def say(self, state: int) -> None:
        """Only where the step's outputs might be written as well: until it is answered, the slot is lent."""
        _state.pack_into(self._memory, self._at + _token.size, state)


def write_cuts(view: memoryview, token: int, boxes: Iterable[Sequence[int]]) -> None:
    _token.pack_into(view, 0, token)
    for number, box in enumerate(boxes):
        _box.pack_into(view, _CUTS_AT + number * _box.size, *box)


def read_cuts(memory: mmap | memoryview, offset: int, crops: int) -> tuple[int, list[Box]]:
    """Returns the token and the rectangles, which are not believed to lie in any picture."""
    (token,) = _token.unpack_from(memory, offset)
    at = offset + _CUTS_AT
    found = [_box.unpack_from(memory, at + number * _box.size) for number in range(crops)]
    return token, found
