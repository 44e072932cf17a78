"""Clients that leave: the app hears of it once, its buffer is left alone, and nobody else notices."""

from __future__ import annotations

import contextlib
import random

import pytest

from carpool.frontend.http.exchange import (
    BodyPlan,
    Exchange,
    HttpHead,
    Receive,
)
from frontend.http.harness import PATIENCE, PathApp, Serving, post, serving
from waiting import until

HOLD = b"GET /hold HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("how", ["close", "reset"])
def test_leaving_while_an_answer_is_pending(how: str) -> None:
    app = PathApp()
    with serving(app) as server:
        client = server.connect().send(HOLD)
        exchange = app.held.get(timeout=PATIENCE)
        client.reset() if how == "reset" else client.socket.close()
        assert app.left.get(timeout=PATIENCE) == "hold"
        assert not exchange.pending
        assert not server.call(exchange.respond, 200, b"", b"too late")
        server.until_connections(0)
        assert app.left.empty()


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_place_is_not_touched_after_its_client_left(how: str) -> None:
    app = PathApp()
    with serving(app) as server:
        client = server.connect()
        client.send(b"POST /place_hold HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"a" * 50)
        app.held.get(timeout=PATIENCE)
        client.reset() if how == "reset" else client.socket.close()
        assert app.left.get(timeout=PATIENCE) == "place"
        server.until_connections(0)
        app.slot.extend(b"a buffer with a view on it could not grow")


def test_an_answered_exchange_does_not_hear_of_it() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(HOLD)
        exchange = app.held.get(timeout=PATIENCE)
        assert server.call(exchange.respond, 200)
        assert client.response().status == 200
        client.socket.close()
        server.until_connections(0)
        assert app.left.empty()


def test_only_the_first_answer_counts() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(WAIT)
        exchange = app.held.get(timeout=PATIENCE)
        assert server.call(exchange.respond, 200, b"", b"one")
        assert not server.call(exchange.respond, 500, b"", b"two")
        assert client.response().body == b"one"
        assert client.get().body == b"hello"


def test_a_half_closed_client_is_answered_where_the_app_does_not_mind(server: Serving) -> None:
    with server.connect() as client:
        assert client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").finish_sending().response().status == 200
        assert client.is_closed()
    with server.connect() as client:
        client.send(WAIT).finish_sending()
        exchange = server.app.held.get(timeout=PATIENCE)
        server.call(exchange.respond, 200, b"", b"still here")
        assert client.response().body == b"still here"
        assert client.is_closed()


def test_a_half_closed_client_has_left_where_the_app_does_mind() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(HOLD).finish_sending()
        assert app.left.get(timeout=PATIENCE) == "hold"
        assert client.is_closed()


def test_a_half_closed_client_gets_all_its_pipelined_answers(server: Serving) -> None:
    with server.connect() as client:
        client.send(WAIT + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 40 + b"POST /echo").finish_sending()
        exchange = server.app.held.get(timeout=PATIENCE)
        server.call(exchange.respond, 200, b"", b"first")
        assert client.response().body == b"first"
        assert [client.response().status for _ in range(40)] == [200] * 40
        assert client.response().status == 400
        assert client.is_closed()


def test_a_half_closed_client_whose_pipelined_body_is_cut_off(server: Serving) -> None:
    with server.connect() as client:
        client.send(WAIT + post("/echo", b"abcdef")[:-3]).finish_sending()
        exchange = server.app.held.get(timeout=PATIENCE)
        server.call(exchange.respond, 200)
        assert [client.response().status, client.response().status] == [200, 400]
        assert client.is_closed()


def test_an_app_that_fails_when_its_client_leaves(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(PathApp):
        def root(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
            def fail() -> None:
                raise KeyError("a bug in the app")

            exchange.on_disconnect = fail
            self.held.put(exchange)
            return None

    app = Fragile()
    with serving(app) as server:
        client = server.connect().send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        app.held.get(timeout=PATIENCE)
        client.reset()
        server.until_connections(0)
        with server.connect() as other:
            assert other.get("/nothing").status == 204
    assert "the app failed when its client left" in caplog.text


def test_a_half_closed_client_waits_for_several_answers(server: Serving) -> None:
    with server.connect() as client:
        client.send(WAIT * 2).finish_sending()
        for body in (b"one", b"two"):
            server.call(server.app.held.get(timeout=PATIENCE).respond, 200, b"", body)
            assert client.response().body == body
        assert client.is_closed()


def test_nonsense_behind_a_pending_request(server: Serving) -> None:
    with server.connect() as client:
        client.send(WAIT + b"nonsense\r\n")
        server.call(server.app.held.get(timeout=PATIENCE).respond, 200)
        assert [client.response().status, client.response().status] == [200, 400]
        assert client.is_closed()


@pytest.mark.parametrize("noticed", [True, False])
def test_an_answer_in_the_moment_the_client_leaves(noticed: bool) -> None:
    app = PathApp()
    with serving(app) as server:
        client = server.connect().send(WAIT)
        exchange = app.held.get(timeout=PATIENCE)
        (connection,) = server.call(lambda: list(server.server._shared.connections))

        def leave_and_answer() -> bool:
            if noticed:
                connection._transport.abort()
            client.reset()
            return exchange.respond(200, b"", memoryview(app.large))

        assert server.call(leave_and_answer)
        server.until_connections(0)
        server.call(connection.send, b"even this is harmless")


class SlotApp(PathApp):
    """A pool of slots: every one that is taken comes back exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.free = [bytearray(200_000) for _ in range(64)]
        self.taken = 0

    def infer(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        slot = self.free.pop()
        self.taken += 1

        def give_back() -> None:
            self.free.append(slot)

        def done(_at: float) -> None:
            exchange.respond(200, b"", memoryview(slot)[:100_000])
            give_back()

        exchange.on_disconnect = give_back
        return Receive(memoryview(slot), done)


def test_leaving_at_any_moment_leaks_no_slot() -> None:
    app = SlotApp()
    chance = random.Random(7)
    request = post("/infer", b"x" * 150_000)
    with serving(app) as server:
        for number in range(150):
            client = server.connect()
            client.send(request * 2 if number % 3 == 0 else request[: chance.randrange(1, len(request))])
            if number % 2:
                client.socket.settimeout(0.001)
                with contextlib.suppress(TimeoutError):
                    client.socket.recv(chance.randrange(1, 200_000))
            client.reset() if chance.random() < 0.5 else client.socket.close()
        server.until_connections(0)
        until(lambda: len(app.free) == 64)
        assert app.taken >= 50
        assert len({id(slot) for slot in app.free}) == 64
        with server.connect() as client:
            assert client.post("/infer", b"x").status == 200


def test_answers_to_many_when_some_have_left() -> None:
    """One callback answers a whole batch: a client that has gone must not cost the others their answer."""
    app = PathApp()
    with serving(app) as server:
        clients = [server.connect().send(WAIT) for _ in range(20)]
        exchanges = [app.held.get(timeout=PATIENCE) for _ in clients]
        for client in clients[::2]:
            client.reset()

        def answer_all() -> int:
            return sum(exchange.respond(200, b"", b"z" * 100_000) for exchange in exchanges)

        assert server.call(answer_all) >= 10
        for client in clients[1::2]:
            assert len(client.response().body) == 100_000
            client.socket.close()
        server.until_connections(0)
