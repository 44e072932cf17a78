"""A connection with one call at a time: it is answered at once, and not made to wait when it waits itself."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.h2_connection import H2Connection
from carpool.types import Datatype, TensorSpec
from frontend.fake_door import FakeModel
from frontend.grpc.front_end import SERVICE, FrontEnd, front_end
from frontend.grpc.wire import LAST, OPENING, data, framed, head
from waiting import until

LONG = 20_000  # bytes of a message that counts as work of the turn


class FakeTransport:
    """`socket` is real, so that what is written past the transport can be seen."""

    def __init__(self, secure: bool = False) -> None:
        self.socket, self.other_end = socket.socketpair()
        self.socket.setblocking(False)
        self.other_end.setblocking(False)
        self.secure = secure
        self.written: list[bytes] = []
        self.waiting = 0  # bytes that it has not sent yet
        self.reading = True
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def at_once(self) -> bytes:
        """What went past the transport since this was asked last."""
        try:
            return self.other_end.recv(1 << 16)
        except BlockingIOError:
            return b""

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self.socket, "ssl_object": self if self.secure else None}.get(name)

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closing = True

    abort = close


class Client:
    """On a connection of the server's whose loop the test plays."""

    def __init__(self, front: FrontEnd, secure: bool = False) -> None:
        self.front = front
        self.transport = FakeTransport(secure)
        as_transport: Any = self.transport
        assert front.server._shared is not None
        self.shared = front.server._shared
        self.connection = H2Connection(self.shared)
        front.run(lambda: self.connection.connection_made(as_transport))
        self.say(OPENING)
        self.transport.written.clear()

    def feed(self, said: bytes) -> None:
        """One read."""
        buffer = self.connection.get_buffer(-1)
        assert len(buffer) >= len(said)
        buffer[: len(said)] = said
        self.connection.buffer_updated(len(said))

    def say(self, *said: bytes) -> None:
        """One read, and then a turn of the loop."""
        self.front.run(lambda: self.feed(b"".join(said)))
        self.front.run(lambda: None)

    def leave(self) -> None:
        def lose() -> None:
            self.transport.close()
            self.connection.connection_lost(None)

        self.front.run(lose)
        self.transport.socket.close()
        self.transport.other_end.close()


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    tensor, number = TensorSpec("x", Datatype.UINT8, (-1,)), TensorSpec("y", Datatype.FP32, (1,))
    one = FakeModel("one", [tensor], [number], lambda _inputs: {"y": [[1.0]]})
    with front_end(one, clock=lambda: 0.0) as running:  # a turn is over when its work is done
        running.door.held = True
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[Client]:
    made = Client(front)
    yield made
    made.leave()
    front.door.calls.clear()


def asking(number: int, size: int = 10) -> bytes:
    request = pb.ModelInferRequest(model_name="one", raw_input_contents=[bytes(size)])
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    return head(number) + data(number, framed(request.SerializeToString()))


def finish(client: Client, look: Callable[[], Any] = lambda: None) -> Any:
    """Answer all calls, and see what has become of that within the same turn; then let it end."""

    def inside() -> Any:
        for call in client.front.door.calls:
            call.finish()
        client.front.door.calls.clear()
        return look()

    found = client.front.run(inside)
    client.front.run(lambda: None)
    return found


def answers(said: bytes) -> list[int]:
    """The streams whose last block is in there."""
    found, position = [], 0
    while position < len(said):
        high, low, kind, flags, number = h2.FRAME.unpack_from(said, position)
        position += h2.FRAME_BYTES + (high << 8 | low)
        if kind == h2.HEADERS and flags == LAST:
            found.append(number)
    assert position == len(said), "a frame is cut"
    return found


def test_the_answer_to_the_only_call_is_out_before_the_turn_ends(client: Client) -> None:
    for number in (1, 3, 5):
        client.say(asking(number))
        assert answers(finish(client, client.transport.at_once)) == [number]
    assert client.transport.written == []


def test_answers_to_several_calls_go_together(client: Client) -> None:
    client.say(asking(1), asking(3), asking(5))
    assert finish(client, client.transport.at_once) == b""
    (together,) = client.transport.written
    assert answers(together) == [1, 3, 5]


def test_calls_that_are_answered_where_they_are_read_go_together(client: Client) -> None:
    live = [head(number, path=SERVICE + "ServerLive") + data(number, framed(b"")) for number in (1, 3, 5)]
    client.say(*live)
    assert client.transport.at_once() == b""
    (together,) = client.transport.written
    assert answers(together) == [1, 3, 5]


def test_calls_for_which_a_turn_is_too_short_are_answered_in_the_next_ones() -> None:
    at = itertools.count()
    with front_end(clock=lambda: next(at) / 1000.0) as front:  # each look at the clock is late
        client = Client(front)
        numbers = list(range(1, 21, 2))
        live = [head(number, path=SERVICE + "ServerLive") + data(number, framed(b"")) for number in numbers]
        client.say(*live)
        written = client.transport.written
        until(lambda: len(front.run(lambda: answers(b"".join(written)))) == len(numbers))
        assert answers(b"".join(written)) == numbers
        assert len(written) > 1
        client.leave()


def test_nothing_overtakes_what_was_said_before(client: Client) -> None:
    client.say(asking(1))
    ping = h2.frame(h2.PING, 0, 0, b"whatever")

    def ask_and_finish() -> bytes:
        client.feed(ping)
        for call in client.front.door.calls:
            call.finish()
        return client.transport.at_once()

    assert client.front.run(ask_and_finish) == b""
    client.front.run(lambda: None)
    client.front.door.calls.clear()
    (together,) = client.transport.written
    assert together.startswith(h2.frame(h2.PING, h2.ACK, 0, b"whatever"))
    assert answers(together) == [1]


def test_nothing_overtakes_what_the_transport_still_has(client: Client) -> None:
    client.say(asking(1))
    client.transport.waiting = 1
    assert finish(client, client.transport.at_once) == b""
    assert answers(b"".join(client.transport.written)) == [1]


def test_over_tls_nothing_goes_past_the_transport(front: FrontEnd) -> None:
    client = Client(front, secure=True)
    client.say(asking(1))
    assert finish(client, client.transport.at_once) == b""
    assert answers(b"".join(client.transport.written)) == [1]
    client.leave()


@pytest.mark.parametrize("taken", [0, 1, 50])
def test_what_the_socket_does_not_take_is_left_to_the_transport(
    client: Client, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    def write(file: int, said: bytes) -> int:
        if not taken:
            raise BlockingIOError
        return client.transport.socket.send(said[:taken])

    client.say(asking(1))
    monkeypatch.setattr(os, "write", write)
    started: bytes = finish(client, client.transport.at_once)
    monkeypatch.undo()
    assert len(started) == taken
    assert answers(started + b"".join(client.transport.written)) == [1]


def test_nothing_is_written_to_a_connection_that_closes(client: Client) -> None:
    client.say(asking(1))
    client.transport.closing = True
    assert finish(client, client.transport.at_once) == b""
    assert client.transport.written == []


def use_up_the_turn(client: Client, said: bytes) -> bool:
    """Read it when others have used up the turn; returns whether more would be read in the same one."""

    def inside() -> bool:
        client.shared.turns.spend(client.shared.turns.left)
        client.feed(said)
        return client.transport.reading

    return client.front.run(inside)


def test_a_client_that_waits_for_its_answer_is_not_paused(client: Client) -> None:
    assert use_up_the_turn(client, asking(1, LONG))
    assert answers(finish(client, client.transport.at_once)) == [1]


@pytest.mark.parametrize(
    "said",
    [
        asking(1, LONG)[:-1],
        asking(1, LONG) + asking(3)[:50],
        asking(1, LONG) + asking(3),
        asking(1, LONG) + h2.frame(h2.PING, 0, 0, bytes(8))[:5],
        head(1, path=SERVICE + "ServerLive") + data(1, framed(bytes(LONG))),
    ],
    ids=["half a call", "a call and a half", "two calls", "a call and half a frame", "answered already"],
)
def test_a_client_that_says_more_than_one_call_takes_turns(client: Client, said: bytes) -> None:
    assert not use_up_the_turn(client, said)
    client.front.run(lambda: None)
    client.front.run(lambda: None)
    assert client.transport.reading
    finish(client)
