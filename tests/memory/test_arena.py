"""Slots of shared memory: apart from each other, given back once, and never starved by one size."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.memory.arena import Arena, ArenaSlot, create_memory, map_memory
from later import many

KIB = 1024


def arena(size: int = 1 << 20) -> Arena:
    fd = create_memory("test", size)
    try:
        return Arena(map_memory(fd))
    finally:
        os.close(fd)


def take(memory: Arena, size: int) -> ArenaSlot:
    slot = memory.allocate(size)
    assert slot is not None
    return slot


@pytest.mark.parametrize(
    ("size", "capacity"),
    [
        (0, 4 * KIB),
        (1, 4 * KIB),
        (4 * KIB, 4 * KIB),
        (4 * KIB + 1, 6 * KIB),
        (6 * KIB, 6 * KIB),
        (6 * KIB + 1, 8 * KIB),
        (150_528, 192 * KIB),
        (200_000, 256 * KIB),
    ],
)
def test_a_slot_has_the_length_asked_for_and_room_to_the_end_of_its_class(size: int, capacity: int) -> None:
    slot = take(arena(), size)
    assert len(slot.view) == size
    assert slot.capacity == capacity


def test_the_engine_sees_the_same_bytes() -> None:
    fd = create_memory("test", 1 << 20)
    ours, theirs = Arena(map_memory(fd)), map_memory(fd)
    os.close(fd)
    slot = take(ours, 5)
    slot.view[:] = b"hello"
    assert theirs[slot.offset : slot.offset + 5] == b"hello"


def test_nobody_can_resize_it_under_our_feet() -> None:
    fd = create_memory("test", 1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 2 << 20)
    os.close(fd)


def test_the_slot_released_last_is_used_next() -> None:
    memory = arena()
    first, second = take(memory, 5000), take(memory, 5000)
    first.release()
    second.release()
    assert take(memory, 5000).offset == second.offset


def test_releasing_twice_gives_it_back_once() -> None:
    memory = arena()
    slot = take(memory, 100)
    slot.release()
    again = take(memory, 100)
    slot.release()  # a stale handle: the memory is another's by now
    assert memory.slots_used == 1
    assert take(memory, 100).offset != again.offset
    assert len(slot.view) == 0


def test_what_is_larger_than_the_arena_is_refused() -> None:
    memory = arena()
    assert memory.allocate((1 << 20) + 1) is None
    assert memory.allocate(1 << 60) is None
    assert memory.slots_used == 0


def test_a_full_arena_says_so_and_recovers() -> None:
    memory = arena()
    slots = [take(memory, 64 * KIB) for _ in range(16)]
    assert memory.allocate(1) is None
    assert memory.bytes_used == memory.size
    slots[3].release()
    small = take(memory, 1)  # out of the larger slot, for want of anything better
    small.release()
    assert take(memory, 64 * KIB).offset == slots[3].offset


def test_a_flood_of_small_slots_leaves_no_trace() -> None:
    memory = arena()
    flood = [take(memory, 1) for _ in range(256)]
    assert memory.allocate(1) is None
    random.Random(5).shuffle(flood)
    for slot in flood:
        slot.release()
    assert take(memory, 1 << 20).offset == 0


def test_neighbours_are_joined_around_what_is_in_use() -> None:
    memory = arena()
    flood = [take(memory, 1) for _ in range(256)]
    for index, slot in enumerate(flood):
        if index % 64:
            slot.release()
    assert memory.allocate(256 * KIB) is None  # no piece is so long
    assert len([take(memory, 192 * KIB) for _ in range(4)]) == 4


@pytest.mark.interpreted
def test_a_hopeless_request_does_not_sort_the_arena_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = arena(64 << 20)
    flood = [take(memory, 1) for _ in range(16384)]
    for slot in flood[::2]:
        slot.release()
    joins: list[None] = []
    join = memory._join
    monkeypatch.setattr(memory, "_join", lambda: (joins.append(None), join()))
    for _ in range(1000):
        assert memory.allocate(1 << 20) is None
        take(memory, 1).release()
    assert len(joins) <= 1000 / 7


def test_an_idle_arena_in_pieces_serves_a_large_request_after_a_few_attempts() -> None:
    memory = arena(64 << 20)
    flood = [take(memory, 1) for _ in range(16384)]
    for slot in flood[:-1]:
        slot.release()
    assert memory.allocate(64 << 20) is None
    flood[-1].release()
    assert any(memory.allocate(64 << 20) for _ in range(20))


@settings(max_examples=many(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), max_size=300))
def test_slots_never_overlap(steps: list[tuple[bool, int]]) -> None:
    memory = arena()
    held: list[ArenaSlot] = []
    for taking, number in steps:
        if taking:
            slot = memory.allocate(number)
            if slot is not None:
                held.append(slot)
        elif held:
            held.pop(number % len(held)).release()
        spans = sorted((slot.offset, slot.offset + slot.capacity) for slot in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(end <= memory.size for _, end in spans)
        assert memory.slots_used == len(held)
        assert memory.bytes_used == sum(slot.capacity for slot in held)


def test_a_slot_with_several_holders_is_free_when_the_last_lets_go() -> None:
    memory = arena()
    slot = take(memory, 100)
    twin = slot.share()
    third = twin.share()
    slot.view[:3] = b"one"
    slot.release()
    slot.release()  # a holder lets go once, however often it says so
    assert bytes(twin.view[:3]) == b"one"
    assert (twin.offset, twin.capacity, memory.slots_used) == (third.offset, slot.capacity, 1)
    third.release()
    assert memory.slots_used == 1
    twin.release()
    assert (memory.slots_used, memory.bytes_used) == (0, 0)
    with pytest.raises(ValueError, match="released"):
        twin.share()
    assert take(memory, 100).offset == slot.offset


def test_a_client_may_have_so_many_times_what_is_left_in_large_slots() -> None:
    memory, size = arena(64 << 20), 4 << 20
    mine = []
    while memory.may_take("a", size):
        slot = memory.allocate(size, "a")
        assert slot is not None
        mine.append(slot)
    assert memory.large_of("a") == len(mine) * size == 48 << 20
    assert memory.may_take("b", size)
    assert not memory.may_take("a", 1 << 20, size), "together"
    assert memory.may_take("a", 1 << 20, 1), "small ones do not count"
    assert not memory.may_take("b", 1 << 60)
    other = mine[0].share()
    for slot in mine:
        slot.release()
    assert memory.large_of("a") == size, "somebody holds it"
    other.release()
    assert memory.large_of("a") == memory.bytes_used == 0


def test_the_slot_of_an_answer_goes_with_its_body_until_somebody_takes_it() -> None:
    memory = arena()
    body, answer = take(memory, 4 * KIB), take(memory, 8 * KIB)
    body.answer = answer
    assert body.take_answer() is answer
    assert body.take_answer() is None
    body.answer = answer
    body.release()
    assert memory.bytes_used == 0


def test_memory_of_large_slots_goes_back_to_the_system_when_none_is_taken_any_more() -> None:

    def blocks() -> int:
        return os.fstat(fd).st_blocks * 512

    fd = create_memory("test", 64 << 20)
    memory = Arena(map_memory(fd))
    try:
        small = take(memory, 6 * KIB)
        small.view[:] = b"s" * len(small.view)
        large = [take(memory, 6 << 20) for _ in range(4)]
        for slot in large:
            slot.view[:] = b"x" * len(slot.view)
        kept = large.pop()
        assert not memory.give_back(), "they were taken a moment ago"
        for slot in large:
            slot.release()
        taken = blocks()
        assert taken >= 24 << 20
        while memory.give_back():
            assert taken - blocks() <= 16 << 20, "a piece at a time"
            taken = blocks()
        assert 6 << 20 <= blocks() < 7 << 20
        assert bytes(small.view) == b"s" * len(small.view)
        assert bytes(kept.view) == b"x" * len(kept.view)
        assert not memory.give_back()
        take(memory, 6 << 20).release()
        assert not memory.give_back()
        assert memory.give_back()
    finally:
        os.close(fd)
