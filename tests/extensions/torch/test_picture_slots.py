"""Pictures that stay on a device: within their budget, for as long as their leases stand, and no longer."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import Unavailable
from carpool.extensions.torch.picture_slots import PictureSlots
from carpool.extensions.torch.runner_instance import Arenas, MappedArena
from carpool.link.templates import ServedTemplate
from carpool.memory.layout import FILE_AT, write_file
from carpool.memory.picture_leases import (
    KEPT,
    KEPT_FILE,
    LEASE_BYTES,
    NO_ROOM,
    Lease,
    LeaseSeen,
    crops_in,
    cuts_bytes,
    read_cuts,
    write_cuts,
)

SLOT, ROWS, COLUMNS = 4096, 4, 5
BYTES = 3 * ROWS * COLUMNS


def some_pixels(together: int = 1) -> list[torch.Tensor]:
    """Views of one block, as a batch is decoded."""
    return list(torch.zeros(together, 3, ROWS, COLUMNS, dtype=torch.uint8).unbind())


@dataclass
class Picture:
    """In slot `number` of an arena: the front end's lease, and what the runner saw of it."""

    memory: mmap.mmap
    number: int
    length: int = 11

    def __post_init__(self) -> None:
        at = self.number * SLOT
        view = memoryview(self.memory)[at : at + FILE_AT + self.length + LEASE_BYTES]
        write_file(view, b"x" * self.length)
        self.lease = Lease(view)
        self.seen = LeaseSeen(self.memory, at + FILE_AT + self.length)


def test_the_two_sides_see_the_same_lease() -> None:
    memory = mmap.mmap(-1, 4 * SLOT)
    for length in range(40):
        picture = Picture(memory, 1, length)
        assert picture.seen.token == picture.lease.token
        assert picture.seen.stands
        assert not picture.lease.kept
        picture.seen.say(NO_ROOM)
        assert not picture.lease.kept
        picture.seen.say(KEPT)
        assert picture.lease.kept
        again = Picture(memory, 1, length)  # the next in the same slot
        assert not picture.seen.stands
        again.lease.end()
        again.lease.end()
        assert not again.seen.stands
    with pytest.raises(ValueError, match="room"):
        Lease(memoryview(bytearray(FILE_AT + 3)))
    with pytest.raises(ValueError, match="beyond"):
        LeaseSeen(memory, 4 * SLOT - 8)


def test_requests_for_parts_are_told_from_files_by_their_length() -> None:
    lengths = {cuts_bytes(crops) for crops in range(1, 200)}
    assert not lengths & {FILE_AT, KEPT_FILE}
    assert [crops_in(cuts_bytes(crops)) for crops in (1, 2, 77)] == [1, 2, 77]
    assert [crops_in(size) for size in (0, FILE_AT, KEPT_FILE, 16, 31, 33)] == [0] * 6
    view = memoryview(bytearray(cuts_bytes(2)))
    write_cuts(view, 2**64 - 1, [(0, 1, 2, 3), (4, 5, 6, 2**32 - 1)])
    assert read_cuts(view, 0, 2) == (2**64 - 1, [(0, 1, 2, 3), (4, 5, 6, 2**32 - 1)])


def test_no_more_than_the_budget_and_what_is_over_makes_room() -> None:
    memory = mmap.mmap(-1, 16 * SLOT)
    slots = PictureSlots(lambda _: 2 * BYTES)
    slots.open(1)
    first, second, third = (Picture(memory, number) for number in range(3))
    assert slots.keep(1, first.seen, some_pixels()[0])
    assert slots.keep(1, second.seen, some_pixels()[0])
    assert not slots.keep(1, third.seen, some_pixels()[0])
    assert slots.find(1, third.seen.token) is None
    first.lease.end()
    assert slots.keep(1, third.seen, some_pixels()[0])
    assert (len(slots), slots.bytes_used) == (2, 2 * BYTES)
    assert slots.find(1, first.seen.token) is None


def test_a_block_is_counted_whole_until_its_last_picture_goes() -> None:
    memory = mmap.mmap(-1, 16 * SLOT)
    slots = PictureSlots(lambda _: 4 * BYTES)
    slots.open(1)
    pictures = [Picture(memory, number) for number in range(4)]
    block = some_pixels(3)
    for picture, pixels in zip(pictures[:2], block, strict=False):
        assert slots.keep(1, picture.seen, pixels)
    assert slots.bytes_used == 3 * BYTES
    assert slots.keep(1, pictures[0].seen, block[0])  # again, of a batch that was run in halves
    assert (len(slots), slots.bytes_used) == (2, 3 * BYTES)
    pictures[0].lease.end()
    slots.look()
    assert (len(slots), slots.bytes_used) == (1, 3 * BYTES)
    assert not slots.keep(1, pictures[2].seen, some_pixels(2)[0])
    pictures[1].lease.end()
    assert slots.keep(1, pictures[2].seen, some_pixels(2)[0])
    assert slots.bytes_used == 2 * BYTES


def test_nothing_is_kept_for_who_is_gone() -> None:
    memory = mmap.mmap(-1, 16 * SLOT)
    slots = PictureSlots(lambda _: 99 * BYTES)
    picture = Picture(memory, 0)
    assert not slots.keep(1, picture.seen, some_pixels()[0])
    slots.open(1)
    assert slots.keep(1, picture.seen, some_pixels()[0])
    assert slots.find(2, picture.seen.token) is None  # of another front end
    slots.forget(1)
    slots.forget(1)
    assert (len(slots), slots.bytes_used) == (0, 0)
    assert not slots.keep(1, picture.seen, some_pixels()[0])


STEPS = st.tuples(
    st.sampled_from(("begin", "keep", "end", "look", "forget", "open", "find")),
    st.integers(0, 5),
    st.integers(1, 2),
)


@given(st.integers(0, 6), st.lists(STEPS, max_size=60))
def test_none_is_left_behind(budget: int, steps: list[tuple[str, int, int]]) -> None:
    memories = {arena: mmap.mmap(-1, 8 * SLOT) for arena in (1, 2)}
    slots = PictureSlots(lambda _: budget * BYTES)
    there = set()
    live: dict[tuple[int, int], Picture] = {}
    for what, number, arena in steps:
        at = (arena, number)
        if what == "open" and arena not in there:
            there.add(arena)
            slots.open(arena)
        elif what == "forget":
            there.discard(arena)
            slots.forget(arena)
        elif what == "begin" and at not in live:
            live[at] = Picture(memories[arena], number)
        elif what == "keep" and at in live:
            kept = slots.keep(arena, live[at].seen, some_pixels(1 + number % 2)[0])
            assert arena in there or not kept
        elif what == "find" and at in live:
            assert arena in there or slots.find(arena, live[at].seen.token) is None
        elif what == "end" and at in live:
            live.pop(at).lease.end()
        else:
            slots.look()
            assert len(slots) <= len(live)
        assert slots.bytes_used <= budget * BYTES
    for picture in live.values():
        picture.lease.end()
    slots.look()
    assert (len(slots), slots.bytes_used, slots._blocks) == (0, 0, {})


class Cutting(ServedTemplate):
    """Of requests for so many parts."""

    def __init__(self, images: int) -> None:
        size = cuts_bytes(images)
        listed = {"key": 1, "inputs": [("x", "UINT8", (size,), 0, size, True)], "wanted": [], "encoded": True}
        super().__init__(listed, None, b"")
        self.images, self.cuts = images, True


@pytest.mark.parametrize(
    "box", [(0, 0, COLUMNS + 1, 1), (0, 0, 1, ROWS + 1), (2, 0, 2, 1), (3, 1, 2, 2), (2**32 - 1, 0, 1, 1)]
)
def test_parts_beyond_the_picture_are_not_believed(box: tuple[int, int, int, int]) -> None:
    memory = mmap.mmap(-1, 4 * SLOT)
    slots = PictureSlots(lambda _: BYTES)
    arenas = Arenas(slots)
    arenas.add(1, memory)
    arena: MappedArena = arenas.find(1)
    picture = Picture(memory, 0)
    assert slots.keep(1, picture.seen, some_pixels()[0])
    view = memoryview(memory)[SLOT : SLOT + cuts_bytes(2)]
    write_cuts(view, picture.seen.token, [(1, 1, COLUMNS, ROWS)] * 2)
    found = arena.find(7, Cutting(2), SLOT, lambda given: given)
    assert [cut[1:] for cut in found.inputs["x"]] == [(1, 1, COLUMNS - 1, ROWS - 1)] * 2
    write_cuts(view, picture.seen.token, [(0, 0, 1, 1), box])
    with pytest.raises(ValueError, match="beyond"):
        arena.find(7, Cutting(2), SLOT, lambda given: given)
    write_cuts(view, picture.seen.token + 1, [(0, 0, 1, 1)] * 2)
    with pytest.raises(Unavailable):
        arena.find(7, Cutting(2), SLOT, lambda given: given)
