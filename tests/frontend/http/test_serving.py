"""Listening, stopping, and what an answer may be made of."""

from __future__ import annotations

import array
import asyncio
import itertools
import socket
import threading
from typing import ClassVar

import pytest

from carpool.config.server import LOCALHOST
from carpool.errors import ConfigError
from carpool.frontend.http.exchange import (
    Exchange,
    HttpHead,
)
from carpool.frontend.http.http_server import HttpServer, Listeners, check_free, listen
from carpool.frontend.http.limits import Limits
from frontend.http.harness import PATIENCE, PathApp, Serving, serving
from waiting import until_in_loop as until

HOLD = b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"


def test_two_servers_can_share_a_port() -> None:
    first = listen("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    second = listen("127.0.0.1", port)
    assert second[0].getsockname() == first[0].getsockname()
    for bound in first + second:
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
        bound.close()


class Noted:
    """A connection that is only counted."""

    made: ClassVar[list[Noted]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.append(self)

    def connection_lost(self, exc: Exception | None, /) -> None: ...

    def get_buffer(self, sizehint: int, /) -> bytearray:
        return bytearray(1)

    def buffer_updated(self, nbytes: int) -> None: ...

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


def test_a_server_accepts_for_another_one_until_that_moves_again() -> None:
    async def story() -> None:
        (own,), (others,) = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
        listeners, loop = Listeners(Noted, Limits()), asyncio.get_running_loop()
        await listeners.open([own])
        clients = []
        for helps, made in ((False, 0), (True, 1), (True, 2), (False, 2)):
            await listeners.help(7, [others.dup()] if helps else [])
            clients.append(socket.create_connection(others.getsockname()))
            if helps:
                await until(lambda count=made: len(Noted.made) == count)  # type: ignore[misc]
            else:
                clients.append((await loop.sock_accept(others))[0])
                assert len(Noted.made) == made
        listeners.close()
        for client in (*clients, others):
            client.close()

    asyncio.run(story())


def test_a_port_in_use_is_noticed_before_it_is_shared() -> None:
    (bound,) = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}"):
        check_free("127.0.0.1", port)
    bound.close()
    check_free("127.0.0.1", port)


def test_an_address_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 port 80"):
        listen("192.0.2.1", 80)
    with pytest.raises(ConfigError, match="no-such-host"):
        listen("no-such-host.invalid", 80)


def test_all_addresses_of_a_name_share_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        last = "127.0.0.2" if host == "two" else "192.0.2.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.1", last)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    first, second = listen("two", 0)
    assert first.getsockname()[1] == second.getsockname()[1] != 0
    first.close()
    second.close()
    with pytest.raises(ConfigError, match="half"):
        listen("half", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", "127.0.0.1"])
def test_ipv4_hosts(host: str) -> None:
    with serving(host=host) as server:
        server.host = "127.0.0.1"
        with server.connect() as client:
            assert client.get().status == 200


def test_localhost_is_both_of_this_machines_addresses() -> None:
    listening = listen(LOCALHOST, 0)
    addresses = {bound.getsockname()[0] for bound in listening}
    ports = {bound.getsockname()[1] for bound in listening}
    for bound in listening:
        bound.close()
    assert "127.0.0.1" in addresses
    assert addresses <= {"127.0.0.1", "::1"}
    assert len(ports) == 1


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_hosts() -> None:
    try:
        listening = listen("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    for bound in listening:
        bound.close()
    for host, peers in (("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])):
        with serving(host=host) as server:
            for peer in peers:
                server.host = peer
                with server.connect() as client:
                    assert client.get().status == 200


def test_small_answers_are_not_held_back(server: Serving) -> None:
    with server.connect() as client:
        client.get()
        (connection,) = server.call(lambda: list(server.server._shared.connections))
        inner = connection._transport.get_extra_info("socket")
        assert server.call(inner.getsockopt, socket.IPPROTO_TCP, socket.TCP_NODELAY)


# ── stopping ──


def test_stopping_finishes_what_is_in_flight_and_closes_the_rest() -> None:
    app = PathApp()
    with serving(app) as server:
        idle, busy, sending = server.connect(), server.connect().send(HOLD), server.connect()
        assert idle.get().status == 200
        sending.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        exchange = app.held.get(timeout=PATIENCE)
        server.until_connections(3)
        stopping = threading.Thread(target=server.stop, args=(PATIENCE,))
        stopping.start()
        assert idle.is_closed()
        with pytest.raises(ConnectionError), server.connect() as late:
            late.get()
        assert server.call(exchange.respond, 200, b"", b"done")
        answers = [busy.response(), sending.send(b"cd").response()]
        assert [answer.body for answer in answers] == [b"done", b"abcd"]
        assert [answer.fields["connection"] for answer in answers] == ["close", "close"]
        stopping.join(PATIENCE)
        assert not stopping.is_alive()
        for client in (idle, busy, sending):
            client.socket.close()


def test_a_request_that_had_begun_is_still_served() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        assert client.get().status == 200
        client.send(b"GET / HTTP/1.1\r\nHo")
        server.call(lambda: None)
        connection = next(iter(server.server._shared.connections))
        while not connection._partial:
            assert client.socket.fileno() >= 0
        server.call(server.server.stop_accepting)
        answer = client.send(b"st: x\r\n\r\n").response()
        assert (answer.status, answer.fields["connection"]) == (200, "close")
        assert client.is_closed()


def test_stopping_is_bounded() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(HOLD)
        app.held.get(timeout=PATIENCE)
        assert server.stop(0.05) == 1
        assert client.is_closed()
        assert app.left.get(timeout=PATIENCE) == "hold"


def test_stopping_an_unused_server() -> None:
    with serving() as server:
        assert server.stop() == 0


def test_it_runs_on_the_standard_loop_too() -> None:
    async def story() -> list[bytes]:
        server = HttpServer(PathApp())
        sockets = listen("127.0.0.1", 0)
        port = sockets[0].getsockname()[1]
        await server.start(sockets)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /place HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + b"x" * 70_000)
        first = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(70_000)
        writer.write(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        rest = await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        assert await server.stop(1.0) == 0
        return [first, rest[-3:]]

    first, last = asyncio.run(story())
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert last == b"aa>"


# ── what an answer may be made of ──


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"bytes",
        bytearray(b"a bytearray"),
        memoryview(b"a view"),
        [b"a", bytearray(b"list"), memoryview(b"of"), b"", b"buffers"],
        (b"many",) * 2000,
        [b"x" * 40_000, b"y" * 40_000],
        b"z" * 300_000,
        memoryview(array.array("f", [0.5] * 30_000)),
    ],
    ids=itertools.count(),
)
def test_bodies_of_answers(body: bytes) -> None:
    class Fixed(PathApp):
        def begin(self, head: HttpHead, exchange: Exchange) -> None:
            exchange.respond(200, b"x-a: 1\r\n", body)

    expected = b"".join(memoryview(p) for p in ([body] if not isinstance(body, list | tuple) else body))
    with serving(Fixed()) as server, server.connect() as client:
        answer = client.get()
        assert (answer.body, answer.fields["x-a"]) == (expected, "1")
        client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.response(head_only=True).fields["content-length"] == str(len(expected))
        assert client.get().body == expected


def test_a_status_without_a_name() -> None:
    class Odd(PathApp):
        def begin(self, head: HttpHead, exchange: Exchange) -> None:
            exchange.respond(299)

    with serving(Odd()) as server, server.connect() as client:
        assert client.get().status == 299
