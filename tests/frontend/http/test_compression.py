"""Which encoding an answer gets, and what undoing one may cost."""

from __future__ import annotations

import gzip
import random
import threading
import tracemalloc
import zlib

import pytest

from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.http.body import MOST_MEMBERS, BodyInflater, CompressedBody, Payer
from carpool.frontend.http.exchange import Fault, choose_encoding, compress
from frontend.http.harness import post, serving
from waiting import until

GZIP = b"Content-Encoding: gzip\r\n"


def payer(most_bytes: int) -> Payer:
    return Payer(Accounts(1, most_bytes=most_bytes), "somebody")


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (None, None),
        (b"", None),
        (b"identity", None),
        (b"br", None),
        (b"gzip", b"gzip"),
        (b"x-gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"GZIP;q=0.5, deflate", b"deflate"),
        (b"gzip, deflate, br", b"gzip"),
        (b"gzip;q=0, deflate;q=0.1", b"deflate"),
        (b"gzip;q=0", None),
        (b"*", b"gzip"),
        (b"*;q=0.5, gzip;q=0", b"deflate"),
        (b"identity, gzip;q=0.5", None),
        (b"gzip;q=nonsense", None),
        (b"gzip; level=9", b"gzip"),
    ],
)
def test_the_clients_preference_decides(accepted: bytes | None, chosen: bytes | None) -> None:
    assert choose_encoding(accepted) == chosen


def test_what_was_compressed_can_be_read_back() -> None:
    body = b"the same again " * 100
    assert gzip.decompress(compress(body, b"gzip")) == body
    assert zlib.decompress(compress(body, b"deflate", level=1)) == body


def finish(inflater: BodyInflater) -> None:
    while not inflater.turn():
        pass


def inflated(body: bytes | bytearray, limit: int = 1 << 20, encoding: bytes = b"gzip") -> bytes:
    inflater = BodyInflater(encoding, body, limit, payer(1 << 30))
    finish(inflater)
    return bytes(inflater.body)


def test_members_follow_each_other() -> None:
    parts = [bytes([number % 256]) * (2000 + number) for number in range(200)]
    assert inflated(b"".join(map(gzip.compress, parts))) == b"".join(parts)
    few = [b"", b"a", b"", b"bc"] * 16
    assert inflated(b"".join(map(gzip.compress, few))) == b"".join(few)


def test_a_body_much_longer_than_a_window_comes_out_whole() -> None:
    body = random.Random(7).randbytes(300_000)
    assert inflated(gzip.compress(body) * 2) == body * 2
    assert inflated(zlib.compress(body), encoding=b"deflate") == body


def test_members_are_counted() -> None:
    block = gzip.compress(bytes(1024))
    assert len(inflated(block * MOST_MEMBERS, 4 << 20)) == 1024 * MOST_MEMBERS
    with pytest.raises(Fault, match=f"more than {MOST_MEMBERS} members"):
        inflated(block * (MOST_MEMBERS + 1), 4 << 20)
    with pytest.raises(Fault, match="members of under 1024 bytes"):
        inflated(gzip.compress(b"") * 65)


def test_members_that_wait_are_not_copied_for_each_one_before_them() -> None:
    """Three million members take as many steps as are allowed, and no memory to speak of."""
    inflater = BodyInflater(b"gzip", gzip.compress(b"") * 3_000_000, 1 << 20, payer(1 << 30))
    tracemalloc.start()
    try:
        with pytest.raises(Fault, match="members"):
            finish(inflater)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_comes_out_is_counted_while_it_is_there() -> None:
    paid = payer(1 << 21)
    inflater = BodyInflater(b"gzip", gzip.compress(bytes(1 << 19)), 1 << 20, paid)
    finish(inflater)
    assert paid.accounts.bytes == 1 << 19
    del inflater
    assert paid.accounts.bytes == 0


def test_what_is_too_much_for_all_bodies_is_refused() -> None:
    inflater = BodyInflater(b"gzip", gzip.compress(bytes(1 << 21)), 1 << 22, payer(1 << 20))
    with pytest.raises(Fault, match="too many concurrent bodies"):
        finish(inflater)


def test_work_for_a_client_that_left_ends() -> None:
    body = gzip.compress(bytes(200 << 20), 1)  # on a busy machine longer than a connection may wait
    with serving() as server:
        app = server.app
        app.limit = 1 << 30
        with server.connect() as client:
            client.send(post("/hold", body, GZIP))
            app.held.get()
            shared = server.server._shared
            until(lambda: shared.inflating.total == 1)
        until(lambda: shared.inflating.total == 0 and shared.accounts.bytes == 0)


def test_a_body_that_waits_is_freed_when_its_client_leaves() -> None:
    """Those of others do not end meanwhile, so that it never gets a turn."""
    with serving() as server, server.connect() as first:
        app, go_on = server.app, threading.Event()
        app.limit = 1 << 30
        shared = server.server._shared
        for name in ("others", "more"):  # as many as there are threads
            server.call(shared.fair_inflaters.submit, name, lambda: go_on.wait(60.0) and None)
        try:
            with server.connect() as client:
                client.send(post("/hold", gzip.compress(bytes(20 << 20), 1), GZIP))
                app.held.get()
                until(lambda: shared.inflating.total == 1)
                assert shared.accounts.bytes > 0
            until(lambda: shared.inflating.total == 0 and shared.accounts.bytes == 0)
        finally:
            go_on.set()
        assert first.post("/echo", gzip.compress(b"short"), GZIP).body == b"short"


def test_a_client_that_left_is_noticed_behind_what_it_sent_ahead() -> None:
    """Its next requests fill what is read ahead, and its end is behind them."""
    with serving() as server:
        app, go_on = server.app, threading.Event()
        app.limit = 1 << 30
        shared = server.server._shared
        server.call(lambda: shared.fair_inflaters.submit("127.0.0.1", lambda: go_on.wait(60.0) and None))
        try:
            with server.connect() as client:
                packed = gzip.compress(bytes(20 << 20), 1)
                client.send(post("/hold", packed, GZIP) * 2)
                app.held.get()
                until(lambda: shared.inflating.total == 1)
            until(lambda: not shared.connections and shared.accounts.bytes == 0)
            assert app.held.empty()
        finally:
            go_on.set()


def test_so_many_compressed_bodies_wait_and_no_more() -> None:
    with serving(max_inflating=0) as server, server.connect() as client:
        refused = client.post("/echo", gzip.compress(bytes(1 << 20)), GZIP)
        assert refused.status == 503
        assert b"too many concurrent compressed bodies" in refused.body
        assert client.post("/echo", gzip.compress(b"short"), GZIP).body == b"short"


def test_a_bad_start_is_refused_before_the_rest_comes() -> None:
    body = gzip.compress(b"") * 200_000
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    with serving() as server, server.connect() as client:
        client.send(head % len(body) + body[: 64 << 10])
        refused = client.response()
        assert refused.status == 400
        assert b"members" in refused.body
        until(lambda: server.server._shared.accounts.bytes == 0)


@pytest.mark.parametrize("start", [b"", b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (1 << 15) + b"\0"])
def test_a_start_that_says_nothing_yet_is_no_reason(start: bytes) -> None:
    """Noise that does not shrink, in a member whose name alone is longer than what is looked at."""
    noise = random.Random(1).randbytes(1 << 18)
    plain = gzip.compress(noise)
    body = start + plain[10:] if start else plain
    gather = CompressedBody(b"gzip", 1 << 20, 1 << 20, payer(1 << 22))
    for at in range(0, len(body), 5000):
        gather.take(memoryview(body)[at : at + 5000])
    assert inflated(gather) == noise
