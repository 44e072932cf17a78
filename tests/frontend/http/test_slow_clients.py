"""Clients that are slow, silent, many or greedy: each meets its bound while the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time

import pytest

from carpool.frontend.clients.accounts import PROGRESS_BYTES, Accounts
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_server import HttpServer, listen
from carpool.frontend.http.limits import Limits
from frontend.http.harness import PATIENCE, QUICK, SPOKEN, Client, PathApp, Serving, post, serving
from waiting import until


def test_a_head_that_never_ends_is_a_408() -> None:
    with serving(**QUICK) as server, server.connect() as slow:
        slow.send(b"GET / HTTP/1.1\r\n")
        closed = threading.Event()
        feeder = threading.Thread(target=_drip, args=(slow.socket, closed))
        feeder.start()
        until(server.serves)
        answer = slow.response()
        assert (answer.status, answer.fields["connection"]) == (408, "close")
        closed.set()
        feeder.join(PATIENCE)


def _drip(target: socket.socket, stop: threading.Event) -> None:
    """A slowloris: one more byte of a field, again and again."""
    target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while not stop.wait(0.02):
            target.send(b"a")
    except OSError:
        pass


def _repeat(client: Client, data: bytes, pause_s: float = 0.0) -> None:
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        client.send(data)
        time.sleep(pause_s)


def test_a_connection_that_says_nothing_is_closed() -> None:
    with serving(**QUICK) as server, server.connect() as client:
        assert client.is_closed()


def test_an_idle_connection_is_closed_without_an_answer() -> None:
    with serving(**SPOKEN) as server, server.connect() as client:
        assert client.get().status == 200
        assert client.is_closed()


def test_empty_lines_do_not_keep_a_connection_open() -> None:
    with serving(**QUICK) as server, server.connect() as client, pytest.raises(ConnectionError):
        _repeat(client, b"\r\n", pause_s=0.005)


@pytest.mark.parametrize("path", ["/hold", "/place_hold"])
def test_a_body_that_stands_still_is_a_408(path: str) -> None:
    app = PathApp()
    with serving(app, **SPOKEN) as server, server.connect() as client:
        client.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n" % path.encode() + b"x" * 9000
        )
        assert client.response().status == 408
        assert client.is_closed()
        assert app.left.get(timeout=PATIENCE) in ("hold", "place")


def test_a_body_may_take_long_if_it_moves() -> None:
    """The server looks when the test says so, and as much later as it says."""
    limits = {"sweep_s": PATIENCE, "min_body_rate": 10, "body_timeout_s": 10.0}
    body = b"x" * 1000
    with serving(**limits) as server, server.connect() as client:
        server.until_connections(1)
        (connection,) = server.server._shared.connections
        intake = connection._intake
        client.send(post("/echo", body)[: -len(body)])
        for start in range(0, 800, 200):
            client.send(body[start : start + 200])
            until(lambda: server.call(lambda: intake.received) == start + 200)  # noqa: B023
            server.call(lambda: connection.check_time(connection._since + 11.0))
        client.send(body[800:])
        assert client.response().body == body


def test_waiting_for_the_app_has_no_timeout_of_its_own() -> None:
    app = PathApp()
    with serving(app, **QUICK) as server, contextlib.ExitStack() as clients:
        client, exchange = _held(server, app, clients)
        assert clients.enter_context(server.connect()).is_closed()  # every timeout has passed by now
        assert server.call(exchange.respond, 200)
        assert client.response().status == 200


def _held(server: Serving, app: PathApp, clients: contextlib.ExitStack) -> tuple[Client, Exchange]:
    """A request that waits for the app. A client that is slow to say it is closed, and asks again."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        client = clients.enter_context(server.connect())
        with contextlib.suppress(OSError, queue.Empty):
            client.send(b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n")
            return client, app.held.get(timeout=2.0)
    raise AssertionError("nothing was held")


def test_a_refused_body_that_never_comes_ends_the_connection() -> None:
    with serving(**SPOKEN) as server, server.connect() as client:
        client.send(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
        assert client.response().status == 429
        assert client.is_closed()


def test_lingering_ends() -> None:
    with serving(**SPOKEN) as server, server.connect() as client:
        client.send(b"nonsense\r\n")
        assert client.response().status == 400
        server.until_connections(0)


def test_lingering_does_not_read_for_ever() -> None:
    with serving(drain_bytes=100_000, linger_timeout_s=60) as server, server.connect() as client:
        client.send(b"nonsense\r\n")
        assert client.response().status == 400
        with pytest.raises(ConnectionError):
            _repeat(client, b"x" * 10_000)


# ── slow readers ──


def test_a_client_that_does_not_read_is_cut_off_and_its_buffer_free_at_once() -> None:
    app = PathApp()
    limits = SPOKEN | {"write_timeout_s": 0.3}
    with (
        serving(app, **limits) as server,
        server.connect(receive_buffer=4096) as slow,
        server.connect() as other,
    ):
        slow.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        assert other.get().status == 200
        server.until_connections(0)
        with pytest.raises((AssertionError, ConnectionResetError)):
            slow.response()


def test_a_client_may_read_slowly_if_it_reads() -> None:
    """The server looks when the test says so, and as much later as it says."""
    window_s, looks, received = 10.0, 0, 0
    with (
        serving(PathApp(), sweep_s=PATIENCE, write_timeout_s=window_s) as server,
        server.connect(receive_buffer=1 << 17) as slow,
    ):
        slow.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        accounts = server.server._shared.accounts
        until(lambda: accounts.unread)
        (connection,) = server.server._shared.connections
        stake = connection.stake
        assert stake is not None
        while stake.unread:
            received += len(slow.socket.recv(1 << 17))
            if server.call(lambda: connection.taken - stake.taken) >= PROGRESS_BYTES:
                server.call(lambda: accounts.sweep(stake.since + 0.9 * window_s))
                looks += 1
        while received < 8 << 20:
            received += len(slow.socket.recv(1 << 17))
        assert looks > 1, "for longer than a window in all"


def test_a_slow_reader_gets_the_bytes_that_were_answered() -> None:
    """The app overwrites its buffer right after answering, long before the client reads."""
    app = PathApp()
    with serving(app) as server, server.connect(receive_buffer=1 << 17) as slow:
        slow.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        for _ in range(2):
            body = slow.response().body
            assert body == b"<" + b"a" * (8 << 20) + b">"
        assert slow.get().status == 200


def test_the_next_request_waits_until_the_answer_is_read() -> None:
    app = PathApp()
    with serving(app) as server, server.connect(receive_buffer=1 << 17) as slow, server.connect() as other:
        slow.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
        assert other.get().status == 200
        assert len(app.heads) == 2  # the first big one, and the other client's
        assert [len(slow.response().body) for _ in range(3)] == [(8 << 20) + 2] * 3


def test_unread_answers_share_one_budget() -> None:
    app = PathApp()
    with serving(app, max_held_bytes=16 << 20) as server:
        clients = [server.connect(receive_buffer=4096) for _ in range(4)]
        for client in clients:
            client.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        # One or two stay: the kernel may take up to half of an answer into a socket's own buffer.
        until(lambda: server.server.connections <= 2)
        for client in clients:
            client.socket.close()


def test_an_answer_that_is_not_read_leaves_other_clients_theirs() -> None:
    app = PathApp()
    with serving(app, max_held_bytes=48 << 20) as server, contextlib.ExitStack() as held:
        for _ in range(4):
            client = held.enter_context(server.connect(receive_buffer=4096, source="127.0.0.2"))
            client.send(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        accounts = server.server._shared.accounts
        until(lambda: accounts.unread > 8 << 20)
        honest = held.enter_context(server.connect())
        assert len(honest.get("/big").body) == (8 << 20) + 2
        assert accounts.bytes_of("127.0.0.2") <= 24 << 20


def test_servers_share_an_account_that_has_no_client_yet() -> None:
    async def clients_known() -> int:
        limits = Limits()
        accounts = Accounts(limits.max_connections, most_bytes=limits.max_held_bytes)
        server = HttpServer(PathApp(), limits, accounts=accounts)
        sockets = listen("127.0.0.1", 0)
        await server.start(sockets)
        reader, writer = await asyncio.open_connection(*sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"hello")
        known = len(accounts)
        writer.close()
        await server.stop(0.0)
        return known

    assert asyncio.run(clients_known()) == 1


# ── many ──


def test_idle_connections_of_one_client_yield_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_connections=4) as server, contextlib.ExitStack() as held:
        idle = [held.enter_context(server.connect(source="127.0.0.2")) for _ in range(4)]
        assert [client.get().status for client in idle[:3]] == [200] * 3
        monkeypatch.setattr("carpool.frontend.clients.accounts.QUIET_S", (0.0, 0.0))
        for _ in range(2):
            with server.connect() as honest:
                assert honest.get().status == 200


def test_one_connection_too_many_gets_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.frontend.clients.accounts.QUIET_S", (PATIENCE, PATIENCE))  # none yields
    with serving(max_connections=3) as server:
        clients = [server.connect() for _ in range(3)]
        assert [client.get().status for client in clients] == [200] * 3
        with server.connect() as extra:
            answer = extra.get()
            assert (answer.status, answer.fields["connection"]) == (503, "close")
            assert extra.is_closed()
        clients.pop().socket.close()
        server.until_connections(2)
        with server.connect() as again:
            assert again.get().status == 200
        for client in clients:
            client.socket.close()


def test_a_flood_of_connections_is_bounded() -> None:
    with serving(max_connections=2, max_lingering=5) as server, server.connect() as client:
        assert client.get().status == 200
        with contextlib.ExitStack() as flood:
            for _ in range(60):
                flood.enter_context(server.connect())
            assert client.get().status == 200
            until(lambda: server.server.connections <= 2 + 5)
        server.until_connections(1)
        assert client.get().status == 200


def test_a_client_with_endless_pipelined_requests_takes_turns(server: Serving) -> None:
    stop = threading.Event()

    def flood() -> None:
        with server.connect() as greedy:
            greedy.socket.settimeout(0.05)
            requests = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 500
            while not stop.is_set():
                try:
                    greedy.socket.send(requests)
                    greedy.socket.recv(1 << 20)
                except TimeoutError:
                    pass

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        with server.connect() as client:
            assert [client.get().status for _ in range(50)] == [200] * 50
    finally:
        stop.set()
        thread.join(PATIENCE)


def test_an_idle_server_costs_next_to_nothing() -> None:
    with serving() as server, contextlib.ExitStack() as clients:
        for _ in range(200):
            clients.enter_context(server.connect())
        server.until_connections(200)
        assert server.thread.ident is not None
        clock = time.pthread_getcpuclockid(server.thread.ident)

        def is_quiet() -> bool:
            before = time.clock_gettime(clock)
            time.sleep(1.0)  # two sweeps
            return time.clock_gettime(clock) - before < 0.01

        until(is_quiet)
