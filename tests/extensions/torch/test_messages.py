"""What the engine and the runner say to each other survives the way, and lies are noticed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import Unavailable
from carpool.extensions.torch import runner_instance as arenas_module
from carpool.extensions.torch.hosted_model import Wire
from carpool.extensions.torch.picture_slots import PictureSlots
from carpool.extensions.torch.runner_instance import Arenas
from carpool.extensions.torch.runner_messages import RunnerFailure
from carpool.link.records import AS_EXPECTED, Ending, read_endings, write_endings
from carpool.link.typed_json import as_file, from_file
from carpool.memory.arena import create_memory, map_memory

ENDINGS = st.builds(Ending, st.integers(0, 65_535), st.integers(0, 65_535), st.binary(max_size=40))


@given(st.lists(ENDINGS, min_size=1))
def test_endings_come_back_as_they_were(endings: list[Ending]) -> None:
    assert list(read_endings(write_endings(endings), len(endings))) == endings


def test_what_goes_as_expected_takes_no_bytes() -> None:
    assert write_endings([AS_EXPECTED] * 100) == b""
    assert list(read_endings(b"", 3)) == [AS_EXPECTED] * 3


@given(st.lists(ENDINGS, min_size=1), st.integers(1, 5))
def test_another_number_of_endings_is_noticed(endings: list[Ending], more: int) -> None:
    payload = write_endings([Ending(7, 7, b"x"), *endings])
    for count in (len(endings), len(endings) + 1 + more):
        with pytest.raises(ValueError, match="than requests"):
            list(read_endings(payload, count))


def test_documents_of_any_length_travel_as_files() -> None:
    document = RunnerFailure(3, "x" * 1_000_000)
    with as_file(document) as file:
        received = os.dup(file)
    assert from_file(RunnerFailure, received) == document


def test_an_arena_may_come_after_the_request_that_lies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = Arenas(PictureSlots(lambda _: 0))
    file = create_memory("test", 4096)
    memory = map_memory(file)
    os.close(file)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(arenas.find(7).memory))
    thread.start()
    arenas.add(7, memory)
    thread.join(30)
    assert found == [memory]
    arenas.forget(7)
    monkeypatch.setattr(arenas_module, "_ARENA_S", 0.0)
    with pytest.raises(Unavailable, match="front end is gone"):
        arenas.find(7)


def test_a_wire_keeps_the_order_of_what_it_cannot_send_yet() -> None:
    asyncio.run(_send_more_than_fits())


async def _send_more_than_fits() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    gone = asyncio.Event()
    wire = Wire(ours, loop, lambda _: None, gone.set)
    sent = [bytes([number]) * 300_000 for number in range(8)]
    for piece in sent:
        wire.send(piece)

    def read_all() -> bytes:
        received = bytearray()
        while len(received) < 8 * 300_000:
            received += theirs.recv(1 << 16)
        return bytes(received)

    assert await asyncio.wait_for(asyncio.to_thread(read_all), 30) == b"".join(sent)
    wire.finish()
    assert theirs.recv(1) == b""
    theirs.close()
    await asyncio.wait_for(gone.wait(), 30)
    wire.send(b"into the void")
    wire.finish()
