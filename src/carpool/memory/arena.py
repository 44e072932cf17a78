"""Implements shared memory for bodies and answers: one memory file for each process that owns some, handed
out in slots.

Its owner, a front end or the engine, allocates and releases, in one thread; other processes only map the same
file and receive offsets. They may write what they were given to write until they have said that they are
done: so a slot is released when its last holder lets go of it, and a holder that has lent it to another
process lets go when that process has answered, or is dead. Slots come in
classes of 4, 6, 8, 12, 16, 24 … KiB and go back to the list of their class, the last one released first, so
that traffic keeps to memory that is already there and warm. Memory that no slot has used yet costs nothing.

Large slots count for the client that they are for, which may have some times what is left: so one client
cannot fill the memory, and small slots always find some. A long body and its answer have their slots from the
beginning: what was taken is not refused when it was computed.

When a class has nothing left, in this order: fresh memory, neighbours that are free joined into fresh memory,
a free slot of a larger class. So a flood of one size cannot starve the others for longer than it lasts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from carpool.errors import TooLarge, Unavailable

LARGE: Final = 1 << 20
"""Bytes, above which a slot counts for its client, and an answer is never sent over a link."""
MOST_OF_ARENA: Final = 4
"""An answer that takes more than this part of the memory has no slot: it goes over the link."""
_GIVEN_AT_ONCE: Final = 16 << 20
_PAGE: Final = mmap.PAGESIZE
_TIMES_THE_REST: Final = 3  # a client may have so many times what is left: alone, three quarters
_SMALLEST_BITS: Final = 12
_CLASSES: Final = 2 * (48 - _SMALLEST_BITS)
_NOTHING = memoryview(b"")


def _class_sizes() -> list[int]:
    sizes: list[int] = []
    for bits in range(_SMALLEST_BITS, 48):
        sizes += (1 << bits, 3 << (bits - 1))
    return sizes


_SIZES = _class_sizes()


def create_memory(name: str, size: int) -> int:
    """Creates a memory file of zeros that cannot be resized: a process that maps it cannot be hurt by
    another."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int) -> mmap.mmap:
    """Returns the whole file. It stays mapped until nothing refers to the map or to an array over it."""
    return mmap.mmap(fd, os.fstat(fd).st_size)


def take_memory(fd: int) -> mmap.mmap:
    """The same of a file that was received, which is closed: the map has its own hold of it."""
    try:
        return map_memory(fd)
    finally:
        os.close(fd)


def check_fits(arena: Arena, size: int) -> None:
    """Raises TooLarge for a size that can never be allocated: a request for it might wait for ever."""
    number = bisect_left(_SIZES, size)
    if number >= _CLASSES or _SIZES[number] > arena.size:
        raise TooLarge(f"a body of {size} bytes does not fit the {arena.size} bytes there are for all bodies")


class ArenaSlot:
    """One holder of a piece of the arena; `capacity` may be more than what was asked for, which `view` shows.

    A request, an identical one that waits for the same answer, a cache, the next step of a pipeline: each has
    an object of its own from `share`, and the piece is free when all of them were released. Only the owner's
    thread uses them.
    """

    __slots__ = ("_arena", "_class", "_holders", "_owner", "answer", "capacity", "offset", "view")

    def __init__(self, arena: Arena, number: int, offset: int, view: memoryview, owner: str = "") -> None:
        self._arena: Arena | None = arena
        self._owner = owner  # the client that it is for
        self.answer: ArenaSlot | None = None  # for the answer to what is in it, until it is taken
        self._class = number
        self._holders: list[int] | None = None  # how many, in common; None: this one alone, as nearly always
        self.capacity = _SIZES[number]
        self.offset = offset
        self.view = view

    def share(self) -> ArenaSlot:
        """Returns one more holder of the same bytes: whatever one of them writes, all of them read."""
        if self._arena is None:
            raise ValueError("a slot that was released cannot be shared")
        if self._holders is None:
            self._holders = [1]
        self._holders[0] += 1
        other = ArenaSlot(self._arena, self._class, self.offset, self.view, self._owner)
        other._holders = self._holders
        return other

    def release(self) -> None:
        """Let go of the memory. Again is harmless: every holder is an object of its own."""
        arena = self._arena
        if arena is not None:
            self._arena = None
            self.view = _NOTHING
            if self.answer is not None:
                self.answer.release()
                self.answer = None
            if self._holders is not None:
                self._holders[0] -= 1
                if self._holders[0]:
                    return
            arena._free[self._class].append(self.offset)
            arena.slots_used -= 1
            arena.bytes_used -= self.capacity
            arena._releases += 1
            if self.capacity > LARGE:
                arena._count(self._owner, -self.capacity)

    def take_answer(self) -> ArenaSlot | None:
        """Returns the slot for the answer, which is the caller's from here on."""
        answer, self.answer = self.answer, None
        return answer


class Arena:
    """Divides a mapped memory file into slots. For one thread."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.size = len(memory)
        self._view = memoryview(memory)
        self._free: list[list[int]] = [[] for _ in range(_CLASSES)]
        self._fresh: list[tuple[int, int]] = [(0, self.size)]  # start and end, in order
        self._fresh_most = self.size  # no piece of it is longer
        self._releases = 0  # since free slots were last joined
        self._attempts = 0  # that it would have helped, perhaps, since then
        self.slots_used = 0
        self.bytes_used = 0
        self._large = 0  # bytes of large slots
        self._large_taken = 0  # large slots, ever
        self._looked = 0  # so many were taken at the last look
        self._cold = self.size  # up to here long free pieces have no memory
        self._of: dict[str, int] = {}  # of them, those of each client

    def allocate(self, size: int, owner: str = "") -> ArenaSlot | None:
        """Returns a slot of at least `size` bytes, or None when there is no room for it now. A large one
        counts for its `owner`."""
        number = bisect_left(_SIZES, size)  # the smallest class that holds so much
        if number >= _CLASSES:
            return None
        free = self._free[number]
        if free:
            offset = free.pop()
        else:
            found = self._find(number)
            if found is None:
                return None
            number, offset = found
        self.slots_used += 1
        self.bytes_used += _SIZES[number]
        if _SIZES[number] > LARGE:
            self._large_taken += 1
            self._count(owner, _SIZES[number])
        return ArenaSlot(self, number, offset, self._view[offset : offset + size], owner)

    def give_back(self) -> bool:
        """Gives a long piece of free memory back to the system, if no large slot was taken since this was
        called before; returns whether it did. A piece a call: each takes a millisecond."""
        if self._large_taken != self._looked:
            self._looked, self._cold = self._large_taken, 0
            return False
        if self._cold == 0:
            self._join()
        for start, end in self._fresh:
            begin = -(-max(start, self._cold) // _PAGE) * _PAGE
            if end - begin > LARGE:
                self._cold = min(end, begin + _GIVEN_AT_ONCE) // _PAGE * _PAGE
                self.memory.madvise(mmap.MADV_REMOVE, begin, self._cold - begin)
                return True
        self._cold = self.size
        return False

    def may_take(self, owner: str, *sizes: int) -> bool:
        """Returns whether a client may have large slots of these sizes besides those that it has."""
        numbers = [bisect_left(_SIZES, size) for size in sizes if size > LARGE]
        if any(number >= _CLASSES for number in numbers):
            return False
        mine = self._of.get(owner, 0) + sum(_SIZES[number] for number in numbers)
        return not self._large or mine <= _TIMES_THE_REST * (self.size - self._large)

    def large_of(self, owner: str) -> int:
        """Returns the bytes of large slots that a client has."""
        return self._of.get(owner, 0)

    def _count(self, owner: str, size: int) -> None:
        self._large += size
        left = self._of.get(owner, 0) + size
        if left:
            self._of[owner] = left
        else:
            del self._of[owner]

    def left_with(self, size: int) -> float:
        """Returns how much of it would be free with so many bytes more in use, from 0 to 1."""
        return max(0.0, 1.0 - (self.bytes_used + size) / self.size)

    def _find(self, number: int) -> tuple[int, int] | None:
        """Returns the class and the offset of a slot when the list of the class is empty."""
        size = _SIZES[number]
        offset = self._carve(size)
        if offset is None and self._worth_joining(size):
            self._join()
            offset = self._carve(size)
        if offset is not None:
            return number, offset
        for larger in range(number + 1, _CLASSES):
            if self._free[larger]:
                return larger, self._free[larger].pop()
        return None

    def _carve(self, size: int) -> int | None:
        if size > self._fresh_most:
            return None
        for index, (start, end) in enumerate(self._fresh):
            if end - start >= size:
                if end - start == size:
                    del self._fresh[index]
                else:
                    self._fresh[index] = (start + size, end)
                return start
        self._fresh_most = size - 1
        return None

    def _worth_joining(self, size: int) -> bool:
        """Joining sorts all free slots: the more there are, the more must have happened since the last."""
        if not self._releases or self.size - self.bytes_used < size:
            return False
        self._attempts += 1
        pieces = sum(map(len, self._free)) + len(self._fresh)
        return 16 * self._releases + 1024 * self._attempts >= pieces

    def _join(self) -> None:
        """Turn every free slot into fresh memory again, neighbours in one piece."""
        pieces = self._fresh
        for number, offsets in enumerate(self._free):
            pieces += [(offset, offset + _SIZES[number]) for offset in offsets]
            offsets.clear()
        pieces.sort()
        joined: list[tuple[int, int]] = []
        for start, end in pieces:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self._fresh = joined
        self._fresh_most = self.size
        self._releases = 0
        self._attempts = 0


class Slot(Protocol):
    """Represents memory for one body. It belongs to the caller that asked for it until `release`."""

    view: memoryview

    def share(self) -> Slot:
        """Returns one more holder of the same bytes, which are free when all of them were released."""

    def release(self) -> None: ...


MakeRoom: TypeAlias = Callable[[], bool]
"""Cuts off another body that comes too slowly; False if none does."""

_PLENTY: Final = 0.25  # of all memory: up to here the share of each client does not matter
_FIRST_BYTES: Final = 16 * 1024  # 4,096 connections that send nothing hold a quarter of the usual 256 MiB
_GROWTH: Final = 4  # bytes copied per byte of a body: at most a third


class BodySlots:
    """Defines the part of an engine client that gives memory. `allocate` may have none now; `left_with`
    says how much of all would be free with so many bytes more in use, from 0 to 1.

    Announcing a body is not enough to take the memory for it. While there is plenty, a body gets all of its
    memory when its head is here, and comes straight into it. Else it gets a little, and more as it comes:
    what slow clients hold then follows from what they sent, not from what they said. A share for each peer's
    address was rejected: behind a proxy all clients have the same.
    """

    def __init__(self, allocate: Callable[[int], Slot | None], left_with: Callable[[int], float]) -> None:
        self._allocate = allocate
        self._left_with = left_with

    def check_fits(self, size: int) -> None:
        """Raises `TooLarge` for what can never be allocated."""

    def slot(self, size: int, make_room: MakeRoom | None = None) -> Slot:
        slot = self._allocate(size)
        if slot is None:
            self.check_fits(size)
        while slot is None and make_room is not None and make_room():
            slot = self._allocate(size)
        if slot is None:
            raise Unavailable("all memory for request bodies is in use", reason="no-slots")
        return slot

    def first_slot(self, size: int, make_room: MakeRoom) -> Slot:
        if size > _FIRST_BYTES and self._left_with(size) < 1 - _PLENTY:
            size = _FIRST_BYTES
        return self._allocate(size) or self.slot(size, make_room)

    def larger_slot(self, slot: Slot, kept: int, size: int, make_room: MakeRoom) -> Slot:
        wanted = min(_GROWTH * len(slot.view), size)
        try:
            larger = self._allocate(wanted)
            if larger is not None:
                larger.view[:kept] = slot.view[:kept]
                return larger
            part = bytes(slot.view[:kept])  # its own memory may be what is missing
        finally:
            slot.release()
        larger = self.slot(wanted, make_room)
        larger.view[:kept] = part
        return larger
