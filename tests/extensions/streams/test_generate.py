"""Triton's generate extension: cases after its published tests, rewritten, and what clients may do wrong."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from carpool.errors import ModelError
from carpool.frontend.http.event_stream import MOST_UNREAD
from carpool.types import Datatype, TensorSpec
from frontend.fake_door import FakeCall, FakeModel
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import PATIENCE, post
from waiting import until

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
    refused(front, {"PROMPT": True, "STREAM": 123}, "attempt to access JSON non-string as string")
    refused(front, {"PROMPT": {"USER": "x"}, "STREAM": True}, "attempt to access JSON non-string as string")
    refused(front, {**ASKED, "REPETITION": True}, "attempt to access JSON non-number as number")
    refused(front, {**ASKED, "PARAMS": {"a": 0}}, "parameter 'PARAMS' has invalid type")
    refused(front, {**ASKED, "parameters": 1}, "Expected JSON object for keyword: 'parameters'")
    refused(
        front,
        {**ASKED, "parameters": {"a": [1]}},
        "Converting keyword: 'parameters': parameter 'a' has invalid type",
    )
    refused(front, "[]", "JSON object")
    refused(front, "{", "failed to parse the request JSON buffer")
    refused(front, "[" * 5000, "JSON")
    assert not front.door.calls


@pytest.mark.parametrize(
    ("body", "count"),
    [({}, 0), ({"abc": 123}, 0), ({"PROMPT": "hello"}, 1), ({"STREAM": False, "other": "thing"}, 1)],
)
def test_how_many_inputs_are_missing(front: FrontEnd, body: Any, count: int) -> None:
    refused(front, body, f"expected number of inputs between 2 and 4 but got {count}")


@pytest.mark.parametrize(
    ("twice", "first"),
    [
        ('"PROMPT": "b"', "PROMPT"),
        ('"STREAM": false', "STREAM"),
        ('"PROMPT": "b", "STREAM": false', "PROMPT"),
        ('"STREAM": false, "PROMPT": "b"', "STREAM"),
    ],
)
def test_of_inputs_that_are_there_twice_the_first_is_named(front: FrontEnd, twice: str, first: str) -> None:
    body = f'{{"PROMPT": "a", "STREAM": true, {twice}}}'
    refused(front, body, f"input '{first}' already exists in request")


@pytest.mark.parametrize(
    "more",
    [
        '"far": 118059162071741130342',
        '"far": -9223372036854775809',
        f'"far": {"9" * 5000}',
        '"far": 1e999',
        '"far": NaN',
        '"far": null',
        '"far": {"a": {"b": {}}}',
        f'"far": {"[" * 100_000}{"]" * 100_000}',
        '"far": "\\ud800"',
        '"id": null',
        '"id": ["x"]',
        '"REPETITION": 4294967296',
        '"REPETITION": -1',
        '"REPETITION": 1.5',
        '"REPETITION": [1, 2]',
        '"REPETITION": [[1]]',
        '"REPETITION": []',
        '"timeout": "soon"',
        '"priority": -1',
        '"sequence_id": -1',
        '"sequence_id": 1e30',
        '"sequence_start": "yes"',
        '"triton_enable_empty_final_response": 1',
    ],
)
def test_hostile_fields(front: FrontEnd, more: str) -> None:
    for route in ("generate", "generate_stream"):
        status, kind, said = ask(front, route, f'{{"PROMPT": "a", "STREAM": true, {more}}}')
        assert (status, kind) == (400, "application/json"), said
    assert not front.door.calls
    assert ask(front, "generate", ASKED)[0] == 200


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ('"far": 118059162071741130342', "far"),
        ('"parameters": {"far": -9223372036854775809}', "far"),
        ('"REPETITION": 118059162071741130342', "REPETITION"),
    ],
)
def test_numbers_that_are_too_long_are_named(front: FrontEnd, more: str, field: str) -> None:
    _, _, said = ask(front, "generate", f'{{"PROMPT": "a", "STREAM": true, {more}}}')
    told = json.loads(said)
    assert told["field"] == field
    assert "64 bits" in told["error"]


@pytest.mark.parametrize(("count", "answered"), [(1000, 200), (7000, 400), (150_000, 413)])
def test_a_great_many_parameters(front: FrontEnd, count: int, answered: int) -> None:
    """They are read up to their number and within the limit of a body, and no further."""
    body = json.dumps({**ASKED, "parameters": {f"p{n}": n for n in range(count)}})
    status, _, said = ask(front, "generate", body)
    assert status == answered, said


def test_a_prompt_that_is_too_long(front: FrontEnd) -> None:
    for prompt in ("x" * (1 << 20), ["x"] * (1 << 19)):
        status, kind, said = ask(front, "generate", {"PROMPT": prompt, "STREAM": True})
        assert (status, kind) == (413, "application/json")
        assert "bytes" in json.loads(said)["error"]
    assert not front.door.calls


def test_the_id_is_told_if_there_is_one(front: FrontEnd) -> None:
    for given, told in (("42", "42"), (42, "42"), ("", None), (None, None)):
        asked = ASKED if given is None else {**ASKED, "id": given}
        assert json.loads(ask(front, "generate", asked)[2]).get("id") == told
        assert [one.get("id") for one in events(front, asked)] == [told]


def test_an_output_without_elements_is_an_empty_list(front: FrontEnd) -> None:
    with ThreadPoolExecutor(1) as thread:
        front.door.held = True
        asked = thread.submit(ask, front, "generate", ASKED)
        until(lambda: bool(front.door.calls))
        call = front.door.calls[-1]
        front.server.call(call.say, {"TEXT": np.zeros((1, 0), object)})
        front.server.call(call.finish_parts)
        assert json.loads(asked.result(PATIENCE)[2])["TEXT"] == []


def test_many_at_once(front: FrontEnd) -> None:
    with ThreadPoolExecutor(20) as threads:
        one = [threads.submit(ask, front, "generate", {**ASKED, "id": n}) for n in range(50)]
        some = [threads.submit(events, front, {**ASKED, "id": n, "REPETITION": 3}) for n in range(50)]
        assert [json.loads(asked.result()[2])["id"] for asked in one] == [str(n) for n in range(50)]
        assert [[event["id"] for event in asked.result()] for asked in some] == [
            [str(n)] * 3 for n in range(50)
        ]


def test_what_is_no_input_is_a_parameter(front: FrontEnd) -> None:
    events(front, {**ASKED, "temperature": 0.5, "parameters": {"top_k": 3, "name": "x", "flag": True}})
    found = front.door.calls[-1].head.options.custom
    assert dict(found) == {"temperature": 0.5, "top_k": 3, "name": "x", "flag": True}


def test_an_error_is_a_status_or_the_last_event(front: FrontEnd) -> None:
    """Of the model's, that is: who is not let in, or asks for what is not there, has a document."""
    asked = {**ASKED, "REPETITION": 0, "FAIL_LAST": True}
    status, kind, said = ask(front, "generate_stream", asked)
    assert (status, kind) == (500, "text/event-stream; charset=utf-8")
    assert read_events(said) == [{"error": "An Error Occurred"}]
    assert ask(front, "generate", asked)[:2] == (500, "application/json")
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
