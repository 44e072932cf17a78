"""Many answers to one request across a link: in order, before the end, and none after it."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.engine.run.batch import Outcome, Work
from carpool.errors import CarpoolError, ModelError, Unavailable, Unsupported
from carpool.frontend.link_client import LinkClient
from carpool.link.catalog import Traits
from carpool.link.catalog_changes import CatalogWriter
from carpool.link.records import (
    ADMITTED,
    DONE,
    MAX_PART_BYTES,
    OK,
    PART,
    TO_FRONTEND,
    to_frontend,
)
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.memory.layout import line_up, list_places
from carpool.types import Datatype
from later import many
from link.echo import MODELS, TIMING, catalog_of
from link.joined import Client, Joined, joined, run
from link.test_hostile import send
from waiting import until_in_loop as until

FOUR = np.array([[1, 2, 3, 4]], np.float32)


async def begun(link: Joined) -> Work:
    """The request that the engine runs now."""
    await until(lambda: link.engine.running)
    return link.engine.running[-1]


def say(work: Work, value: float, finish: str = "", *, last: bool = False) -> None:
    assert work.extras.parts is not None
    assert work.place is not None
    work.extras.parts.send(work.place.part({"y": np.full((1, 4), value, np.float32)}), finish, last=last)


def test_parts_come_in_order_and_before_the_end() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("many", FOUR, "run", parts=True)
            work = await begun(link)
            for value in range(50):
                say(work, value)
            say(work, 50, "stop", last=True)
            link.engine.release()
            answer = await asked.answer()
            assert answer.error is None
            assert answer.outputs == []
            assert answer.timing == TIMING
            assert [part.outputs[0].data[0, 0] for part in asked.parts] == list(range(51))
            assert [part.finish for part in asked.parts] == [""] * 50 + ["stop"]
            assert [part.last for part in asked.parts] == [False] * 50 + [True]
            asked.call.release()
            assert client.door.arena.slots_used == 0
            assert asked.parts[0].outputs[0].data.tolist() == [[0.0] * 4]  # they are in no slot

    run(main())


def test_none_at_all_is_an_answer_too() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("many", FOUR, parts=True)
            answer = await asked.answer()
            assert (answer.error, answer.outputs, asked.parts) == (None, [], [])

    run(main())


def test_an_error_after_some_answers_is_the_end() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("many", FOUR, "run", parts=True)
            work = await begun(link)
            say(work, 1)
            work.done(work, Outcome(error=ModelError("it had enough")))
            answer = await asked.answer()
            assert isinstance(answer.error, ModelError)
            assert len(asked.parts) == 1
            assert work.extras.parts is None  # what comes later has no way to go

    run(main())


def test_what_was_on_its_way_when_the_client_left_is_dropped() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("many", FOUR, "run", parts=True)
            work = await begun(link)
            say(work, 1)
            asked.call.cancel()
            say(work, 2)
            link.engine.release()
            await until(lambda: client.door.arena.slots_used == 0)
            assert not asked.parts
            assert not asked.answers
            assert not link.dropped
            again = client.infer("many", FOUR, parts=True)  # the link is as good as before
            assert (await again.answer()).error is None

    run(main())


def test_a_part_that_cannot_be_taken_ends_its_call_and_no_other() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("many", FOUR, "run", parts=True)
            other = client.infer("many", FOUR, "run", parts=True)
            work = await begun(link)
            await until(lambda: len(link.engine.running) == 2)
            work = link.engine.running[0]

            def explode(_answer: object) -> None:
                raise RuntimeError("no")

            asked.call.hears.part = explode
            say(work, 1)
            say(work, 2)
            say(link.engine.running[1], 3)
            assert isinstance((await asked.answer()).error, CarpoolError)
            await until(lambda: other.parts)
            link.engine.release()
            assert (await other.answer()).error is None
            other.call.release()
            await until(lambda: client.door.arena.slots_used == 0)

    run(main())


def test_an_engine_that_dies_while_parts_flow_is_one_error() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("many", FOUR, "run", parts=True)
            work = await begun(link)
            say(work, 1)
            await until(lambda: asked.parts)
            link.side.close()
            answer = await asked.answer()
            assert isinstance(answer.error, Unavailable)
            assert answer.error.reason == "engine-restarted"
            assert len(asked.parts) == 1
            await until(lambda: client.door.arena.slots_used == 0)

    run(main())


def test_who_can_take_one_answer_only_is_told_so() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            answer = await client.infer("many", FOUR).answer()
            assert isinstance(answer.error, Unsupported)
            assert client.door.arena.slots_used == 0
            one = client.infer("fixed", FOUR, parts=True)  # who could take more takes one as well
            assert await one.output() == FOUR.tolist()
            assert not one.parts

    run(main())


def test_a_model_that_became_one_with_many_answers_says_so() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            before = client.model("fixed")
            link.engine.publish(
                *(replace(entry, traits=Traits(decoupled=True), key=entry.key + 100) for entry in MODELS)
            )
            await until(lambda: client.model("fixed") is not before)
            assert isinstance((await client.infer(before, FOUR).answer()).error, Unsupported)

    run(main())


def test_an_answer_that_is_too_long_is_the_models_mistake() -> None:
    async def main() -> None:
        async with joined() as link:
            link.side.max_answer_bytes = 1 << 30
            client = await link.door()
            client.infer("many", FOUR, "run", parts=True)
            place = (await begun(link)).place
            assert place is not None
            place.most = 1 << 30
            with pytest.raises(ModelError, match="bytes"):
                place.part({"y": np.zeros((MAX_PART_BYTES // 16 + 1, 4), np.float32)})
            with pytest.raises(ModelError, match="bytes"):  # the list of the outputs counts as well
                place.part({"y": np.zeros((MAX_PART_BYTES // 16, 4), np.float32)})
            assert place.part({}) == (2).to_bytes(4, "little") + b"[]"

    run(main())


# ── an engine that lies ──


def part(number: int, payload: bytes, form: int = 0, batch: int = 0, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return TO_FRONTEND.pack(PART, size, number, OK, form, batch, 0.0, 0.0, 0.0, 0.0, 0.0, 0) + payload


def inline(size: int = 16, listed: int = 16, length: int | None = None) -> bytes:
    head = list_places(line_up([("y", Datatype.FP32, (1, 4), listed)]))
    return struct.pack("<I", len(head) if length is None else length) + head + bytes(size)


LIES = {
    "a call that is not open": part(7, inline()),
    "a call that waits for none": part(2, inline()),
    "ends as nothing does": part(1, inline(), form=3),
    "a flag that there is not": part(1, inline(), batch=2),
    "no list": part(1, b""),
    "a list that is cut off": part(1, inline()[:9]),
    "a list that is longer than all": part(1, inline(length=1 << 31)),
    "a list that is no list": part(1, struct.pack("<I", 1) + b"{"),
    "bytes that are missing": part(1, inline(15)),
    "a tensor beyond its bytes": part(1, inline(listed=17)),
    "an endless payload": part(1, b"", length=0xFFFFFFFF),
    "after the end": to_frontend(DONE, 1, OK) + part(1, inline()),
}


async def lied_to(lie: bytes) -> list[CarpoolError | None]:
    """What two calls end with: the first takes parts, the second does not."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    arena = create_memory("test-arena", 1 << 20)
    broken: list[int] = []
    door = LinkClient(Arena(map_memory(arena)), max_answer_bytes=1 << 20, broken=lambda: broken.append(1))
    client = Client(door, arena)
    with theirs:
        await door.attach(ours)
        await send(theirs, CatalogWriter(catalog_of(1, MODELS)).whole())
        await until(lambda: door.serving)
        calls = [client.infer("many", FOUR, parts=True), client.infer("fixed", FOUR)]
        await send(theirs, lie)
        theirs.shutdown(socket.SHUT_WR)
        answers = [await call.answer() for call in calls]
    for call in calls:
        call.call.release()
    assert door.arena.slots_used == 0
    return [answer.error for answer in answers]


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_of_the_engine_ends_the_link_and_every_call_hears_one_error(lie: bytes) -> None:
    async def main() -> None:
        assert all(await lied_to(lie))

    run(main())


@settings(max_examples=many(100), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=80),
            st.builds(part, st.integers(0, 3), st.binary(max_size=60), st.integers(0, 4), st.integers(0, 3)),
            st.builds(part, st.integers(1, 2), st.builds(inline, st.integers(0, 20), st.integers(0, 20))),
            st.builds(to_frontend, st.sampled_from([DONE, ADMITTED, PART]), st.integers(0, 3), st.just(OK)),
        ),
        max_size=10,
    )
)
def test_noise_among_parts_never_keeps_a_call_or_a_slot(pieces: list[bytes]) -> None:
    async def main() -> None:
        await lied_to(b"".join(pieces))

    run(main())
