"""Long answers and long bodies: where they have room, who is rejected, and that all of it is given back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from carpool.errors import TooLarge, Unavailable
from carpool.memory.arena import LARGE, ArenaSlot
from heard import Heard
from link.joined import Asked, Client, Joined, joined, run
from waiting import until_in_loop as until

LONG = np.arange(3 << 20, dtype=np.uint32).astype(np.uint8).reshape(1, -1)
SIZE = LONG.nbytes
CLASS = 3 << 20  # of a slot that holds it


def nobody() -> bool:
    return False


class Cancelling:
    """Looks for room for an answer that is not wanted any more, before or after it is found."""

    def __init__(self, find: Callable[..., ArenaSlot | None], asked: Asked, *, before: bool) -> None:
        self._find = find
        self._asked = asked
        self._before = before

    def __call__(self, slot: ArenaSlot | None, client: str, size: int) -> ArenaSlot | None:
        if self._before:
            self._asked.call.cancel()
        found = self._find(slot, client, size)
        self._asked.call.cancel()
        return found


async def settled(link: Joined, client: Client) -> None:
    await until(lambda: not any(one.calls for one in link.side.links))
    await until(lambda: client.door.arena.slots_used == 0)
    assert client.door.arena.large_of("") == client.door.arena.bytes_used == 0


def test_a_long_answer_of_unknown_size_is_put_where_there_is_room_also_the_first_time() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            memory = client.door.arena.memory
            base = np.frombuffer(memory, np.uint8).ctypes.data
            for _ in range(2):
                asked = client.infer("loose", LONG)
                answer = await asked.answer()
                assert answer.error is None
                assert base <= answer.outputs[0].data.ctypes.data < base + len(memory)
                assert np.array_equal(answer.outputs[0].data, LONG)
                asked.call.release()
                del answer, asked
            await settled(link, client)

    run(main())


@pytest.mark.interpreted
def test_one_that_is_cancelled_while_room_is_looked_for_leaves_nothing() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            door = client.door
            for before in (True, False):
                asked = client.infer("loose", LONG[:, : SIZE - before])  # each is of a size of its own
                door.answer_slot = Cancelling(door.answer_slot, asked, before=before)  # type: ignore
                await settled(link, client)
                assert asked.answers == []
                del door.answer_slot
            assert np.array_equal(await client.infer("loose", LONG).output(), LONG)

    run(main())


@pytest.mark.interpreted
def test_without_room_a_long_answer_is_an_error_that_says_so() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()

            def full(*_: object) -> None:
                raise Unavailable("all memory for responses is in use", reason="no-slots")

            client.door.answer_slot = full  # type: ignore[assignment]
            error = (await client.infer("loose", LONG).answer()).error
            assert isinstance(error, Unavailable)
            assert error.reason == "no-slots"
            await settled(link, client)

    run(main())


def test_one_long_answer_does_not_make_others_like_it_be_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long an answer is may depend on what is in the request: most are short."""

    class HeardOfClient(Heard):
        client = "one"

    async def main() -> None:
        async with joined() as link:
            client = await link.door(size=16 << 20)
            x = np.ones((4, 2), np.uint8)
            assert np.array(await client.infer("loose", x, "large").output()).nbytes >= 4 << 20
            several = [client.infer("loose", x, "hold") for _ in range(16)]
            await until(lambda: len(link.engine.waiting) == len(several))
            slot = client.door.large_slot(LARGE + 1, LARGE, "another", nobody)
            slot.release()
            link.engine.release()
            for asked in several:
                assert np.array_equal(await asked.output(), x)
            await settled(link, client)

    monkeypatch.setattr("link.joined.Heard", HeardOfClient)
    run(main())


def test_an_answer_that_takes_most_of_a_small_memory_comes_over_the_link() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door(size=8 << 20)
            assert np.array_equal(await client.infer("loose", LONG).output(), LONG)
            await settled(link, client)

    run(main())


def test_a_long_body_has_room_for_its_answer_from_the_beginning() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            door, arena = client.door, client.door.arena
            slot = door.large_slot(SIZE, SIZE, "one", nobody)
            assert arena.large_of("one") == 2 * CLASS
            answer = door.answer_slot(slot, "one", SIZE)  # type: ignore[arg-type]
            assert answer is not None
            slot.release()
            assert arena.large_of("one") == CLASS, "it is the call's now"
            answer.release()
            slot = door.large_slot(SIZE, SIZE, "one", nobody)
            slot.release()
            short = door.large_slot(SIZE, LARGE, "one", nobody)
            assert arena.large_of("one") == CLASS, "a short answer finds room by itself"
            short.release()
            assert arena.bytes_used == arena.large_of("one") == 0

    run(main())


def test_a_client_that_has_its_part_is_rejected_before_others_and_small_bodies_never() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door(size=32 << 20)
            door = client.door
            slots = [door.large_slot(SIZE, SIZE, "greedy", nobody) for _ in range(32 * 3 // 4 // 6)]
            with pytest.raises(Unavailable, match=r"this client's requests hold .* retry") as rejected:
                door.large_slot(SIZE, SIZE, "greedy", nobody)
            assert rejected.value.reason == "no-slots"
            other = door.large_slot(SIZE, SIZE, "other", nobody)
            slots += [other, *(door.slot(1 << 16) for _ in range(16))]
            with pytest.raises(Unavailable):
                door.answer_slot(None, "greedy", SIZE)
            with pytest.raises(TooLarge):
                door.large_slot(64 << 20, SIZE, "other", nobody)
            for slot in slots:
                slot.release()
            assert door.arena.bytes_used == 0

    run(main())


def test_where_all_memory_is_in_use_slow_bodies_make_room() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door(size=16 << 20)
            door = client.door
            held = [door.slot(1 << 20) for _ in range(14)]

            def make_room() -> bool:
                for slot in held:
                    slot.release()
                return bool(held) and not held.clear()

            door.large_slot(SIZE, SIZE, "one", make_room).release()
            assert not held
            assert door.arena.bytes_used == 0

    run(main())
