"""Any bytes in any pieces: valid answers, then the end; and the pieces never change the answers."""

from __future__ import annotations

import gzip
import socket
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import mul
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.frontend.http import protocol
from carpool.frontend.http.fairness import Unread
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.protocol import Connection
from carpool.frontend.http.shared import Shared
from frontend.http.harness import PathApp, Serving, chunked, parse_response_head, post
from later import later, many

# Small enough that a few hundred bytes reach every limit.
LIMITS = Limits(
    max_request_line_bytes=80,
    max_header_bytes=400,
    max_header_fields=8,
    max_body_bytes=300,
    read_ahead_bytes=100,
    drain_bytes=150,
)


class FakeLoop:
    def __init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, _delay: float, callback: Callable[[], None]) -> None:
        self.soon.append(callback)  # no time passes here: pauses only change the order

    def run(self) -> None:
        while self.soon:
            self.soon.popleft()()


class FakeTransport:
    """Records what is sent, and refuses what a real transport refuses."""

    def __init__(self, empty_socket: socket.socket) -> None:
        self.sent = bytearray()
        self.closing = False
        self.reading = True
        self.ended = False
        self.socket = empty_socket

    def write(self, data: bytes) -> None:
        assert not self.ended
        assert not self.closing
        self.sent += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self.socket, "ssl_object": None, "peername": ("192.0.2.1", 1234)}[name]


@pytest.fixture(
    scope="module", params=["many a turn", later("one a turn"), later("all much"), "all much, one a turn"]
)
def empty_socket(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """How busy the machine is must not change the answers, nor what counts as much: repeated heads before
    long bodies are read alone."""
    one, other = socket.socketpair()
    one.setblocking(False)
    with pytest.MonkeyPatch.context() as patch:
        if "one a turn" in request.param:
            patch.setattr(protocol, "_SECONDS_PER_TURN", 0.0)
        if "all much" in request.param:
            patch.setattr(protocol, "_MUCH", 1)
        yield one
    one.close()
    other.close()


def answers_to(pieces: list[bytes], empty_socket: socket.socket) -> bytes:
    """Everything one connection answers to `pieces` and the end of the stream."""
    loop, transport = FakeLoop(), FakeTransport(empty_socket)
    app = PathApp()
    app.limit = 200
    as_loop: Any = loop
    shared = Shared(app, LIMITS, as_loop, Unread())
    shared.date = b"date: now\r\n"
    connection = Connection(shared)
    as_transport: Any = transport
    connection.connection_made(as_transport)
    for piece in pieces:
        feed(connection, transport, loop, piece)
    if not transport.closing:
        connection.eof_received()
        loop.run()
    assert transport.closing, "the connection hangs"
    connection.connection_lost(None)
    assert (shared.lingering, shared.accounts.bytes, shared.connections) == (0, 0, set())
    return bytes(transport.sent)


def feed(connection: Connection, transport: FakeTransport, loop: FakeLoop, piece: bytes) -> None:
    while piece and not transport.closing:
        loop.run()
        assert transport.reading, "nothing is pending, and still nothing is read"
        target = memoryview(connection.get_buffer(-1))
        assert len(target) > 0
        count = min(len(target), len(piece))
        target[:count] = piece[:count]
        connection.buffer_updated(count)
        piece = piece[count:]
    loop.run()


def assert_valid(stream: bytes) -> None:
    while stream:
        head, separator, stream = stream.partition(b"\r\n\r\n")
        assert separator, head
        status, fields = parse_response_head(head)
        if status not in (100, 204):
            size = int(fields["content-length"])
            assert len(stream) >= size
            stream = stream[size:]
        if fields.get("connection") == "close":
            assert stream == b""


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SEEDS = [
    GET,
    b"GET /nothing?a=b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    post("/echo", b"hello"),
    post("/place", b"p" * 120),
    post("/refuse", b"r" * 140),
    post("/refuse", b"r" * 160),
    post("/echo", b"e" * 250),
    post("/place", b"e" * 301),
    post("/echo", b"abc", b"Expect: 100-continue\r\n"),
    post("/refuse", b"abc", b"Expect: 100-continue\r\n"),
    post("/echo", gzip.compress(b"z" * 150, mtime=0), b"Content-Encoding: gzip\r\n"),
    post("/echo", gzip.compress(b"z" * 250, mtime=0), b"Content-Encoding: gzip\r\n"),
    chunked("/echo", b"5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\nT: r\r\n\r\n"),
    chunked("/refuse", b"5\r\nhello\r\n0\r\n\r\n"),
    chunked("/echo", b"C9\r\n" + b"h" * 201 + b"\r\n0\r\n\r\n"),
    b"\r\n\r\n",
    b"GET /" + b"a" * 90 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 400 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 9 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]
SHARP = [
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\0",
    b" ",
    b":",
    b";",
    b"-",
    b"0",
    b"\xff",
    b"Content-Length: 5\r\n",
]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Valid requests in a row, with some bytes changed, cut out, doubled or put in."""
    seeds = st.builds(mul, st.sampled_from(SEEDS), st.sampled_from([1, 1, 2, 4]))
    data = b"".join(draw(st.lists(seeds, min_size=1, max_size=5)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 4)))
        new = draw(st.sampled_from(SHARP) | st.binary(max_size=3) | st.just(data[start:stop] * 2))
        data = data[:start] + new + data[stop:]
    return data


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_one_byte_at_a_time_is_as_good_as_all_at_once(seed: int, empty_socket: socket.socket) -> None:
    data = SEEDS[seed] + GET
    whole = answers_to([data], empty_socket)
    assert_valid(whole)
    assert answers_to([data[at : at + 1] for at in range(len(data))], empty_socket) == whole


def test_a_long_head_whose_start_had_to_wait_for_a_turn(empty_socket: socket.socket) -> None:
    """It is read on: what is kept is more than may be read ahead, but it is a head's."""
    long_head = b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 2 * LIMITS.read_ahead_bytes
    rest = b"\r\n\r\n" + GET
    whole = answers_to([GET + long_head + rest], empty_socket)
    assert whole.count(b"HTTP/1.1 200 OK") == 3
    assert answers_to([GET + long_head, rest], empty_socket) == whole


@settings(max_examples=many(400), deadline=None)
@given(data=streams(), where=cuts)
@example(data=b"\r\n\r\n", where=[1])
def test_pieces_never_change_the_answers(data: bytes, where: list[int], empty_socket: socket.socket) -> None:
    whole = answers_to([data], empty_socket)
    assert_valid(whole)
    assert answers_to(split(data, where), empty_socket) == whole


@settings(max_examples=many(200), deadline=None)
@given(data=st.binary(max_size=600), where=cuts)
def test_garbage_is_answered_or_closed(data: bytes, where: list[int], empty_socket: socket.socket) -> None:
    whole = answers_to([data], empty_socket)
    assert_valid(whole)
    assert answers_to(split(data, where), empty_socket) == whole


@settings(max_examples=many(60), deadline=None)
@given(batch=st.lists(streams() | st.binary(max_size=200), min_size=1, max_size=4))
def test_a_live_server_outlives_it(server: Serving, batch: list[bytes]) -> None:
    for data in batch:
        with server.connect() as client:
            client.send(data).finish_sending()
            received = bytearray()
            try:
                while piece := client.socket.recv(1 << 16):
                    received += piece
            except ConnectionResetError:
                continue
            assert_valid(bytes(received))
    with server.connect() as client:
        assert client.get().status == 200


def test_the_fuzz_reaches_every_phase(empty_socket: socket.socket) -> None:
    """The seeds alone bring out each kind of answer: the fuzz starts from somewhere."""
    seen = {answers_to([seed], empty_socket)[9:12] for seed in SEEDS}
    assert seen >= {b"200", b"204", b"400", b"413", b"414", b"429", b"431", b"100", b""}
