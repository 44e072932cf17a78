"""Answers as bytes: what they mean, wherever they are split, and what is no answer at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.lab.load.http_client import AnswerReader, Malformed, outcome
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Kind, Timing

TIMING = b'decode;dur=0.061, queue;dur=3.204, infer;dur=8.117, post;dur=0.094, batch;desc="17"'
TIMED = Answer(Kind.ANSWERED, "", Timing(3.204 / 1e3, 8.117 / 1e3, 17, 0.094 / 1e3))


def answer(status: int, body: bytes = b"", *fields: bytes) -> bytes:
    lines = [b"HTTP/1.1 %d Some Words" % status, *fields, b"Content-Length: %d" % len(body), b"", b""]
    return b"\r\n".join(lines) + body


ANSWERS: list[tuple[bytes, Answer]] = [
    (answer(200, b"tensor", b"Server-Timing: " + TIMING), TIMED),
    (answer(200), PLAIN_ANSWER),
    (b"HTTP/1.1 204 No Content\r\n\r\n", PLAIN_ANSWER),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + answer(200, b"x" * 500), PLAIN_ANSWER),
    (
        answer(429, b'{"error":"no","reason":"cannot-finish"}', b"server-timing: " + TIMING),
        Answer(Kind.REFUSED, "cannot-finish", TIMED.timing),
    ),
    (answer(503, b'{"error":"Exceeds maximum queue size"}'), Answer(Kind.REFUSED, "http-503")),
    (answer(504, b'{"error":"late","reason":"deadline"}'), Answer(Kind.REFUSED, "deadline")),
    (answer(409, b'{"reason":"replaced"}'), Answer(Kind.REFUSED, "replaced")),
    (answer(500, b'{"error":"it broke","reason":"model-error"}'), Answer(Kind.FAILED, "model-error")),
    (answer(400, b"<html>a proxy</html>"), Answer(Kind.FAILED, "http-400")),
    (answer(500, b'{"reason":"<script>"}'), Answer(Kind.FAILED, "http-500")),
    (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n1A\r\n"
        + b"x" * 26
        + b"\r\n0\r\n\r\n",
        PLAIN_ANSWER,
    ),
    (
        b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n14\r\n"
        b'{"reason":"no-slots"\r\n1\r\n}\r\n0\r\nA-Trailer: x\r\n\r\n',
        Answer(Kind.REFUSED, "no-slots"),
    ),
]


@pytest.mark.parametrize(("sent", "means"), ANSWERS)
def test_what_an_answer_means(sent: bytes, means: Answer) -> None:
    reader = AnswerReader()
    assert reader.feed(sent) == means
    assert reader.keep_alive
    assert not reader.started


@settings(deadline=None)
@given(st.sampled_from(ANSWERS), st.data())
def test_it_does_not_matter_where_the_bytes_are_split(
    case: tuple[bytes, Answer], data: st.DataObject
) -> None:
    sent, means = case
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=6)))
    pieces = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    reader = AnswerReader()
    for _ in range(2):  # a connection is used again
        found = [reader.feed(piece) for piece in pieces]
        assert found == [None] * (len(pieces) - 1) + [means]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (answer(200, b"", b"Connection: close"), False),
        (answer(200, b"", b"connection: Keep-Alive"), True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
    ],
)
def test_whether_the_connection_can_be_used_again(sent: bytes, kept: bool) -> None:
    reader = AnswerReader()
    assert reader.feed(sent) == PLAIN_ANSWER
    assert reader.keep_alive is kept


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nsome") is None
    assert reader.feed(b" bytes") is None
    assert reader.close() == PLAIN_ANSWER
    assert not reader.keep_alive


@pytest.mark.parametrize("sent", [answer(200, b"abc")[:-1], b"HTTP/1.1 200 OK\r\nA: b", b""])
def test_an_answer_that_is_broken_off_is_none(sent: bytes) -> None:
    reader = AnswerReader()
    if sent:
        assert reader.feed(sent) is None
    assert reader.close() is None


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 400,
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000,
        answer(200) + b"more than was asked for",
    ],
)
def test_what_is_no_answer_is_malformed(sent: bytes) -> None:
    with pytest.raises(Malformed):
        AnswerReader().feed(sent)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_malformed_or_not_complete(sent: bytes) -> None:
    try:
        found = AnswerReader().feed(sent)
    except Malformed:
        return
    assert found is None or isinstance(found, Answer)


def test_a_server_that_tells_less_is_understood() -> None:
    told = outcome(200, 'queue;dur=1.5, infer;dur=3, batch;desc="2"', b"")
    assert told == Answer(Kind.ANSWERED, "", Timing(0.0015, 0.003, 2))
    assert told.timing is not None
    assert told.timing.inside is None


@pytest.mark.parametrize(
    "text", ["", "queue;dur=x", "total;dur=4", 'queue;dur=1.2.3, infer;dur=1, batch;desc="1"']
)
def test_timing_that_cannot_be_read_is_left_out(text: str) -> None:
    assert outcome(200, text, b"") == PLAIN_ANSWER
