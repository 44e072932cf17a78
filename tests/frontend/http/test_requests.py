"""Ordinary HTTP/1.1: what a well-behaved client may do."""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime

import pytest

from carpool.frontend.http.exchange import (
    BodyPlan,
    Exchange,
    Fault,
    HttpHead,
)
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import HeadFinder, parse_head
from frontend.http.harness import PATIENCE, Client, PathApp, Serving, post, serving


def head_of(raw: bytes) -> HttpHead:
    limits = Limits()
    return parse_head(raw, limits, HeadFinder(limits))


def test_a_connection_is_kept_for_the_next_request(client: Client) -> None:
    for _ in range(3):
        answer = client.get()
        assert (answer.status, answer.body) == (200, b"hello")
        assert answer.fields["content-type"] == "text/plain"
        assert "connection" not in answer.fields
        assert parsedate_to_datetime(answer.fields["date"]).tzinfo is not None


def test_connection_close_is_obeyed_and_announced(client: Client) -> None:
    answer = client.get("/", b"Connection: keep-alive, Close\r\n")
    assert answer.fields["connection"] == "close"
    assert client.is_closed()


def test_what_follows_connection_close_is_ignored(server: Serving, client: Client) -> None:
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + b"GET / HTTP/1.1\r\n" * 10)
    assert client.response().status == 200
    assert client.is_closed()


def test_http_1_0_closes_unless_asked_to_stay(server: Serving) -> None:
    with server.connect() as client:
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert client.response().fields["connection"] == "keep-alive"
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert client.response().fields["connection"] == "close"
        assert client.is_closed()


def test_a_later_http_1_minor_is_http_1_1(client: Client) -> None:
    assert client.send(b"GET / HTTP/1.7\r\nHost: x\r\n\r\n").response().status == 200
    assert client.get().status == 200


def test_head_gets_the_length_but_not_the_body(client: Client) -> None:
    client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = client.response(head_only=True)
    assert answer.fields["content-length"] == "5"
    assert client.get().body == b"hello"


def test_no_content_has_neither_body_nor_length(client: Client) -> None:
    answer = client.get("/nothing")
    assert answer.status == 204
    assert "content-length" not in answer.fields
    assert client.get().status == 200


def test_pipelined_requests_are_answered_in_order(server: Serving) -> None:
    bodies = [b"%d" % number for number in range(200)]
    with server.connect() as client:
        client.send(b"".join(post("/echo", body) for body in bodies))
        assert [client.response().body for _ in bodies] == bodies


def test_one_pipelined_request_waits_for_the_one_before() -> None:
    app = PathApp()
    with serving(app) as server, server.connect() as client:
        client.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n")
        exchange = app.held.get(timeout=PATIENCE)
        assert len(app.heads) == 1
        assert server.call(exchange.respond, 200, b"", b"first")
        assert [client.response().body, client.response().body] == [b"first", b"hello"]


def test_only_so_much_is_read_ahead() -> None:
    app = PathApp()
    with serving(app, read_ahead_bytes=1000) as server, server.connect() as client:
        client.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        exchange = app.held.get(timeout=PATIENCE)
        client.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):  # the kernel's buffers fill up, and nobody empties them
            client.send(post("/echo", b"x" * 900) * 50_000)
        client.socket.settimeout(PATIENCE)
        assert server.call(exchange.respond, 200)
        assert client.response().status == 200


def test_empty_lines_before_a_request_are_skipped(client: Client) -> None:
    assert client.send(b"\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n").response().status == 200
    assert client.send(post("/echo", b"a") + b"\r\n").response().body == b"a"
    assert client.get().status == 200


def test_the_target_may_be_a_whole_url(server: Serving, client: Client) -> None:
    client.send(b"GET http://example.org:80/echo?a=1&b=%20 HTTP/1.1\r\nHost: x\r\n\r\n").response()
    head = server.app.heads[-1]
    assert (head.path, head.query) == ("/echo", "a=1&b=%20")
    assert head.headers[b"host"] == b"example.org:80"  # what counts is the target's, and not the field
    for wrong in (b"user@example.org", b"a b", b"exa mple", b"<x>"):
        with server.connect() as other:
            refused = other.send(b"GET http://%b/echo HTTP/1.1\r\nHost: x\r\n\r\n" % wrong).response()
            assert refused.status == 400


def test_options_may_ask_about_the_whole_server(server: Serving, client: Client) -> None:
    client.send(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n").response()
    assert server.app.heads[-1].path == "*"


def test_a_repeated_head_is_parsed_once(server: Serving, client: Client) -> None:
    client.get("/", b"X-Same: 1\r\n")
    first = server.app.heads[-1]
    begun: list[HttpHead] = []

    def start(exchange: Exchange) -> BodyPlan:
        begun.append(exchange.head)
        return server.app.root(exchange.head, exchange)

    first.start = start
    assert client.get("/", b"X-Same: 1\r\n").status == 200
    assert begun == [first]
    assert server.app.heads[-1] is first
    client.get("/", b"X-Same: 2\r\n")
    assert server.app.heads[-1].start is None
    assert begun == [first]


def test_a_repeated_head_in_pieces(client: Client) -> None:
    client.get()
    for _ in range(2):
        client.send(b"GET / HTTP/1.1\r\nHo").send(b"st: x\r\n").send(b"\r\n")
        assert client.response().status == 200


def test_fields_are_lower_case_trimmed_and_joined() -> None:
    head = head_of(
        b"GET / HTTP/1.1\r\nHOST:\t x \r\nAccept: a\r\naccept:b\r\nCookie: c\r\nCookie: d\r\nEmpty:\r\n\r\n"
    )
    assert head.headers == {b"host": b"x", b"accept": b"a, b", b"cookie": b"c; d", b"empty": b""}


def test_path_segments_are_decoded_one_by_one() -> None:
    head = head_of(b"GET /v2/models/a%2Fb/..%2f%C3%A9 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.segments() == ["v2", "models", "a/b", "../é"]


@pytest.mark.parametrize("path", ["/%zz", "/%", "/%ff", "/%00", "/a%0a"])
def test_undecodable_paths_are_faults(path: str) -> None:
    with pytest.raises(Fault):
        head_of(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()).segments()


def test_the_app_can_answer_with_a_fault() -> None:
    class Strict(PathApp):
        def root(self, head: HttpHead, exchange: object) -> None:
            head.segments()
            raise Fault(418, "short and stout", "teapot")

    with serving(Strict()) as server, server.connect() as client:
        answer = client.get()
        assert answer.status == 418
        assert json.loads(answer.body) == {"error": "short and stout", "reason": "teapot"}
        assert client.get("/nothing").status == 204


@pytest.mark.parametrize("path", ["/crash", "/crash_late", "/short"])
def test_a_bug_in_the_app_is_a_500_and_no_more(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, server.connect() as client:
        answer = client.post(path, b"ab")
        assert (answer.status, json.loads(answer.body)["reason"]) == (500, "internal")
        assert client.get().status == 200
    assert "the app failed on a request" in caplog.text
