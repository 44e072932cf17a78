"""Triton's generate extension: cases after its published tests, rewritten, and what clients may do wrong."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from carpool.errors import ModelError
from carpool.frontend.http.event_stream import MOST_UNREAD
from carpool.types import Datatype, TensorSpec
from frontend.fake_door import FakeCall, FakeModel
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import PATIENCE, post, until

ASKED = {"PROMPT": "hello world", "STREAM": True}


def answers(inputs: Any) -> Any:
    text = inputs["PROMPT"].ravel()[0]
    count = int(inputs["REPETITION"].ravel()[0]) if "REPETITION" in inputs else 1
    for _ in range(count):
        yield {"TEXT": [[text]]}
    if "FAIL_LAST" in inputs:
        raise ModelError("An Error Occurred")


LLM = FakeModel(
    "mock_llm",
    [
        TensorSpec("PROMPT", Datatype.BYTES, (1,)),
        TensorSpec("STREAM", Datatype.BOOL, (1,)),
        TensorSpec("REPETITION", Datatype.UINT32, (1,), True),
        TensorSpec("FAIL_LAST", Datatype.BOOL, (1,), True),
    ],
    [TensorSpec("TEXT", Datatype.BYTES, (-1,))],
    answers,
    mode="eager",
    decoupled=True,
)
ONE = FakeModel(
    "one",
    [TensorSpec("x", Datatype.FP32, (-1,))],
    [TensorSpec("y", Datatype.FP32, (-1,))],
    lambda inputs: {"y": inputs["x"] * 2},
)


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end(LLM, ONE) as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.door.calls.clear()
    yield shared
    shared.door.held = False
    until(lambda: not shared.door.slots_in_use)


def ask(front: FrontEnd, route: str, body: Any, model: str = "mock_llm") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", front.server.port, timeout=PATIENCE)
    try:
        text = body if isinstance(body, str) else json.dumps(body)
        connection.request("POST", f"/v2/models/{model}/{route}", text)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read()
    finally:
        connection.close()


def events(front: FrontEnd, body: Any, model: str = "mock_llm") -> list[dict[str, Any]]:
    status, kind, said = ask(front, "generate_stream", body, model)
    assert (status, kind) == (200, "text/event-stream; charset=utf-8")
    return read_events(said)


def read_events(said: bytes) -> list[dict[str, Any]]:
    pieces = said.decode().split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces)
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def refused(front: FrontEnd, body: Any, words: str) -> None:
    for route in ("generate", "generate_stream"):
        status, kind, said = ask(front, route, body)
        assert status >= 400
        assert kind == "application/json"
        assert words in json.loads(said)["error"]


def test_one_answer(front: FrontEnd) -> None:
    status, kind, said = ask(front, "generate", {**ASKED, "id": "7"})
    assert (status, kind) == (200, "application/json")
    assert json.loads(said) == {
        "model_name": "mock_llm",
        "model_version": "1",
        "id": "7",
        "TEXT": "hello world",
    }
    assert ask(front, "../mock_llm/versions/1/generate", ASKED)[0] in (200, 404)
    assert len(events(front, ASKED)) == 1


def test_several_answers_are_as_many_events(front: FrontEnd) -> None:
    found = events(front, {"PROMPT": ["hello"], "STREAM": True, "REPETITION": 3})
    assert [one["TEXT"] for one in found] == ["hello"] * 3
    assert len(events(front, {**ASKED, "REPETITION": 10_000})) == 10_000


@pytest.mark.parametrize("count", [0, 2])
def test_generate_is_for_exactly_one(front: FrontEnd, count: int) -> None:
    assert len(events(front, {**ASKED, "REPETITION": count})) == count
    status, _, said = ask(front, "generate", {**ASKED, "REPETITION": count})
    assert status == 400
    assert "generate expects model to produce exactly 1 response" in json.loads(said)["error"]


def test_what_is_missing_or_of_the_wrong_kind(front: FrontEnd) -> None:
    refused(front, {"PROMPT": 1, "STREAM": False}, "attempt to access JSON non-string as string")
    refused(front, {"PROMPT": "x", "STREAM": "no"}, "attempt to access JSON non-boolean as boolean")
    refused(front, {"STREAM": 123, "PROMPT": True}, "attempt to access JSON non-boolean as boolean")
    refused(front, {"PROMPT": {"USER": "x"}, "STREAM": True}, "attempt to access JSON non-string as string")
    refused(front, {**ASKED, "REPETITION": True}, "attempt to access JSON non-number as number")
    refused(front, {**ASKED, "PARAMS": {"a": 0}}, "parameter 'PARAMS' has invalid type")
    refused(front, {**ASKED, "parameters": 1}, "Expected JSON object for keyword: 'parameters'")
    refused(front, {**ASKED, "parameters": {"a": [1]}}, "parameter 'a' has invalid type")
    refused(
        front, '{"PROMPT": "a", "STREAM": true, "PROMPT": "b"}', "input 'PROMPT' already exists in request"
    )
    refused(front, "[]", "JSON object")
    refused(front, "{", "failed to parse the request JSON buffer")
    refused(front, "[" * 5000, "JSON")
    refused(front, {"PROMPT": "hello"}, "1")
    refused(front, {"abc": 123}, "0")
    refused(front, {**ASKED, "far": 1 << 70}, "")
    assert not front.door.calls


def test_what_is_no_input_is_a_parameter(front: FrontEnd) -> None:
    events(front, {**ASKED, "temperature": 0.5, "parameters": {"top_k": 3, "name": "x", "flag": True}})
    found = front.door.calls[-1].head.options.custom
    assert dict(found) == {"temperature": 0.5, "top_k": 3, "name": "x", "flag": True}


def test_an_error_is_a_status_or_the_last_event(front: FrontEnd) -> None:
    status, kind, said = ask(front, "generate_stream", {**ASKED, "REPETITION": 0, "FAIL_LAST": True})
    assert (status, kind) == (500, "application/json")
    assert "An Error Occurred" in json.loads(said)["error"]
    found = events(front, {**ASKED, "REPETITION": 1, "FAIL_LAST": True})
    assert [one.get("TEXT", one.get("error")) for one in found] == ["hello world", "An Error Occurred"]


def test_models_of_one_answer_are_asked_in_the_same_way(front: FrontEnd) -> None:
    status, _, said = ask(front, "generate", {"x": [1, 2.5]}, "one")
    assert status == 200
    assert json.loads(said)["y"] == [2, 5]
    assert [one["y"] for one in events(front, {"x": 3}, "one")] == [6]


def test_infer_is_not_for_models_of_many_answers(front: FrontEnd) -> None:
    given = [
        {"name": "PROMPT", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]},
        {"name": "STREAM", "datatype": "BOOL", "shape": [1, 1], "data": [True]},
    ]
    status, _, said = ask(front, "infer", {"inputs": given})
    assert status == 501
    words = "HTTP end point doesn't support models with decoupled transaction policy"
    assert json.loads(said)["error"] == words


def stream(front: FrontEnd, size: int = 1 << 16) -> tuple[socket.socket, FakeCall]:
    """One that the test goes on with."""
    front.door.held = True
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", front.server.port))
    sock.sendall(post("/v2/models/mock_llm/generate_stream", json.dumps(ASKED).encode()))
    until(lambda: bool(front.door.calls))
    return sock, front.door.calls[-1]


def test_events_come_as_they_are_made_and_the_connection_goes_on(front: FrontEnd) -> None:
    sock, call = stream(front)
    with sock:
        heard = b""
        for number in range(3):
            front.server.call(call.say, {"TEXT": [[f"n{number}"]]})
            while b"n%d" % number not in heard:
                heard += sock.recv(1 << 16)
        front.server.call(call.finish_parts)
        while not heard.endswith(b"0\r\n\r\n"):
            heard += sock.recv(1 << 16)
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_is_heard_of_before_the_next_answer(front: FrontEnd) -> None:
    sock, call = stream(front)
    with sock:
        front.server.call(call.say, {"TEXT": [["a"]]})
    until(lambda: call.cancelled)


def test_a_client_that_does_not_read_is_cut_off(front: FrontEnd) -> None:
    sock, call = stream(front, 4096)
    with sock:
        piece = {"TEXT": [["x" * (1 << 18)]]}
        for _ in range(2 * MOST_UNREAD // (1 << 18) + 64):
            if call.cancelled:
                break
            front.server.call(call.say, piece)
        assert call.cancelled


def test_over_http_1_0_the_end_of_the_connection_is_the_end_of_the_stream(front: FrontEnd) -> None:
    front.door.held = True
    with socket.create_connection(("127.0.0.1", front.server.port), timeout=PATIENCE) as sock:
        body = json.dumps(ASKED).encode()
        sock.sendall(
            b"POST /v2/models/mock_llm/generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        until(lambda: bool(front.door.calls))
        front.server.call(front.door.calls[-1].say, {"TEXT": [["a"]]})
        front.server.call(front.door.calls[-1].finish_parts)
        heard = b""
        while piece := sock.recv(1 << 16):
            heard += piece
    assert b"chunked" not in heard
    assert heard.rpartition(b"\r\n\r\n")[2].startswith(b"data: ")
