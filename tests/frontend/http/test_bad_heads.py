"""Heads that are refused: each with a status, one sentence, and the end of the connection."""

from __future__ import annotations

import json
import ssl

import pytest

from frontend.http.harness import Serving, serving

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"

REFUSED = {
    "length and chunked": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "the same length twice": (POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "a list of lengths": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "a signed length": (POST + b"Content-Length: +3\r\n\r\nabc", 400),
    "a length in words": (POST + b"Content-Length: three\r\n\r\nabc", 400),
    "a length in hex": (POST + b"Content-Length: 0x3\r\n\r\nabc", 400),
    "an empty length": (POST + b"Content-Length:\r\n\r\nabc", 400),
    "a length in other digits": (POST + "Content-Length: ３\r\n\r\n".encode(), 400),
    "a huge length": (POST + b"Content-Length: 99999999999\r\n\r\n", 413),
    "an absurd length": (POST + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n", 413),
    "gzip as transfer coding": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "identity as transfer coding": (POST + b"Transfer-Encoding: identity\r\n\r\n", 501),
    "a hidden chunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501),
    "chunked twice": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "chunked not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
    "chunked in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"Host: y\r\n\r\n", 400),
    "a host with a space": (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "a folded field": (GET + b"A: b\r\n c\r\n\r\n", 400),
    "a fold at once": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "bare LF in fields": (b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400),
    "bare LF everywhere": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
    "bare CR": (GET + b"A: b\rc\r\n\r\n", 400),
    "NUL in a value": (GET + b"A: b\0c\r\n\r\n", 400),
    "a control character in a value": (GET + b"A: b\x01c\r\n\r\n", 400),
    "DEL in a value": (GET + b"A: b\x7fc\r\n\r\n", 400),
    "a space before the colon": (GET + b"A : b\r\n\r\n", 400),
    "a space in a name": (GET + b"A B: c\r\n\r\n", 400),
    "a name outside ASCII": (GET + b"\xc3\xa9: c\r\n\r\n", 400),
    "no name": (GET + b": c\r\n\r\n", 400),
    "no colon": (GET + b"abc\r\n\r\n", 400),
    "two spaces in the request line": (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /\r\n\r\n", 400),
    "a target outside ASCII": (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a target that is no path": (b"GET abc HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "NUL in the target": (b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "an endless method": (b"G" * 100 + b" / HTTP/1.1\r\nHost: x\r\n\r\n", 501),
    "HTTP/2 by number": (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
    "HTTP/2 by preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400),
    "another expectation": (POST + b"Expect: a miracle\r\nContent-Length: 3\r\n\r\nabc", 417),
    "printable garbage": (b"hello?\r\n", 400),
    "binary garbage": (b"\x00\x01\x02\xff", 400),
    "a long request line": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "an endless request line": (b"a" * 9000, 414),
    "long fields": (GET + b"A: " + b"b" * 40_000 + b"\r\n\r\n", 431),
    "endless fields": (GET + b"A: " + b"b" * 40_000, 431),
    "many fields": (GET + b"A: b\r\n" * 101 + b"\r\n", 431),
}


@pytest.mark.parametrize(("sent", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_a_sentence_and_closed(server: Serving, sent: bytes, status: int) -> None:
    with server.connect() as client:
        answer = client.send(sent).response()
        assert answer.status == status
        assert answer.fields["connection"] == "close"
        assert set(json.loads(answer.body)) == {"error", "reason"}
        assert client.is_closed()


@pytest.mark.parametrize("sent", [sent for sent, _ in REFUSED.values()], ids=REFUSED.keys())
def test_no_app_sees_them(sent: bytes, server: Serving) -> None:
    seen = len(server.app.heads)
    with server.connect() as client:
        client.send(sent).response()
    assert len(server.app.heads) == seen


def test_tls_on_the_plain_port_is_named(server: Serving) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    with server.connect() as client:
        answer = client.send(outgoing.read()).response()
        assert answer.status == 400
        assert b"TLS" in answer.body
        assert client.is_closed()


def test_an_unfinished_head_at_the_end_of_the_stream(server: Serving) -> None:
    with server.connect() as client:
        assert client.send(b"GET / HTTP/1.1\r\nHos").finish_sending().response().status == 400
        assert client.is_closed()


def test_refusals_are_counted_by_reason() -> None:
    with serving() as server, server.connect() as client:
        client.send(b"nonsense\r\n").response()
        assert server.server.answered_here == {"bad-request": 1}
