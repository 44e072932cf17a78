"""Every way to be refused: its status, its reason, and what the connection does afterwards."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from carpool import errors
from carpool.errors import (
    Cancelled,
    CarpoolError,
    DeadlineExceeded,
    Gone,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    Replaced,
    TooLarge,
    Unavailable,
    Unsupported,
)
from carpool.frontend.http.exchange import STATUSES, fields_of, status_of
from frontend.http.front_end import (
    BINARY_IMAGE,
    IMAGE,
    FrontEnd,
    error_of,
    front_end,
    image_body,
    infer,
    infer_body,
    outputs_of,
)
from frontend.http.harness import Client, chunked, post
from waiting import until

PATH = "/v2/models/image/infer"

TABLE = [
    (Refused("full", retry_after_s=0.25, predicted_ms=80.0), 429, "overload"),
    (Refused("given up", reason="given-up", retry_after_s=2.5), 429, "given-up"),
    (Replaced("a newer frame came"), 409, "replaced"),
    (DeadlineExceeded("too late"), 504, "deadline"),
    (DeadlineExceeded("the model ran too long", reason="execution-timeout"), 504, "execution-timeout"),
    (Unavailable("Exceeds maximum queue size", reason="queue-full"), 503, "queue-full"),
    (Unavailable("Request timeout expired", reason="timeout"), 503, "timeout"),
    (Unavailable("the engine was restarted", reason="engine-restarted"), 503, "engine-restarted"),
    (InvalidInput("no", field="inputs"), 400, "invalid-input"),
    (NotFound("it was unloaded"), 404, "not-found"),
    (Gone("it was dropped"), 410, "gone"),
    (TooLarge("much too much"), 413, "too-large"),
    (Unsupported("not here"), 501, "unsupported"),
    (ModelError("output 'scores' has the wrong shape"), 500, "model-error"),
    (CarpoolError("a bug"), 500, "internal"),
]


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[Client]:
    with front.connect() as connected:
        yield connected


@pytest.mark.parametrize(("error", "status", "reason"), TABLE, ids=[error.message for error, _, _ in TABLE])
def test_errors_of_the_engine(
    front: FrontEnd, client: Client, error: CarpoolError, status: int, reason: str
) -> None:
    front.door.held = True
    body, field = image_body()
    client.send(post(PATH, body, field))
    call = front.wait_for_call()
    front.run(lambda: call.finish(error))
    response = client.response()
    assert response.status == status
    document = error_of(response)
    assert (document["error"], document["reason"]) == (error.message, reason)
    assert ("retry-after" in response.fields) is (status in (429, 503))
    assert response.fields["server-timing"].startswith("decode;dur=")
    assert response.fields["x-content-type-options"] == "nosniff"
    until(lambda: call.released)
    front.door.held = False
    assert infer(client, "image", image_body()).status == 200, "the connection goes on"


def test_every_kind_of_error_has_a_status() -> None:
    kinds = {kind for kind in vars(errors).values() if type(kind) is type and issubclass(kind, CarpoolError)}
    clients = {errors.Unreachable}
    assert kinds - set(STATUSES) - clients == {CarpoolError, ModelError}, "only these are 500"

    class Finer(NotFound):
        pass

    assert status_of(Finer("x")) == 404
    assert status_of(Cancelled("left")) == 499


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, 1), (0.2, 1), (1.0, 1), (1.2, 2), (float("inf"), 1), (1e9, 3600)]
)
def test_retry_after_is_in_whole_seconds(seconds: float, shown: int) -> None:
    assert b"Retry-After: %d\r\n" % shown in fields_of(Refused("no", retry_after_s=seconds))


def test_no_retry_after_where_a_retry_would_not_help() -> None:
    assert b"Retry-After" not in fields_of(Refused("no", retry_after_s=None))


def test_the_gate_refuses_before_the_body(front: FrontEnd, client: Client) -> None:
    front.door.refusal = Refused("image is saturated", predicted_ms=93.5, retry_after_s=0.125)
    body, field = image_body()
    head = post(PATH, body, field)[: -len(body)]
    response = client.send(head).response()  # not a byte of the body is there
    assert (response.status, response.fields["retry-after"]) == (429, "1")
    assert error_of(response) == {
        "error": "image is saturated",
        "reason": "overload",
        "predicted_ms": 93.5,
        "retry_after_s": 0.125,
    }
    assert "connection" not in response.fields
    front.door.refusal = None
    client.send(body)  # is read past
    assert outputs_of(infer(client, "image", image_body())) == {"scores": [15.0, 1.0, 2.0, 3.0]}
    assert front.count("image", "carpool_shed_total", '1",reason="overload') == 1
    assert front.door.turned == [("image", "overload", 1, "")]


def test_who_is_too_late_when_the_body_is_there_is_refused_without_the_engine(
    front: FrontEnd, client: Client
) -> None:
    front.door.late_refusal = Refused("no")
    assert infer(client, "image", image_body()).status == 429
    assert not front.door.calls
    front.until_slots_are_back()
    assert front.door.turned == [("image", "overload", 1, "")]
    assert infer(client, "image", image_body(parameters={"priority": 1})).status == 200
    front.door.late_refusal = None
    assert infer(client, "image", image_body()).status == 200


def test_many_refusals_keep_the_connection(front: FrontEnd, client: Client) -> None:
    front.door.refusal = Refused("no")
    for _ in range(50):
        assert infer(client, "image", image_body()).status == 429
    assert front.server.server.connections == 1
    assert not front.door.calls


def test_expecting_clients_hear_the_refusal_instead_of_continue(front: FrontEnd, client: Client) -> None:
    front.door.refusal = Refused("no")
    body, field = image_body()
    whole = post(PATH, body, field + b"Expect: 100-continue\r\n")
    assert client.send(whole[: -len(body)]).response().status == 429


def failures_of(front: FrontEnd, model: str) -> float:
    counted = f'nv_inference_request_failure{{model="{model}"'
    found = [line for line in front.metrics().splitlines() if line.startswith(counted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_not_serving(front: FrontEnd, client: Client) -> None:
    """It is counted at the model of the last catalogue: the failures around an engine's end add up."""
    front.door.serving = False
    before = failures_of(front, "image")
    for model in ("image", "nothing"):
        response = infer(client, model, image_body())
        assert (response.status, response.fields["retry-after"]) == (503, "1")
        assert error_of(response)["reason"] == "not-serving"
    assert failures_of(front, "image") == before + 1


@pytest.mark.parametrize("model", ["nothing", "image/versions/9", "image/versions/one"])
def test_unknown(client: Client, model: str) -> None:
    response = infer(client, model, image_body())
    assert response.status == 404
    assert error_of(response)["reason"] in ("unknown-model", "unknown-version")
    assert client.get("/v2").status == 200


def test_no_slots() -> None:
    with front_end(slots=1) as front, front.connect() as client:
        front.door.held = True
        body, field = image_body()
        client.send(post(PATH, body, field))
        call = front.wait_for_call()
        with front.connect() as other:
            for sent in (image_body(), infer_body([{**BINARY_IMAGE, "parameters": {}, "data": [1] * 6}])):
                response = infer(other, "image", sent)
                assert (response.status, response.fields["retry-after"]) == (503, "1")
                assert error_of(response)["reason"] == "no-slots"
        front.run(call.finish)
        assert client.response().status == 200
        assert front.door.turned == 2 * [("image", "no-slots", 1, "")]


def test_a_door_that_can_never_hold_it(
    front: FrontEnd, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(size: int) -> None:
        raise TooLarge(f"{size} bytes are more than a slot holds")

    monkeypatch.setattr(front.door, "_allocate", too_large)
    assert infer(client, "image", image_body()).status == 413
    packed = infer(client, "image", infer_body([{**BINARY_IMAGE, "parameters": {}, "data": [1] * 6}]))
    assert packed.status == 413
    assert client.get("/v2").status == 200


def test_too_large() -> None:
    with front_end(max_body_bytes=1 << 20) as front, front.connect() as client:
        response = client.send(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" % PATH.encode()
        ).response()
        assert response.status == 413
        assert error_of(response)["reason"] == "too-large"


def test_a_gzip_bomb(front: FrontEnd, client: Client) -> None:
    bomb = gzip.compress(bytes(50_000_000))
    response = client.post(PATH, bomb, b"Content-Encoding: gzip\r\nInference-Header-Content-Length: 0\r\n")
    assert response.status == 413
    assert error_of(response)["reason"] == "too-large"
    front.until_slots_are_back()


def test_an_unknown_content_encoding(client: Client) -> None:
    response = client.post(PATH, b"x", b"Content-Encoding: br\r\n")
    assert response.status == 415
    error_of(response)


def test_nan_in_json_names_the_output(front: FrontEnd, client: Client) -> None:
    response = infer(client, "nan", infer_body([]))
    assert response.status == 500
    assert "output 'y'" in error_of(response)["error"]
    until(lambda: front.door.calls[-1].released)
    assert front.count("nan", "nv_inference_request_failure", '1",reason="BACKEND') == 1


def test_a_model_that_raises(client: Client) -> None:
    assert error_of(infer(client, "broken", infer_body([])))["reason"] == "model-error"


def test_a_bug_in_the_answer(front: FrontEnd, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """The door calls us: nothing may escape into its loop."""
    front.door.held = True
    body, field = image_body()
    client.send(post(PATH, body, field))
    call = front.wait_for_call()

    def finish_badly() -> None:
        call.answered = True
        call.hears.done(None)  # type: ignore[arg-type]

    front.run(finish_badly)
    response = client.response()
    assert response.status == 500
    assert error_of(response)["reason"] == "internal"
    until(lambda: call.released)
    assert "request-failed" in caplog.text


# ── bad input ──


def changed(**changes: Any) -> tuple[bytes, bytes]:
    return infer_body([{**BINARY_IMAGE, **changes}], IMAGE.tobytes())


JSON_IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 2, 3]}
BAD_INPUT = {
    "wrong name": (changed(name="imago"), "input 'imago'"),
    "wrong type": (changed(datatype="INT8"), "input 'image'.datatype"),
    "unknown type": (changed(datatype="UINT9"), "input 'image'.datatype"),
    "wrong shape": (changed(shape=[1, 3, 2]), "input 'image'.shape"),
    "negative dim": (changed(shape=[-1, 2, 3]), "input 'image'.shape"),
    "batch too large": (changed(shape=[9, 2, 3], parameters={"binary_data_size": 54}), "input 'image'.shape"),
    "overflowing size": (changed(shape=[2**62, 2**62, 3]), "input 'image'.shape"),
    "wrong size": (changed(parameters={"binary_data_size": 7}), "input 'image'.parameters.binary_data_size"),
    "missing input": (infer_body([], IMAGE.tobytes()), "inputs"),
    "extra input": (infer_body([BINARY_IMAGE, {**BINARY_IMAGE, "name": "more"}], bytes(12)), "input 'more'"),
    "input twice": (infer_body([BINARY_IMAGE, BINARY_IMAGE], bytes(12)), "input 'image'"),
    "tail too short": (infer_body([BINARY_IMAGE], bytes(5)), "body"),
    "tail too long": (infer_body([BINARY_IMAGE], bytes(7)), "body"),
    "unknown output": (image_body(outputs=[{"name": "score"}]), "output 'score'"),
    "bad timeout": (image_body(parameters={"timeout": -1}), "parameters.timeout"),
    "bad priority": (image_body(parameters={"priority": "high"}), "parameters.priority"),
    "json value out of range": (infer_body([{**JSON_IMAGE, "data": [256] * 6}]), "input 'image'.data"),
    "json too short": (infer_body([{**JSON_IMAGE, "data": [1] * 5}]), "input 'image'.data"),
    "json of another type": (infer_body([{**JSON_IMAGE, "data": ["a"] * 6}]), "input 'image'.data"),
    "deep json": ((b'{"inputs":' + b"[" * 100_000, b""), "body"),
    "deep data": ((b'{"inputs":[{"data":' + b"[" * 100_000, b""), "body"),
    "no json": ((b"hello", b""), "body"),
    "no body": ((b"", b""), "body"),
    "another json": ((b"[]", b""), "body"),
}


@pytest.mark.parametrize(("sent", "field"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_names_the_field(
    front: FrontEnd, client: Client, sent: tuple[bytes, bytes], field: str
) -> None:
    response = infer(client, "image", sent)
    assert response.status == 400
    document = error_of(response)
    assert document["reason"] == "invalid-input"
    assert document["field"] == field
    assert len(response.body) < 500
    assert not front.door.calls
    assert infer(client, "image", image_body()).status == 200, "the connection goes on"


def test_elements_are_checked_at_the_door(client: Client) -> None:
    flags = {"name": "x", "datatype": "BOOL", "shape": [1, 2], "parameters": {"binary_data_size": 2}}
    assert error_of(infer(client, "echo-BOOL", infer_body([flags], b"\1\2")))["field"] == "input 'x'.data"
    words = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}
    lying = infer(client, "echo-BYTES", infer_body([words], b"\xff\xff\xff\xffa"))
    assert (lying.status, error_of(lying)["field"]) == (400, "input 'x'.data")


def test_shared_memory_is_refused_before_the_model_runs(front: FrontEnd, client: Client) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 6}
    inputs = infer(client, "image", infer_body([{**JSON_IMAGE, "parameters": place}]))
    outputs = infer(client, "image", image_body(outputs=[{"name": "scores", "parameters": place}]))
    for response, owner in ((inputs, "input 'image'"), (outputs, "output 'scores'")):
        assert response.status == 501
        assert owner in error_of(response)["error"]
    assert not front.door.calls


def test_a_header_length_that_lies(front: FrontEnd, client: Client) -> None:
    body, _ = image_body()
    for length in (1, len(body) - 7, len(body) - 5, len(body), len(body) + 1):
        response = client.post(PATH, body, b"Inference-Header-Content-Length: %d\r\n" % length)
        assert response.status == 400
        error_of(response)
    longer = b"Inference-Header-Content-Length: 5000\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    response = client.send(chunked(PATH, chunks, longer)).response()
    assert response.status == 400
    assert orjson.loads(response.body)["field"] == "Inference-Header-Content-Length"
    assert not front.door.calls


def test_a_content_length_that_lies(front: FrontEnd) -> None:
    body, field = image_body()
    with front.connect() as client:
        start = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"
        client.send(start % (PATH.encode(), len(body) + 10, field) + body).finish_sending()
        response = client.response()
        assert response.status == 400
        error_of(response)
    front.until_slots_are_back()
    until(lambda: front.server.server.connections == 0)
    assert not front.door.calls


def test_long_names_do_not_fill_the_answer(client: Client) -> None:
    response = infer(client, "image", changed(name="x" * 100_000))
    assert response.status == 400
    assert len(response.body) < 500
