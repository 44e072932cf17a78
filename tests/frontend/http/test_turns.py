"""What one turn of the loop does for long bodies is bounded, however many clients send them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from carpool.frontend.clients.loop_turns import Turns
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Receive,
)
from carpool.frontend.http.fairness import Unread
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.protocol import Connection
from carpool.frontend.http.shared import BODY_READ, Shared
from frontend.http.harness import PathApp, ignore, post

MIB = 1 << 20
_ALL = 2 * MIB  # far less than a read from each of the clients below


def _still() -> float:
    """How much is done in a turn depends on the work alone here, not on what else the machine does."""
    return 1.0


class App(PathApp):
    """Takes bodies, and answers with nothing."""

    def gather(self, _head: HttpHead, exchange: Exchange) -> BodyPlan:
        return Collect(64 * MIB, lambda _body, _at: ignore(exchange.respond(200)))

    def receive(self, _head: HttpHead, exchange: Exchange) -> BodyPlan:
        return Receive(memoryview(self.large), lambda _at: ignore(exchange.respond(200)))


class Loop:
    """Calls back once in each turn."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, act: Callable[[], None]) -> None:
        self.soon.append(act)

    def call_later(self, _seconds: float, act: Callable[[], None]) -> None:
        self.soon.append(act)

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for act in soon:
            act()


class Transport:
    """A client that always has more to say."""

    def __init__(self, said: bytes, ours: socket.socket) -> None:
        self.socket = ours
        self.said = said
        self.at = 0
        self.reads = True
        self.closing = False

    def get_extra_info(self, name: str) -> Any:
        return self.socket if name == "socket" else None

    def set_write_buffer_limits(self, high: int) -> None: ...

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closing

    def write(self, _data: bytes) -> None: ...

    def writelines(self, _data: list[bytes]) -> None: ...

    def write_eof(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closing = True
        self.reads = False

    abort = close


class Front:
    """Connections on a loop whose turns are taken by hand, as libuv takes them."""

    def __init__(self, count: int, said: bytes) -> None:
        self.loop = Loop()
        self.app = App()
        self.shared = Shared(self.app, Limits(), cast(Any, self.loop), Unread(), clock=_still)
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.clients = [self.join(said) for _ in range(count)]

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        for connection, _transport in self.clients:
            connection.connection_lost(None)
        self._ours.close()
        self._theirs.close()

    def join(self, said: bytes) -> tuple[Connection, Transport]:
        connection, transport = Connection(self.shared), Transport(said, self._ours)
        connection.connection_made(cast(Any, transport))
        return connection, transport

    def turn(self) -> int:
        """Returns how much was read in it."""
        before = sum(transport.at for _, transport in self.clients)
        self.loop.turn()
        for connection, transport in self.clients:
            for _ in range(32):
                if not transport.reads or transport.at == len(transport.said):
                    break
                buffer = connection.get_buffer(-1)
                piece = transport.said[transport.at : transport.at + len(buffer)]
                buffer[: len(piece)] = piece
                transport.at += len(piece)
                connection.buffer_updated(len(piece))
        return sum(transport.at for _, transport in self.clients) - before


def _body(path: str, size: int) -> bytes:
    return post(path, bytes(size))


@pytest.mark.parametrize("path", ["/gather", "/receive"])
def test_a_turn_reads_no_more_from_many_long_bodies_than_from_some(path: str) -> None:
    with Front(40, _body(path, 4 * MIB)) as front:
        front.turn()  # each brings its head, and what comes with it
        assert max(front.turn() for _ in range(100)) <= _ALL
        assert front.turn() > 0


def test_a_body_that_was_begun_is_read_before_others_are() -> None:
    with Front(40, _body("/gather", 2 * MIB)) as front:
        for _ in range(30):
            front.turn()
        half_read = [t for _, t in front.clients if 4 * BODY_READ < t.at < len(t.said)]
        assert len(half_read) <= 8
        for _ in range(400):
            front.turn()
        assert all(t.at == len(t.said) for _, t in front.clients)


def test_a_whole_request_does_not_wait_for_the_turn_of_long_bodies() -> None:
    with Front(40, _body("/gather", 4 * MIB)) as front:
        for _ in range(3):
            front.turn()
        served = len(front.app.heads)
        front.clients.append(front.join(_body("/gather", 10)))
        front.turn()
        assert len(front.app.heads) == served + 1
        assert front.shared.turns.waiting
        assert front.clients[-1][1].reads


def test_chunks_of_many_clients_share_a_turn() -> None:
    head = b"POST /gather HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with Front(40, head + b"1\r\nA\r\n" * 5_000) as front:
        front.turn()
        for _ in range(20):
            before = [connection._intake.received for connection, _ in front.clients]
            front.turn()
            moved = sum(c._intake.received - b for (c, _), b in zip(front.clients, before, strict=True))
            assert moved <= 64 * 1024
        for _ in range(4_000):
            front.turn()
        assert all(t.at == len(t.said) for _, t in front.clients)


def test_who_rests_goes_on_one_at_a_time() -> None:
    loop = Loop()
    turns = Turns(cast(Any, loop), _still)
    went: list[int] = []
    for number in range(3):
        turns.rest(partial(went.append, number), before=1)
    for _ in range(10):
        before = len(went)
        loop.turn()
        assert len(went) <= before + 1
    assert went == [0, 1, 2]


def test_who_was_less_dear_before_goes_on_first() -> None:
    loop = Loop()
    turns = Turns(cast(Any, loop), _still)
    went: list[int] = []
    for before in (7, 3, 1):
        turns.rest(partial(went.append, before), before)
    for _ in range(10):
        loop.turn()
    assert went == [1, 3, 7]


def test_what_connections_and_chunks_take_is_charged_to_their_address() -> None:
    head = b"POST /gather HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    charged: list[float] = []
    with Front(0, b"") as front:
        front.shared.charge = lambda _address, seconds: charged.append(seconds)
        front.clients.append(front.join(head + b"1\r\nA\r\n" * 5_000))
        assert len(charged) == 1
        for _ in range(40):
            front.turn()
    assert sum(charged) > 0.005


def test_who_waits_longest_goes_on_first() -> None:
    loop = Loop()
    turns = Turns(cast(Any, loop), _still)
    went: list[int] = []
    for number in range(3):
        turns.wait(partial(went.append, number))
    turns.wait(partial(went.append, 9), first=True)
    while turns.waiting:
        loop.turn()
    assert went == [9, 0, 1, 2]
    assert not loop.soon


def _exchange(connection: Connection, said: bytes, most: int = MIB) -> list[int]:
    """Reads of up to so many bytes, until all was read; how long each was."""
    reads, at = [], 0
    while at < len(said):
        buffer = connection.get_buffer(-1)
        piece = said[at : at + min(most, len(buffer))]
        buffer[: len(piece)] = piece
        at += len(piece)
        reads.append(len(piece))
        connection.buffer_updated(len(piece))
    return reads


def test_a_head_that_is_repeated_is_read_alone_and_its_body_in_place() -> None:
    size = 100_000
    with Front(1, b"") as front:
        connection, transport = front.clients[0]
        for number in range(5):
            said = _body("/receive", size)[:-1] + bytes([number])
            reads = _exchange(connection, said)
            assert front.app.large[size - 1] == number
            assert len(front.app.heads) == number + 1
            if number >= 2:
                assert reads == [len(said) - size, size]
            assert transport.reads  # it has not used up its turn


@pytest.mark.parametrize(
    "other", [("/receive", 100_001), ("/receive", 5), ("/gather", 40_000), ("/gather", 0)]
)
@pytest.mark.parametrize("most", [MIB, 7, 113])
def test_another_head_than_the_one_that_was_expected(other: tuple[str, int], most: int) -> None:
    path, size = other
    with Front(1, b"") as front:
        connection, _ = front.clients[0]
        for _ in range(3):
            _exchange(connection, _body("/receive", 100_000))
        for _ in range(2):
            _exchange(connection, _body(path, size), most)
            _exchange(connection, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + _body("/receive", 100_000), most)
        assert len(front.app.heads) == 9
        assert not connection._ahead


def test_a_head_that_was_expected_is_still_refused_and_its_body_read_past() -> None:
    with Front(1, b"") as front:
        connection, _ = front.clients[0]
        for number in range(4):
            _exchange(connection, _body("/refuse", 30_000))
            assert len(front.app.heads) == number + 1
        assert connection.get_buffer(-1)


def test_when_a_turn_is_used_up_the_body_of_an_expected_head_is_left_for_another() -> None:
    said = _body("/receive", 100_000)
    head, body = said[:-100_000], said[-100_000:]
    with Front(1, b"") as front:
        connection, transport = front.clients[0]
        for _ in range(3):
            _exchange(connection, said)
        front.loop.turn()
        front.shared.turns.spend(front.shared.turns.left)
        assert _exchange(connection, head) == [len(head)]
        assert not transport.reads
        front.loop.turn()
        assert transport.reads
        assert _exchange(connection, body) == [len(body)]
        assert len(front.app.heads) == 4
