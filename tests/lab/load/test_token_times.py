"""Streams as the load generator sees them: when pieces came, in which order, and whether all of them did."""

from __future__ import annotations

import json
from typing import Any

import pytest

from carpool.lab.load.http_client import AnswerReader
from carpool.lab.load.tally import Answer, Kind
from carpool.lab.load.token_times import TokenTimes


def stream(*events: Any, end: str = "") -> TokenTimes:
    found = TokenTimes()
    for number, event in enumerate(events):
        found.feed(b"data: %b\n\n" % json.dumps(event).encode(), float(number))
    found.feed(end.encode(), 99.0)
    return found


def piece(text: str, index: int) -> dict[str, Any]:
    return {"text": text, "index": index}


def chunk(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {} if text is None else {"content": text}}]}


@pytest.mark.parametrize(
    "found",
    [
        stream(piece("a", 0), piece("b", 1), {"done": True, "text": "ab"}),
        stream(chunk("a"), chunk("b"), chunk(None), end="data: [DONE]\n\n"),
        stream({"text_output": "a"}, {"text_output": "b"}, {"text_output": "", "finish_reason": "stop"}),
    ],
)
def test_whole_streams(found: TokenTimes) -> None:
    assert found.end() == ((0.0, 1.0), "", False)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (stream(piece("a", 0)), "incomplete"),
        (stream(chunk("a")), "incomplete"),
        (stream(piece("a", 0), piece("b", 2), {"done": True, "text": "ab"}), "out-of-order"),
        (stream(piece("a", 0), {"done": True, "text": "ab"}), "wrong-text"),
        (stream({"done": True, "text": ""}, piece("a", 0)), "after-the-end"),
        (stream(piece("a", 0), {"error": "no", "reason": "model-error", "status": 500}), "model-error"),
        (stream({"error": {"message": "no", "code": "overload"}}), "overload"),
        (stream(7), "malformed"),
        (stream(end="data: {\n\n"), "malformed"),
        (stream(piece("a", 0), {"done": True, "text": "a"}, end="data: {"), "incomplete"),
    ],
)
def test_what_is_wrong_with_others(found: TokenTimes, fault: str) -> None:
    assert found.end().fault == fault


def answer(body: bytes, kind: bytes = b"text/event-stream") -> Answer | None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    return AnswerReader(lambda: 1.5).feed(head + body)


def test_answers_carry_the_times_of_their_pieces() -> None:
    body = b'data: {"text":"a","index":0}\n\ndata: {"done":true,"text":"a"}\n\n'
    found = answer(body)
    assert found is not None
    assert found.stream is not None
    assert (found.kind, found.stream.times) == (Kind.ANSWERED, (1.5,))
    broken = answer(body[:-33])
    assert broken is not None
    assert (broken.kind, broken.reason) == (Kind.FAILED, "incomplete")
    document = answer(b"{}", b"application/json")
    assert document is not None
    assert document.reason == "no-stream"
