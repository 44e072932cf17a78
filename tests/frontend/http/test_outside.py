"""What clients wait beyond the engine's account: the front end measures it, the scheduler reckons with it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from carpool.engine.run.batch import Work
from carpool.errors import CarpoolError, Refused
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
)
from carpool.frontend.http.fairness import Unread
from engine import repositories
from frontend.http.front_end import FrontEnd, front_end, image_body, infer, infer_body
from frontend.http.harness import PATIENCE, post, serving
from frontend.picture_models import models as picture_models
from frontend.picture_models import picture
from frontend.whole_server import whole_server
from waiting import until

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
STALL_S = 0.1
TICK_S = 0.011  # the kernel counts in ticks, of 10 ms at most


def waited(connection: socket.socket) -> float:
    """Seconds since data came on it, as the kernel says."""
    unread = Unread()
    unread.look(connection, 0.0)
    return unread.seconds


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end() as found:
        yield found


# ── the wait to be read ──


def test_the_kernel_knows_since_when_data_has_been_there() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        server, _ = listening.accept()
        with server:
            before = time.monotonic()  # the kernel cannot have had it earlier
            client.sendall(b"x")
            until(lambda: waited(server) >= STALL_S)
            assert time.monotonic() - before >= STALL_S - TICK_S
            server.recv(1)
            assert waited(server) >= STALL_S  # read or not: when it came


def test_where_nothing_can_be_told_there_was_no_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        assert waited(ours) == 0.0


def test_the_kernel_is_not_asked_for_every_request() -> None:
    unread = Unread()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        unread.look(ours, 5.0)
    assert 5.0 < unread.look_at < 5.1


def test_what_was_seen_is_forgotten_while_nobody_can_be_asked() -> None:
    unread = Unread()
    unread.seconds, unread.look_at = 0.1, 5.0
    unread.look(None, 5.1)
    assert unread.seconds == 0.1
    unread.look(None, 5.3)
    assert unread.seconds == 0.0


class Noting:
    """Remembers how long each request was said to be unread."""

    def __init__(self) -> None:
        self.unread: list[float] = []

    def begin(self, _head: HttpHead, exchange: Exchange) -> BodyPlan:
        def done(_body: bytes | bytearray, _at: float) -> None:
            self.unread.append(exchange.unread)
            exchange.respond(200)

        return Collect(1024, done)


def test_a_request_that_came_while_the_loop_was_busy_has_waited() -> None:
    app = Noting()
    with serving(app) as server, server.connect() as client:
        client.send(post("/", b"first"))
        assert client.response().status == 200
        go, stalled = threading.Event(), threading.Event()

        def stall() -> None:
            stalled.set()
            go.wait(PATIENCE)

        server.loop.call_soon_threadsafe(stall)
        assert stalled.wait(PATIENCE)
        client.send(post("/", b"second"))
        sent = time.monotonic()
        until(lambda: time.monotonic() - sent > STALL_S)
        go.set()
        assert client.response().status == 200
    assert len(app.unread) == 2
    assert app.unread[1] >= STALL_S - TICK_S


@pytest.mark.parametrize("size", [6, 400_000])
def test_a_request_behind_another_of_its_connection_says_nothing(size: int) -> None:
    """The client sent both at once: that the second waits for the first is not the server's doing."""
    held: list[Exchange] = []
    unread = Unread()

    class Slow:
        def begin(self, _head: HttpHead, exchange: Exchange) -> BodyPlan:
            return Collect(1 << 20, lambda _body, _at: held.append(exchange))

    with serving(Slow(), unread=unread, max_held_bytes=1 << 22) as server, server.connect() as client:
        client.send(post("/", b"first") + post("/", bytes(size)))
        until(lambda: len(held) == 1)
        looked = unread.look_at
        until(lambda: time.monotonic() > looked)  # from then on anybody may be asked
        server.call(held[0].respond, 200)
        assert client.response().status == 200
        until(lambda: len(held) == 2)
        assert unread.look_at == looked
        server.call(held[1].respond, 200)
        assert client.response().status == 200


def test_while_requests_wait_the_kernel_is_asked_at_their_heads_as_well() -> None:
    """Else nobody would notice that it is over: who is turned away for it has no body that is read."""
    unread = Unread()
    unread.seconds = 1.0
    with serving(Noting(), unread=unread) as server, server.connect() as client:
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n")
        until(lambda: unread.seconds < 1.0)
        client.send(b"first")
        assert client.response().status == 200


# ── the way back ──


@pytest.mark.parametrize("error", [None, Refused("too much", reason="overload")])
def test_every_answer_of_the_engine_teaches(front: FrontEnd, error: CarpoolError | None) -> None:
    front.door.held = True
    body, field = image_body()
    with front.connect() as client:
        client.send(post("/v2/models/image/infer", body, field))
        call = front.wait_for_call()
        assert front.door.outside.seconds == 0.0
        front.run(lambda: call.finish(error))
        client.response()
        until(lambda: front.door.outside.seconds > 0.0)


def test_what_the_front_end_says_itself_teaches_nothing(front: FrontEnd) -> None:
    front.door.refusal = Refused("too much", reason="overload")
    with front.connect() as client:
        assert infer(client, "image", image_body()).status == 429
    assert front.door.outside.seconds == 0.0


def test_pictures_teach_and_drawings_do_not() -> None:
    with front_end(*picture_models()) as front, front.connect() as client:
        drawn = client.post("/detect?overlay=1", picture(), b"Accept: image/png\r\n")
        assert drawn.status == 200
        assert front.run(lambda: front.door.outside.seconds) == 0.0
        assert client.post("/detect", picture()).status == 200
        until(lambda: front.door.outside.seconds > 0.0)


def test_what_was_learned_reaches_the_scheduler(tmp_path: Path) -> None:
    """The whole server: a request carries what the answers before it took on their way."""
    repositories.fake(tmp_path, name="m", head="slo_ms = 60000")
    works: list[Work] = []
    with whole_server(tmp_path) as server, server.connect() as client:
        (driver,) = (served.runtime.driver for served in server.host.engine.fleet.offered.values())
        submit = driver.submit

        def noted(taken: Sequence[Work]) -> None:
            submit(taken)
            works.extend(taken)

        driver.submit = noted  # type: ignore[method-assign]

        def reckoned_with() -> bool:
            assert infer(client, "m", infer_body([TENSOR])).status == 200
            return works[-1].outside > 0.0

        until(reckoned_with)
    assert works[0].due == works[0].deadline
    assert works[-1].due < works[-1].deadline
