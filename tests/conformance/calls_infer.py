"""`infer` in all its forms, and `async_infer`."""

from __future__ import annotations

import http.client
import json
import queue
from typing import Any

import ml_dtypes
import numpy as np

from conformance.flavours import (
    GRPC,
    HTTP,
    INVALID,
    PATIENCE_S,
    REFUSED,
    UNKNOWN,
    UNSUPPORTED,
    Array,
    Flavour,
    Session,
    header_of,
)
from conformance.models import LABELS
from conformance.table import case, expect

_SYNC = {Flavour.HTTP, Flavour.GRPC}


def numbers(*values: float) -> dict[str, Array]:
    """One row for `numbers`, whose outputs are its double and its total."""
    return {"x": np.array([values], np.float32)}


def _scores(result: Any) -> list[list[float]]:
    found: list[list[float]] = result.as_numpy("scores").round(3).tolist()
    return found


_COUNTING = [float(number) for number in range(10)]

# ---- plain requests


@case("infer", "a picture as bytes", "ten scores; model, version and id")
def picture(session: Session) -> str:
    result = session.infer("vision", session.ones(), request_id="picture-1")
    expect(_scores(result), [_COUNTING])
    expect(header_of(result), {"model_name": "vision", "model_version": "1", "id": "picture-1"})
    return "[[0 … 9]], id picture-1"


@case("infer", "five pictures in one request", "five rows")
def batch(session: Session) -> str:
    result = session.infer("vision", session.ones(5))
    expect(_scores(result), [_COUNTING] * 5)
    return f"shape {list(result.as_numpy('scores').shape)}"


@case("infer", "the numbers as JSON, both ways", "the same answer", HTTP)
def as_json(session: Session) -> str:
    tensor = session.tensor("x", numbers(1, 2, 3)["x"], binary_data=False)
    wanted = [session.output("double", binary_data=False)]
    result = session.call("infer", "numbers", [tensor], outputs=wanted)
    expect(result.get_output("double")["data"], [2, 4, 6])
    return "double [2, 4, 6]"


@case("infer", "one output of two; none listed", "that one; all")
def outputs(session: Session) -> str:
    one = session.infer("numbers", numbers(1, 2, 3), outputs=[session.output("total")])
    expect((one.as_numpy("total").tolist(), one.as_numpy("double")), ([[6]], None))
    both = session.infer("numbers", numbers(1, 2, 3))
    expect((both.as_numpy("double").tolist(), both.as_numpy("total").tolist()), ([[2, 4, 6]], [[6]]))
    return "total; double, total"


@case("infer", "a version by its number", "that version answers")
def version(session: Session) -> str:
    found = [
        header_of(session.infer("numbers", numbers(1, 2, 3), model_version=asked))["model_version"]
        for asked in ("1", "2", "")
    ]
    expect(found, ["1", "2", "2"])
    return "1, 2; the newest without one"


@case("infer", "a Python model, a model that only takes time", "answers")
def other_backends(session: Session) -> str:
    grey = {"image": np.full((2, 64, 64, 3), 7, np.uint8)}
    expect(session.infer("mean", grey).as_numpy("mean").tolist(), [[7, 7, 7]] * 2)
    expect(session.infer("pretend", numbers(1, 2, 3)).as_numpy("y").shape, (1, 2))
    return "python, fake"


# ---- datatypes and extensions


@case("infer", "BYTES", "the same strings")
def strings(session: Session) -> str:
    sent = np.array([[b"ab", b"", "ü".encode()]], np.object_)
    expect(session.infer("same-BYTES", {"x": sent}).as_numpy("y").tolist(), sent.tolist())
    return "3 strings, one empty"


@case("infer", "FP16", "the same numbers")
def half(session: Session) -> str:
    sent = np.array([[0.5, -65504, np.inf]], np.float16)
    expect(session.infer("same-FP16", {"x": sent}).as_numpy("y").tolist(), sent.tolist())
    return "0.5, −65504, ∞"


@case("infer", "BF16", "the same numbers")
def brain(session: Session) -> str:
    sent = np.array([[0.5, -3, np.inf]], ml_dtypes.bfloat16)
    tensor = session.tensor("x", sent, "BF16")
    answer = session.call("infer", "same-BF16", [tensor]).as_numpy("y")
    expect(answer.astype(np.float32).tolist(), sent.astype(np.float32).tolist())
    return "0.5, −3, ∞"


@case("infer", "classification, the best 2", "value:index:label")
def classification(session: Session) -> str:
    result = session.infer("vision", session.ones(), outputs=[session.output("scores", class_count=2)])
    found = [text.decode() for text in result.as_numpy("scores")[0]]
    expect(found, [f"9.000000:9:{LABELS[9]}", f"8.000000:8:{LABELS[8]}"])
    return ", ".join(found)


@case("infer", "gzip and deflate", "the same answer")
def compressed(session: Session) -> str:
    both = ("request_compression_algorithm", "response_compression_algorithm")
    names = both if session.flavour.is_http else ("compression_algorithm",)
    for algorithm in ("gzip", "deflate"):
        given = dict.fromkeys(names, algorithm)
        expect(_scores(session.infer("vision", session.ones(), **given)), [_COUNTING])
    return "[[0 … 9]] twice"


# ---- options


@case("infer", "headers: a source and a deadline of 20 s", "an answer")
def headers(session: Session) -> str:
    given = {"x-carpool-source": "camera 7", "x-carpool-deadline-ms": "20000"}
    expect(_scores(session.infer("vision", session.ones(), headers=given)), [_COUNTING])
    return "[[0 … 9]]"


@case("infer", "query_params", "ignored, an answer", HTTP)
def query(session: Session) -> str:
    expect(_scores(session.infer("vision", session.ones(), query_params={"a": "1"})), [_COUNTING])
    return "[[0 … 9]]"


@case("infer", "priority 1, timeout 5 s, a custom parameter", "an answer")
def options(session: Session) -> str:
    given: dict[str, Any] = {"priority": 1, "timeout": 5_000_000, "parameters": {"tag": "a"}}
    expect(_scores(session.infer("vision", session.ones(), **given)), [_COUNTING])
    return "[[0 … 9]]"


@case("infer", "timeout 1 µs, under a promise", "refused, 429 / RESOURCE_EXHAUSTED")
def hopeless(session: Session) -> str:
    tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
    return session.refused(REFUSED, "deadline", "infer", "pretend", tensors, timeout=1)


@case("infer", "client_timeout 50 ms, a model that takes 400", "the client gives up", GRPC)
def client_timeout(session: Session) -> str:
    tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
    error = session.failure("infer", "slow", tensors, client_timeout=0.05)
    expect(error.status(), "StatusCode.DEADLINE_EXCEEDED")
    return "DEADLINE_EXCEEDED"


# ---- refusals


@case("infer", "an unknown model", "refused, 404 / NOT_FOUND")
def unknown_model(session: Session) -> str:
    tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
    return session.refused(UNKNOWN, "did you mean 'numbers'", "infer", "number", tensors)


@case("infer", "a wrong shape", "refused, 400 / INVALID_ARGUMENT")
def wrong_shape(session: Session) -> str:
    tensors = [session.tensor("x", numbers(1, 2, 3, 4)["x"])]
    return session.refused(INVALID, "Expected [-1,3], got [1,4]", "infer", "numbers", tensors)


@case("infer", "two sequences in turns, their ids a number and a text", "each has its own sum")
def sequences(session: Session) -> str:
    name = session.flavour.value
    said: list[float] = []
    for number in range(4):
        flags = {"sequence_start": number == 0, "sequence_end": number == 3}
        for identity in (len(name), name):
            x = np.full((1, 1), number + (identity == name), np.float32)
            said.append(session.infer("sums", {"x": x}, sequence_id=identity, **flags).as_numpy("y").item())
    expect(said, [0, 1, 1, 3, 3, 6, 6, 10])
    tensors = [session.tensor("x", np.ones((1, 1), np.float32))]
    session.refused(INVALID, "must specify the START flag", "infer", "sums", tensors, sequence_id=name)
    return "0, 1, 3, 6 and 1, 3, 6, 10; after its end 400"


@case("infer", "sequence_id 7, a model without sequences", "refused, 501 / UNIMPLEMENTED")
def sequence(session: Session) -> str:
    tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
    given: dict[str, Any] = {"sequence_id": 7, "sequence_start": True}
    return session.refused(UNSUPPORTED, "sequence", "infer", "numbers", tensors, **given)


@case("infer", "a decoupled model", "refused, 501 / UNIMPLEMENTED")
def many_answers(session: Session) -> str:
    tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
    return session.refused(UNSUPPORTED, "decoupled", "infer", "counts", tensors)


@case("POST …/generate", "the route of Triton's generate extension", "200", HTTP)
def generate(session: Session) -> str:
    status, said = _posted(session, "numbers/generate", b'{"x": [1, 2, 3]}')
    expect(status, 200)
    expect(json.loads(said)["model_name"], "numbers")
    return "200"


@case("POST …/generate_stream", "a decoupled model, three answers", "200, an event for each", HTTP)
def generate_stream(session: Session) -> str:
    status, said = _posted(session, "counts/generate_stream", b'{"x": [3, 0, 0]}')
    expect(status, 200)
    events = [json.loads(line[5:]) for line in said.splitlines() if line.startswith("data:")]
    expect([event["total"] for event in events], [0, 1, 2])
    return "200, 0, 1, 2"


def _posted(session: Session, path: str, body: bytes) -> tuple[int, str]:
    host, _, port = session.http_url.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        connection.request("POST", f"/v2/models/{path}", body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


# ---- without waiting


@case("async_infer", "eight at once", "eight answers, each to its own request", _SYNC)
def at_once(session: Session) -> str:
    inputs = [[session.tensor("x", numbers(n, 0, 0)["x"])] for n in range(8)]
    totals = (_futures if session.flavour.is_http else _callbacks)(session, inputs)
    expect(totals, {str(n): float(n) for n in range(8)})
    return "8 answers"


def _futures(session: Session, inputs: list[list[Any]]) -> dict[str, float]:
    pending = [session.client.async_infer("numbers", one) for one in inputs]
    results = [request.get_result(timeout=PATIENCE_S) for request in pending]
    return {str(n): result.as_numpy("total").item() for n, result in enumerate(results)}


def _callbacks(session: Session, inputs: list[list[Any]]) -> dict[str, float]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for n, one in enumerate(inputs):
        session.client.async_infer(
            "numbers", one, lambda result, error: answers.put((result, error)), request_id=str(n)
        )
    found: dict[str, float] = {}
    for _ in inputs:
        result, error = answers.get(timeout=PATIENCE_S)
        expect(error, None)
        found[header_of(result)["id"]] = result.as_numpy("total").item()
    return found


@case("async_infer", "cancelled while it waits", "CANCELLED, and others are answered", {Flavour.GRPC})
def cancelled(session: Session) -> str:
    errors: queue.Queue[Any] = queue.Queue()
    tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
    call = session.client.async_infer("slow", tensors, lambda result, error: errors.put(error))
    call.cancel()
    error = errors.get(timeout=PATIENCE_S)
    expect(error.status(), "StatusCode.CANCELLED")
    expect(session.infer("numbers", numbers(1, 2, 3)).as_numpy("total").item(), 6)
    return "CANCELLED"


# ---- bodies for other HTTP libraries


def _post_infer(session: Session) -> tuple[bytes, int, bytes]:
    body, length = session.client.generate_request_body([session.tensor("x", numbers(1, 2, 3)["x"])])
    host, _, port = session.http_url.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        header = {"Inference-Header-Content-Length": str(length)}
        connection.request("POST", "/v2/models/numbers/infer", body, header)
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    expect(response.status, 200)
    return bytes(body), int(response.headers["Inference-Header-Content-Length"]), answer


@case("generate_request_body", "sent by another HTTP library", "200", HTTP)
def made_body(session: Session) -> str:
    body, _, answer = _post_infer(session)
    return f"200, {len(body)} bytes there, {len(answer)} back"


@case("parse_response_body", "of an answer that another library got", "the outputs", HTTP)
def parsed_body(session: Session) -> str:
    _, length, answer = _post_infer(session)
    result = session.client.parse_response_body(answer, header_length=length)
    expect(result.as_numpy("double").tolist(), [[2, 4, 6]])
    return "double [2, 4, 6]"
