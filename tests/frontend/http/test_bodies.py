"""Bodies: in place, gathered, chunked, compressed, too long, cut off, and not wanted."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Callable

import pytest

from carpool.frontend.http.body import ChunkedReader
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Receive,
)
from carpool.frontend.http.limits import Limits
from frontend.http.harness import PATIENCE, Client, PathApp, Serving, chunked, ignore, post, serving

KIB, MIB = 1024, 1024 * 1024


@pytest.mark.parametrize("size", [0, 1, 100, 16 * KIB, 150_528, MIB])
def test_a_body_goes_straight_into_its_place(client: Client, size: int) -> None:
    body = os.urandom(size)
    assert client.post("/place", body).body == body
    assert client.get().status == 200


def test_bodies_in_place_can_be_pipelined(client: Client) -> None:
    bodies = [os.urandom(20_000) for _ in range(5)]
    client.send(b"".join(post("/place", body) for body in bodies))
    assert [client.response().body for _ in bodies] == bodies


def test_the_loop_writes_into_the_apps_own_buffer() -> None:
    """No copy: the bytes appear in the slot while the body is still arriving."""
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(b"POST /place_hold HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"z" * 50)
        app.held.get(timeout=PATIENCE)
        client.send(b"y" * 49)
        while app.slot[98] != ord("y"):
            assert client.socket.fileno() >= 0
        assert app.slot[:100] == b"z" * 50 + b"y" * 49 + b"\0"


@pytest.mark.parametrize("size", [0, 1, 70_000, MIB])
def test_a_body_is_gathered(client: Client, size: int) -> None:
    body = os.urandom(size)
    assert client.post("/echo", body).body == body


def test_a_get_with_a_plan_for_its_body_has_an_empty_one(client: Client) -> None:
    assert client.get("/echo").body == b""
    assert client.get("/raw").body == b""


@pytest.mark.parametrize(
    ("chunks", "body"),
    [
        (b"0\r\n\r\n", b""),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"3\r\nabc\r\n00A\r\n0123456789\r\n000\r\n\r\n", b"abc0123456789"),
        (b'3;name=value;quoted="a b"\r\nabc\r\n0;last\r\n\r\n', b"abc"),
        (b"3 ; x\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"1\r\na\r\n0\r\nTrailer: yes\r\nX:\r\n\r\n", b"a"),
        (b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n", b"x" * 5000),
        (b"10000\r\n" + b"y" * 0x10000 + b"\r\n0\r\n\r\n", b"y" * 0x10000),
    ],
    ids=itertools.count(),
)
def test_chunked_bodies(client: Client, chunks: bytes, body: bytes) -> None:
    assert client.send(chunked("/echo", chunks)).response().body == body
    assert client.get().status == 200


def test_chunked_bodies_byte_by_byte(client: Client) -> None:
    for byte in chunked("/echo", b"3;x\r\nabc\r\n0\r\nA: b\r\n\r\n"):
        client.send(bytes([byte]))
    assert client.response().body == b"abc"
    assert client.get().status == 200


@pytest.mark.parametrize(
    ("chunks", "status"),
    [
        (b"x\r\n", 400),
        (b"-1\r\n", 400),
        (b"+1\r\n", 400),
        (b"0x1\r\n", 400),
        (b"\r\n", 400),
        (b"3\nabc\r\n0\r\n\r\n", 400),
        (b"3\r\nabcd\r\n0\r\n\r\n", 400),
        (b"3\r\nabc0\r\n\r\n", 400),
        (b"3;\0\r\nabc\r\n0\r\n\r\n", 400),
        (b"1\r\na\r\n0\r\nno trailer\r\n\r\n", 400),
        (b"1\r\na\r\n0\r\n folded: x\r\n\r\n", 400),
        (b"1;" + b"x" * 40_000, 400),
        ((b"1;" + b"x" * 1000 + b"\r\na\r\n") * 40, 400),
        (b"0\r\n" + (b"A: " + b"b" * 1000 + b"\r\n") * 40, 400),
        (b"FFFFFFFFFFFFFFFF\r\n", 413),
        (b"10000000000000000\r\n", 400),
        ((b"40000\r\n" + b"x" * 0x40000 + b"\r\n") * 5, 413),
    ],
    ids=itertools.count(),
)
def test_bad_chunks_are_refused(server: Serving, chunks: bytes, status: int) -> None:
    with server.connect() as client:
        client.send(chunked("/echo", chunks))
        assert client.response().status == status
        assert client.is_closed()


def test_a_body_over_the_servers_limit_is_not_read() -> None:
    app = PathApp()
    with serving(app, max_body_bytes=1000, drain_bytes=500) as server, server.connect() as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        answer = client.response()
        assert (answer.status, json.loads(answer.body)["reason"]) == (413, "too-large")
        assert client.is_closed()
        assert app.heads == []


def test_a_short_body_over_a_limit_leaves_the_connection() -> None:
    with serving(max_body_bytes=1000) as server, server.connect() as client:
        assert client.post("/echo", b"x" * 1001).status == 413
        assert client.get().status == 200


def test_a_body_over_the_apps_limit(client: Client) -> None:
    assert client.post("/echo", b"x" * (MIB + 1)).status == 413
    assert client.get().status == 200


def test_bodies_that_are_gathered_share_one_budget() -> None:
    app = PathApp()
    with serving(app, max_held_bytes=1000) as server, server.connect() as first:
        first.send(b"POST /hold HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b"x" * 800)
        app.held.get(timeout=PATIENCE)
        with server.connect() as second:
            answer = second.post("/echo", b"x" * 300)
            assert (answer.status, answer.fields["retry-after"]) == (503, "1")
        first.reset()
        assert app.left.get(timeout=PATIENCE) == "hold"
        with server.connect() as third:
            for _ in range(3):
                assert third.post("/echo", b"x" * 300).status == 200


def test_a_body_that_ends_too_early_is_a_400(server: Serving) -> None:
    for path in ("/echo", "/place_hold"):
        with server.connect() as client:
            client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc" % path.encode())
            answer = client.finish_sending().response()
            assert (answer.status, b"after 3 bytes" in answer.body) == (400, True)
            assert client.is_closed()
    assert server.app.left.get(timeout=PATIENCE) == "place"


# ── compressed ──


@pytest.mark.parametrize("size", [0, 10, 100_000, 900_000])
@pytest.mark.parametrize("kind", ["gzip", "x-gzip", "deflate", "raw deflate", "two members", "identity"])
def test_compressed_bodies(client: Client, size: int, kind: str) -> None:
    body = (b"abcdefghij" * 100_000)[:size]
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "x-gzip": gzip.compress,
        "deflate": zlib.compress,
        "raw deflate": lambda data: zlib.compress(data, wbits=-15),
        "two members": lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]),
        "identity": bytes,
    }
    packed = pack[kind](body)
    name = {"raw deflate": b"deflate", "two members": b"GZip"}.get(kind, kind.encode())
    answer = client.post("/echo", packed, b"Content-Encoding: %b\r\n" % name)
    assert (answer.status, answer.body) == (200, body)
    assert client.post("/raw", packed, b"Content-Encoding: %b\r\n" % name).body == packed


def test_a_compressed_body_may_be_chunked(client: Client) -> None:
    packed = gzip.compress(b"hello")
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    client.send(chunked("/echo", chunks, b"Content-Encoding: gzip\r\n"))
    assert client.response().body == b"hello"


def test_an_unknown_encoding_is_a_415(client: Client) -> None:
    for encoding in (b"br", b"gzip, gzip", b"zstd"):
        answer = client.post("/echo", b"abc", b"Content-Encoding: %b\r\n" % encoding)
        assert answer.status == 415
    assert client.get().status == 200


@pytest.mark.parametrize("size", [64 * MIB, MIB + 1])
def test_a_bomb_stops_at_the_limit(client: Client, size: int) -> None:
    answer = client.post("/echo", gzip.compress(b"\0" * size), b"Content-Encoding: gzip\r\n")
    assert answer.status == 413
    assert client.get().status == 200


PACKED = gzip.compress(b"x" * 100)
DAMAGED = {
    "not gzip": b"not gzip",
    "cut off": PACKED[:-1],
    "with a tail": PACKED + b"tail",
    "long and cut off": gzip.compress(os.urandom(600_000))[:-9],
    "with a wrong checksum": PACKED[:-8] + b"\0" * 8,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_bodies_are_400(client: Client, kind: str) -> None:
    assert client.post("/echo", DAMAGED[kind], b"Content-Encoding: gzip\r\n").status == 400
    assert client.get().status == 200


def test_something_after_a_deflate_body_is_a_400(client: Client) -> None:
    assert client.post("/echo", zlib.compress(b"x") + b"y", b"Content-Encoding: deflate\r\n").status == 400


def test_a_client_that_leaves_while_its_body_is_inflated() -> None:
    app = PathApp()
    packed = gzip.compress(b"\0" * MIB)
    with serving(app) as server:
        for _ in range(20):
            client = server.connect()
            client.send(post("/hold", packed, b"Content-Encoding: gzip\r\n"))
            app.held.get(timeout=PATIENCE)
            client.reset()
            assert app.left.get(timeout=PATIENCE) == "hold"
        server.until_connections(0)


# ── answered before the body is here ──


@pytest.mark.parametrize("size", [1, 20_000, 150_528, 2 * MIB])
def test_a_refusal_keeps_the_connection_and_skips_the_body(client: Client, size: int) -> None:
    for _ in range(3):
        answer = client.post("/refuse", os.urandom(size))
        assert (answer.status, answer.fields["retry-after"]) == (429, "1")
        assert "connection" not in answer.fields
    assert client.get().body == b"hello"


def test_a_refusal_comes_before_the_body(client: Client) -> None:
    client.send(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
    assert client.response().status == 429
    client.send(b"x" * 99_999)
    client.send(b"x")
    assert client.get().status == 200


def test_a_refused_chunked_body_is_skipped(client: Client) -> None:
    client.send(chunked("/refuse", b"5\r\nabcde\r\n"))
    assert client.response().status == 429
    client.send(b"3\r\nabc\r\n0\r\n\r\n")
    assert client.get().status == 200


def test_a_refused_chunked_body_that_turns_bad_ends_the_connection(client: Client) -> None:
    client.send(chunked("/refuse", b"zz\r\n"))
    assert client.response().status == 429
    assert client.is_closed()


def test_a_refused_body_that_ends_too_early(client: Client) -> None:
    client.send(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50_000)
    assert client.finish_sending().response().status == 429
    assert client.is_closed()


def test_a_refused_body_over_the_cap_ends_the_connection_but_not_the_answer() -> None:
    with serving(drain_bytes=100_000) as server, server.connect() as client:
        client.send(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n" + b"x" * 50_000)
        answer = client.response()
        assert (answer.status, answer.fields["connection"]) == (429, "close")
        assert client.is_closed()


def test_a_refused_chunked_body_over_the_cap() -> None:
    with serving(drain_bytes=1000) as server, server.connect() as client:
        client.send(chunked("/refuse", b"7d0\r\n" + b"x" * 2000 + b"\r\n"))
        assert client.response().status == 429
        assert client.is_closed()


def test_nobody_wants_the_body_and_it_is_long() -> None:
    app = PathApp()
    with serving(app, drain_bytes=1000) as server, server.connect() as client:
        assert client.post("/wait", b"x" * 2000).status == 413
        assert client.is_closed()


def test_an_answer_in_the_middle_of_a_body_frees_its_place() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(b"POST /place_hold HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"a" * 50)
        exchange = app.held.get(timeout=PATIENCE)

        def answer_and_reuse() -> None:
            exchange.respond(504, b"", b"late")
            app.slot[:] = b"\x55" * len(app.slot)

        server.call(answer_and_reuse)
        assert client.response().status == 504
        client.send(b"b" * 50)
        assert client.get().status == 200
        assert set(app.slot) == {0x55}
        assert app.left.empty()


def test_an_answer_in_the_middle_of_a_gathered_body() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(b"POST /hold HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + b"a" * 50)
        exchange = app.held.get(timeout=PATIENCE)
        assert server.call(exchange.respond, 504)
        assert client.response().status == 504
        client.send(b"b" * 50)
        assert client.get().status == 200


# ── Expect: 100-continue ──

EXPECT = b"Expect: 100-continue\r\n"


@pytest.mark.parametrize("path", ["/echo", "/place"])
def test_continue_is_sent_when_the_body_is_wanted(client: Client, path: str) -> None:
    client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n%b\r\n" % (path.encode(), EXPECT))
    assert client.response().status == 100
    client.send(b"abc")
    assert client.response().body == b"abc"


def test_a_refusal_takes_the_place_of_continue(client: Client) -> None:
    client.send(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n%b\r\n" % EXPECT)
    answer = client.response()
    assert (answer.status, answer.fields["connection"]) == (429, "close")
    assert client.is_closed()


def test_a_fault_takes_the_place_of_continue(client: Client) -> None:
    extra = EXPECT + b"Content-Encoding: br\r\n"
    client.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n%b\r\n" % extra)
    assert client.response().status == 415
    assert client.is_closed()


def test_http_1_0_has_no_continue(client: Client) -> None:
    client.send(b"POST /echo HTTP/1.0\r\nContent-Length: 3\r\n%b\r\nabc" % EXPECT)
    assert client.response().body == b"abc"


def test_nothing_to_continue_with(client: Client) -> None:
    assert client.get("/", EXPECT).status == 200


class Choosy:
    """Takes chunked bodies only into memory, as an app with slots would."""

    def begin(self, head: HttpHead, exchange: Exchange) -> BodyPlan:
        if head.chunked or head.content_length is None:
            return Collect(100, lambda body, _at: ignore(exchange.respond(200, b"", bytes(body))))
        slot = bytearray(head.content_length)
        return Receive(memoryview(slot), lambda _at: ignore(exchange.respond(200, b"", slot)))


def test_plans_can_alternate_on_one_connection() -> None:
    with serving(Choosy()) as server, server.connect() as client:
        for _ in range(3):
            assert client.post("/", b"straight in").body == b"straight in"
            client.send(chunked("/", b"7\r\ngathers\r\n0\r\n\r\n"))
            assert client.response().body == b"gathers"
            assert client.get().body == b""


def test_a_request_that_follows_a_body_at_once_loses_nothing(client: Client) -> None:
    """A body may be received with one byte more: the first of what comes behind it."""
    bodies = [bytes([number]) * 100_000 for number in range(1, 5)]
    for body in bodies:
        client.send(b"POST /place HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert [client.response().body for _ in bodies] == bodies


def test_chunks_are_counted() -> None:
    with serving(max_chunks=1000) as server, server.connect() as client:
        answer = client.send(chunked("/echo", b"1\r\na\r\n" * 1000 + b"0\r\n\r\n")).response()
        assert (answer.status, answer.body) == (200, b"a" * 1000)
        answer = client.send(chunked("/echo", b"1\r\na\r\n" * 1001 + b"0\r\n\r\n")).response()
        assert answer.status == 400
        assert b"exceeds maximum of 1000 non-empty chunks" in answer.body
        assert client.is_closed()


class Gathering:
    def __init__(self) -> None:
        self.body = b""

    def take(self, piece: memoryview) -> None:
        self.body += piece


def test_many_small_chunks_are_taken_a_few_at_a_time() -> None:
    """Each is work, whatever it carries: others have their turns in between."""
    sink = Gathering()
    reader = ChunkedReader(Limits(), sink)
    body = b"1\r\nA\r\n" * 500 + b"0\r\n\r\n"
    steps = position = 0
    while not reader.finished:
        position += reader.feed(memoryview(body)[position:])
        steps += 1
    assert (position, sink.body) == (len(body), b"A" * 500)
    assert steps > 10


def test_many_small_chunks_arrive_whole_and_the_next_request_after_them(client: Client) -> None:
    body = os.urandom(20_000)
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head + pieces + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.response().body == body
    assert client.response().status == 200
