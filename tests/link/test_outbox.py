"""Records that are sent at once, and those that leave at the end of the loop's turn: in order, and whole."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from carpool.link.records import Outbox

LARGE = 8 << 20  # more than a socket takes at once


class Joined:
    """An outbox on one end of a socket pair, and the other end."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    async def __aenter__(self) -> Joined:
        ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(asyncio.Protocol, sock=ours)
        self.transport = transport
        self.outbox = Outbox(loop, self.failures.append)
        self.outbox.open(self.transport)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.transport.abort()
        self.theirs.close()
        await asyncio.sleep(0)

    def there(self) -> bytes:
        """What has arrived, without a turn of the loop."""
        try:
            return self.theirs.recv(1 << 20)
        except BlockingIOError:
            return b""

    async def read(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            data += await loop.sock_recv(self.theirs, 1 << 20)
        return bytes(data)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, 60)

    asyncio.run(bounded())


def test_what_is_sent_at_once_is_there_before_the_loop_turns() -> None:
    async def main() -> None:
        async with Joined() as link:
            link.outbox.send(b"one")
            assert link.there() == b"one"
            link.outbox.put(b"two")
            link.outbox.send(b"three")
            assert link.there() == b""  # it does not overtake
            assert await link.read(8) == b"twothree"

    run(main())


def test_what_the_transport_still_has_comes_first() -> None:
    async def main() -> None:
        async with Joined() as link:
            link.outbox.send(bytes(LARGE))  # only a part of it fits
            link.outbox.send(b"next")
            await asyncio.sleep(0)
            assert link.transport.get_write_buffer_size()
            link.outbox.send(b"last")
            data = await link.read(LARGE + 8)
            assert len(data) == LARGE + 8
            assert data.endswith(b"\0nextlast")

    run(main())


def test_what_leaves_with_the_turn_is_in_order_behind_what_did_not_fit() -> None:
    async def main() -> None:
        async with Joined() as link:
            link.outbox.put(b"first")
            link.outbox.put(bytes(LARGE))  # only a part of it fits
            await asyncio.sleep(0)
            assert link.transport.get_write_buffer_size()
            link.outbox.put(b"next")
            await asyncio.sleep(0)
            data = await link.read(LARGE + 9)
            assert data.startswith(b"first\0")
            assert data.endswith(b"\0next")
            assert len(data) == LARGE + 9

    run(main())


def test_the_interpreter_is_free_while_a_turn_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of uvloop, too, whose transports keep its lock while they write."""
    turns = 0

    def write(fd: int, data: bytes) -> int:
        nonlocal turns
        turns += 1
        return write_file(fd, data)

    write_file = os.write

    async def main() -> None:
        async with Joined() as link:
            monkeypatch.setattr(os, "write", write)
            link.outbox.put(b"one")
            link.outbox.put(b"two")
            assert await link.read(6) == b"onetwo"
            assert turns == 1
            assert not link.transport.get_write_buffer_size()

    uvloop.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("how", ["closed", "aborted", "gone"])
def test_to_nobody_nothing_is_sent(how: str) -> None:
    async def main() -> None:
        async with Joined() as link:
            if how == "closed":
                link.outbox.close()
            elif how == "aborted":
                link.transport.abort()
            else:
                link.theirs.close()
            link.outbox.send(b"one")
            await asyncio.sleep(0)
            link.outbox.put(b"two")
            await asyncio.sleep(0)
            assert not link.failures  # reading tells

    run(main())
