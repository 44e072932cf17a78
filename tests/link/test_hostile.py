"""A front end that lies, sides that do not listen: the engine goes on, and nothing grows without bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.job import JobOrigin
from carpool.errors import Unavailable
from carpool.frontend.link_client import LinkClient
from carpool.link.catalog_changes import CatalogWriter
from carpool.link.records import (
    ASK,
    CANCEL,
    CATALOG,
    COMING,
    DONE,
    GONE,
    MAX_ASKS,
    MAX_SOURCES,
    MAX_TEMPLATES,
    OK,
    PLACE,
    REGIONS,
    SOURCE,
    SUBMIT,
    TEMPLATE,
    TO_ENGINE,
    TO_FRONTEND,
    RecordReader,
    to_engine,
)
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.memory.client_files import OpenRegion
from frontend.client_files import client_file
from later import many
from link.echo import MODELS, catalog_of
from link.joined import Client, joined, run
from waiting import until_in_loop as until

SIZE = 1 << 20
FOUR = np.array([[1, 2, 3, 4]], np.float32)


def template(number: int = 1, **changes: Any) -> bytes:
    document: dict[str, Any] = {
        "key": 1,
        "inputs": [("x", "FP32", (1, 4), 0, 16, True)],
        "wanted": [],
        "encoded": False,
    }
    return to_engine(TEMPLATE, number, orjson.dumps(document | changes))


def source(name: str, number: int = 1, weight: float = 1.0, held: int = 0, paid: int = 0) -> bytes:
    return to_engine(SOURCE, number, struct.pack("<dBB", weight, held, paid) + name.encode())


def submit(
    call: int = 1,
    *,
    template: int = 1,
    at: int = 0,
    output: int = 4096,
    room: int = 4096,
    arrived: float = 0.0,
    deadline: float = 9e9,
    outside: float = 0.0,
    timeout: float = 0.0,
    coming: float | None = None,
    priority: int = 0,
    source: int = 0,
) -> bytes:
    times = (arrived, deadline, 0.0, outside, timeout, coming or 0.0)
    flags = 0 if coming is None else COMING
    return TO_ENGINE.pack(SUBMIT, 0, call, template, at, output, room, *times, priority, source, flags)


def held(call: int = 1, **more: Any) -> bytes:
    """One that the engine keeps until it is told to go on."""
    return submit(call, source=1, **more)


HOLD = template() + source("hold")


def in_region(region: int = 5, offset: int = 0, *, more: bytes = b"", **changes: Any) -> bytes:
    """A request whose input the engine is to fetch."""
    payload = struct.pack("<QQ", region, offset) + more
    fields = list(TO_ENGINE.unpack(submit()))
    fields[1], fields[-1] = len(payload), REGIONS
    return template(**{"key": 7, **changes}) + TO_ENGINE.pack(*fields) + payload


def x(datatype: str = "FP32", shape: Any = (1, 4), offset: Any = 0, size: Any = 16, name: Any = "x") -> Any:
    return [(name, datatype, shape, offset, size, True)]


def file(number: int = 1, **changes: Any) -> bytes:
    """The template of a picture's file."""
    return template(number, **{"key": 6, "inputs": x("UINT8", (8,), size=8), "encoded": True} | changes)


LIES = {
    "no template": submit(),
    "unknown record": to_engine(99, 1),
    "an engine's record": to_engine(DONE, 1),
    "endless payload": TO_ENGINE.pack(TEMPLATE, 0xFFFFFFFF, 1, 0, 0, 0, 0, *[0.0] * 6, 0, 0, 0),
    "the same template twice": template() + template(),
    "too many templates": b"".join(template(number) for number in range(MAX_TEMPLATES + 1)),
    "too many questions": b"".join(
        to_engine(ASK, number, orjson.dumps(("wait", {}))) for number in range(MAX_ASKS + 1)
    ),
    "input beyond the arena": template() + submit(at=SIZE - 15),
    "input far beyond": template() + submit(at=2**64 - 1),
    "output beyond the arena": template() + submit(output=SIZE, room=1),
    "room beyond the arena": template() + submit(output=0, room=2**64 - 1),
    "a call twice": HOLD + held() + held(),
    "deadline not a number": template() + submit(deadline=float("nan")),
    "deadline before time": template() + submit(deadline=-1.0),
    "more calls than slots": HOLD + b"".join(held(call) for call in range(300)),
    "not JSON": to_engine(TEMPLATE, 1, b"{"),
    "a list": to_engine(TEMPLATE, 1, b"[]"),
    "half a template": to_engine(TEMPLATE, 1, b'{"key": 1}'),
    "wrong name": template(inputs=x(name="z")),
    "name of another type": template(inputs=x(name=["x"])),
    "wrong datatype": template(inputs=x("INT32")),
    "unknown datatype": template(inputs=x("FP7")),
    "wrong shape": template(inputs=x(shape=(1, 5), size=20)),
    "shape and size disagree": template(inputs=x(size=12)),
    "batch too large": template(inputs=x(shape=(9, 4), size=144)),
    "negative offset": template(inputs=x(offset=-16)),
    "broken offset": template(inputs=x(offset=0.5)),
    "offset beyond any arena": template(inputs=x(offset=2**63)) + submit(),
    "negative dimension": template(inputs=x(shape=(-1, -4))),
    "input twice": template(inputs=x() + x()),
    "input missing": template(inputs=[]),
    "unknown output": template(wanted=["z"]),
    "output of another type": template(wanted=[7]),
    "timeout not a number": template() + submit(timeout=float("nan")),
    "timeout without end": template() + submit(timeout=float("inf")),
    "timeout below 0": template() + submit(timeout=-0.5),
    "source too long": source("s" * 257),
    "source without a name": source(""),
    "source that is no text": to_engine(SOURCE, 1, struct.pack("<dBB", 1.0, 0, 0) + b"\xff"),
    "source cut short": to_engine(SOURCE, 1, b"\0"),
    "source of no weight": source("light", weight=0.0),
    "source of endless weight": source("heavy", weight=float("inf")),
    "source of a weight that is no number": source("odd", weight=float("nan")),
    "source of a key with a longer name": source("short", held=6),
    "source of a key whose name is an address": source("192.0.2.1", held=1, paid=9),
    "source of an address that is too long": source("a" * 66, paid=65),
    "source 0": source("zero", 0),
    "source beyond all": source("far", MAX_SOURCES + 1),
    "source that nobody named": template() + submit(source=3),
    "inputs that never come": template() + submit(coming=float("inf")),
    "inputs that come before now": template() + submit(coming=-1.0),
    "strings that are to come": template(key=3, inputs=[("x", "BYTES", (1, 1), 0, 16, True)])
    + submit(coming=0.1),
    "a file that is to come": file() + submit(coming=0.1),
    "key of another type": template(key="1"),
    "strings without lengths": template(key=3, inputs=[("x", "BYTES", (1, 2), 0, 16, False)]) + submit(),
    "a file for a model that takes none": file(key=1),
    "a file that is no flag": file(encoded=1),
    "a file with another name": file(inputs=x("UINT8", (8,), size=8, name="z")),
    "a file without room for its length": file(inputs=x("UINT8", (4,), size=4)),
    "a file that begins elsewhere": file(inputs=x("UINT8", (8,), offset=8, size=8)),
    "a file and a tensor": file(inputs=x("UINT8", (8,), size=8) + x(name="z")),
    "a file beyond the arena": file() + submit(at=SIZE - 4),
    "room for a call that has not asked for it": HOLD
    + held()
    + TO_ENGINE.pack(PLACE, 0, 1, 0, 0, 0, 4096, *[0.0] * 6, 0, 0, 0),
    "room for no call": TO_ENGINE.pack(PLACE, 0, 9, 0, 0, 0, 4096, *[0.0] * 6, 0, 0, 0),
    "huge empty shape": template(key=2, inputs=x("UINT8", (0, 2**62), size=0)) + submit(),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_costs_the_liar_its_link_and_nobody_else_anything(lie: bytes) -> None:
    async def main() -> None:
        async with joined() as link:
            honest = await link.door()
            sock, liar = await link.raw(SIZE)
            with sock:
                await send(sock, lie)
                await until(lambda: len(link.side.links) == 1)
                assert link.dropped == [13]
                assert not liar.calls
                assert await honest.infer("fixed", FOUR).output() == FOUR.tolist()

    run(main())


@pytest.mark.parametrize("length", [SIZE - 107, SIZE, 2**32, 2**63, 2**64 - 1])
def test_a_file_that_claims_more_bytes_than_there_are_costs_the_liar_its_link(length: int) -> None:
    async def main() -> None:
        async with joined() as link:
            arena = create_memory("liar", SIZE)
            ours, sock = socket.socketpair()
            sock.setblocking(False)
            map_memory(arena)[100:108] = length.to_bytes(8, "little")
            await link.side.attach(13, ours, arena)
            with sock:
                await send(sock, file() + submit(at=100))
                await until(lambda: link.dropped == [13])
            assert link.engine.submitted == 0

    run(main())


def test_the_same_words_without_the_lie_are_served() -> None:
    async def main() -> None:
        async with joined() as link:
            sock, _ = await link.raw(SIZE)
            with sock:
                await send(sock, template() + submit())
                kinds = [fields[0] for fields in await hear(sock, 2)]
                assert kinds == [CATALOG, DONE]
            assert not link.dropped

    run(main())


def test_what_comes_at_once_is_submitted_at_once_and_in_order() -> None:
    async def main() -> None:
        async with joined() as link:
            sock, _ = await link.raw(SIZE)
            with sock:
                other = template(2, key=2, inputs=x("UINT8", size=4))
                calls = [held(call, template=1 if call < 4 else 2) for call in range(1, 6)]
                said = (HOLD, other, *calls, to_engine(CANCEL, 1), held(6))
                await send(sock, b"".join(said))
                catalog, gone = await hear(sock, 2)
                assert catalog[0] == CATALOG
                assert (gone[0], gone[2], gone[3]) == (DONE, 1, GONE)
                await until(lambda: link.engine.submitted == 6)
                assert link.engine.together == [(1, 3), (2, 2), (1, 1)]
            assert not link.dropped

    run(main())


def test_a_model_that_is_gone_is_no_lie() -> None:
    async def main() -> None:
        async with joined() as link:
            sock, _ = await link.raw(SIZE)
            with sock:
                await send(sock, template(key=77) + submit())
                status = (await hear(sock, 2))[1][3]
                assert status != OK
            assert not link.dropped

    run(main())


def test_a_time_of_arrival_in_the_future_is_now() -> None:
    async def main() -> None:
        async with joined() as link:
            sock, _ = await link.raw(SIZE)
            with sock:
                for call, arrived in enumerate((1e300, float("nan"), float("inf"))):
                    await send(sock, (HOLD if call == 0 else b"") + held(call, arrived=arrived))
                await until(lambda: len(link.engine.waiting) == 3)
                assert all(0.0 < work.arrived < 1e12 for work in link.engine.waiting)

    run(main())


def test_what_clients_wait_outside_is_believed_only_where_it_can_be() -> None:
    async def main() -> None:
        async with joined() as link:
            sock, _ = await link.raw(SIZE)
            with sock:
                said = (0.02, 0.0, -1.0, float("nan"), float("-inf"), 1e300, float("inf"))
                records = [held(call, outside=outside) for call, outside in enumerate(said)]
                await send(sock, HOLD + b"".join(records))
                await until(lambda: len(link.engine.waiting) == len(said))
                believed = [work.outside for work in link.engine.waiting]
                assert believed == [0.02, 0.0, 0.0, 0.0, 0.0, 10.0, 10.0]
            assert not link.dropped

    run(main())


def test_a_flood_in_one_piece_is_heard_in_turns_and_in_order() -> None:
    async def main() -> None:
        async with joined() as link:
            sock, flooding = await link.raw(1 << 21)
            modest, _ = await link.raw(SIZE)
            with sock, modest:
                count = 400
                flood = HOLD + b"".join(held(call) for call in range(count))
                await send(modest, HOLD)
                flooding.data_received(flood)  # all at once, whatever the socket would have made of it
                heard = len(link.engine.waiting)
                assert 0 < heard < count
                await send(modest, held(7))
                await until(lambda: len(link.engine.waiting) == count + 1)
                assert len(flooding.calls) == count
            assert not link.dropped

    run(main())


@settings(max_examples=many(100), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from([template(), template(2) + source("hold"), submit(), held(), *LIES.values()]),
            st.builds(
                submit, call=st.integers(0, 3), template=st.integers(0, 3), at=st.integers(0, 2**64 - 1)
            ),
            st.builds(to_engine, st.integers(0, 13), st.integers(0, 5), st.binary(max_size=50)),
        ),
        max_size=12,
    )
)
def test_noise_never_harms_the_engine(pieces: list[bytes]) -> None:
    async def main() -> None:
        async with joined() as link:
            sock, liar = await link.raw(SIZE)
            with sock:
                await send(sock, b"".join(pieces))
                await asyncio.sleep(0)
            await until(lambda: len(link.side.links) == 0)
            link.engine.release()
            assert not liar.calls

    run(main())


def test_a_front_end_that_does_not_listen_is_not_read_from_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers fill the socket, then a bounded buffer here; then its next requests stay where they are."""
    monkeypatch.setattr("carpool.engine.engine_link.MOST_UNREAD", 1 << 20)

    async def main() -> None:
        async with joined() as link:
            sock, deaf = await link.raw(SIZE)
            honest = await link.door()
            with sock:
                await send(sock, template() + source("missing"))
                call = 0
                stuck = False
                while not stuck and call < 200_000:
                    piece = b"".join(held(call + n) for n in range(100))
                    call += 100
                    stuck = not await send(sock, piece, turns=200)
                assert stuck, "it was read for ever"
                assert deaf._outbox.unsent < 4 << 20
                assert await honest.infer("fixed", FOUR).output() == FOUR.tolist()
                answered = await hear(sock, 1 + call // 2)  # and once it listens, it is served again
                assert answered[-1][0] == DONE

    run(main())


def test_a_front_end_that_does_not_listen_costs_no_memory_for_large_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("carpool.link.records.MAX_UNSENT", 8 << 20)

    async def main() -> None:
        async with joined() as link:
            sock, deaf = await link.raw(SIZE)
            loose = [("x", "UINT8", (1, 4), 0, 4, True)]
            with sock:
                await send(sock, template(key=2, inputs=loose) + source("hold"))
                await send(sock, b"".join(held(call) for call in range(50)))
                await until(lambda: len(link.engine.waiting) == 50)
                for work in link.engine.waiting:
                    work.origin = JobOrigin("large")
                link.engine.release()
                assert deaf._outbox.unsent < 12 << 20

    run(main())


def test_a_front_end_that_takes_no_catalogue_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.link.records.MAX_UNSENT", 1 << 20)

    async def main() -> None:
        async with joined() as link:
            sock, _ = await link.raw(SIZE)
            with sock:
                for number in range(5000):
                    if link.dropped:
                        break
                    link.engine.publish(*MODELS[: len(MODELS) * (number % 2)])
                    await asyncio.sleep(0)
                assert link.dropped == [13]
                await until(lambda: len(link.side.links) == 0)

    run(main())


def test_an_engine_that_does_not_listen_gets_no_more_than_a_bounded_backlog() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        arena = create_memory("test-arena", 256 << 20)
        door = LinkClient(Arena(map_memory(arena)), max_answer_bytes=SIZE)
        client = Client(door, arena)
        with theirs:
            await door.attach(ours)
            await send(theirs, CatalogWriter(catalog_of(1, MODELS)).whole())
            await until(lambda: door.serving)
            taken = [client.infer("fixed", FOUR)]
            while not taken[-1].answers:
                assert len(taken) < 40_000, "it took everything"
                taken.append(client.infer("fixed", FOUR))
                await asyncio.sleep(0)
            refused = taken[-1].answers[0].error
            assert isinstance(refused, Unavailable)
            assert refused.reason == "overload"
            assert door._link is not None
            assert door._link._outbox.unsent < 2 << 20
            used = door.arena.slots_used
            asked = client.infer("fixed", FOUR)
            await until(lambda: asked.answers)
            assert door.arena.slots_used == used
        await until(lambda: door._link is None)
        assert all(len(one.answers) == 1 for one in taken)
        for one in taken:
            one.call.release()
        assert door.arena.slots_used == 0

    run(main())


def test_too_many_questions_are_refused_here() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            waiting = [asyncio.ensure_future(client.door.ask("wait", {})) for _ in range(MAX_ASKS)]
            await asyncio.sleep(0)
            waiting[0].cancel()  # nobody listens any more, but the engine still works on it
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                await client.door.ask("ping", {})
            assert len(link.side.links) == 1
            client.door.close()
            await asyncio.wait(waiting)
            assert all(one.cancelled() or one.exception() for one in waiting)

    run(main())


async def send(sock: socket.socket, data: bytes, turns: int = 2000) -> bool:
    """Write it all, letting the engine read in between; False when it takes no more."""
    view = memoryview(data)
    while view:
        for _ in range(turns):
            try:
                sent = sock.send(view)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            except (BrokenPipeError, ConnectionResetError):
                return False
            view = view[sent:]
            break
        else:
            return False
    return True


async def hear(sock: socket.socket, count: int) -> list[tuple[Any, ...]]:
    reader = RecordReader(TO_FRONTEND, 1 << 26)
    heard: list[tuple[Any, ...]] = []

    def read() -> bool:
        with contextlib.suppress(BlockingIOError):
            heard.extend(fields for fields, _ in reader.feed(sock.recv(1 << 16)))
        return len(heard) >= count

    await until(read)
    return heard


# ── inputs in clients' memory ──


def test_the_engine_fetches_what_is_in_a_region() -> None:
    async def main() -> None:
        async with joined() as world:
            with client_file(bytes(8) + FOUR.tobytes()) as file:
                world.engine.regions[5] = OpenRegion(file.region())
                sock, link = await world.raw()
                with sock:
                    await asyncio.get_running_loop().sock_sendall(sock, in_region(offset=8))
                    assert (await answered(sock))[3] == OK
                    assert not len(link.calls)
                    assert not world.dropped

    run(main())


@pytest.mark.parametrize("number", [6, 0])
def test_a_region_that_is_gone_is_an_error_for_its_request_alone(number: int) -> None:
    async def main() -> None:
        async with joined() as world:
            sock, _ = await world.raw()
            with sock:
                await asyncio.get_running_loop().sock_sendall(sock, in_region(number))
                assert (await answered(sock))[3] not in (OK, GONE)
                assert not world.dropped
                assert not world.engine.submitted

    run(main())


LIES = {
    "beyond its region": in_region(offset=9),
    "beyond everything": in_region(offset=2**64 - 1),
    "of two inputs": in_region(more=bytes(16)),
    "details that are none": in_region(more=b"x"),
    "of a model that fetches nothing": in_region(key=1),
    "of what has to be looked at": in_region(key=8, inputs=[("x", "BOOL", (1, 3), 0, 3, True)]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies_about_regions_cost_the_link(lie: bytes) -> None:
    async def main() -> None:
        async with joined() as world:
            with client_file(bytes(24)) as file:
                world.engine.regions[5] = OpenRegion(file.region())
                sock, _ = await world.raw()
                with sock:
                    await asyncio.get_running_loop().sock_sendall(sock, lie)
                    await until(lambda: world.dropped)
                    assert not world.engine.submitted

    run(main())


async def answered(sock: socket.socket) -> tuple[Any, ...]:
    """The first record about a call."""
    reader = RecordReader(TO_FRONTEND, 1 << 24)
    while True:
        for fields, _ in reader.feed(await asyncio.get_running_loop().sock_recv(sock, 1 << 20)):
            if fields[0] == DONE:
                return fields
