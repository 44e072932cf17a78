"""Inference over HTTP: forms of bodies and answers, time, counters, and clients that leave."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import orjson
import pytest

from carpool.core.job import INFINITY
from frontend.http.front_end import (
    IMAGE,
    FrontEnd,
    front_end,
    image_body,
    infer,
    infer_body,
    outputs_of,
)
from frontend.http.harness import Client, Response, chunked, post
from waiting import until

PATH = "/v2/models/image/infer"
SUM = [15.0, 1.0, 2.0, 3.0]
RAW = b"Inference-Header-Content-Length: 0\r\n"
JSON_IMAGE = {"name": "image", "datatype": "UINT8", "shape": [1, 2, 3], "data": [0, 1, 2, 3, 4, 5]}


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[Client]:
    with front.connect() as connected:
        yield connected


def binary_scores(response: Response) -> list[list[float]]:
    assert response.status == 200, response.body
    assert response.fields["content-type"] == "application/octet-stream"
    size = int(response.fields["inference-header-content-length"])
    (output,) = orjson.loads(response.body[:size])["outputs"]
    data = np.frombuffer(response.body[size:], "<f4").reshape(output["shape"])
    assert output["parameters"] == {"binary_data_size": data.nbytes}
    found: list[list[float]] = data.tolist()
    return found


# ── forms ──


def test_json_in_and_out(client: Client) -> None:
    response = infer(client, "image", infer_body([JSON_IMAGE], id="r 1"))
    assert outputs_of(response) == {"scores": SUM}
    assert orjson.loads(response.body)["id"] == "r 1"
    assert "inference-header-content-length" not in response.fields


def test_binary_in_json_out(front: FrontEnd, client: Client) -> None:
    assert outputs_of(infer(client, "image", image_body())) == {"scores": SUM}
    call = front.door.calls[-1]
    assert call.tail > 0, "the body was received where it is used"


def test_binary_out(client: Client) -> None:
    answer = infer(client, "image", image_body(parameters={"binary_data_output": True}))
    assert binary_scores(answer) == [SUM]


def test_raw(client: Client) -> None:
    assert binary_scores(client.post(PATH, IMAGE.tobytes(), RAW)) == [SUM]


def test_raw_bytes(client: Client) -> None:
    response = client.post("/v2/models/echo-BYTES/infer", b"one", RAW)
    assert response.status == 400, "its shape is not [1]"


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_chunked(client: Client, size: int) -> None:
    body, field = image_body()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    assert outputs_of(client.send(chunked(PATH, chunks, field)).response()) == {"scores": SUM}


@pytest.mark.parametrize(("name", "squeeze"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_compressed(front: FrontEnd, client: Client, name: bytes, squeeze: Any) -> None:
    body, field = image_body()
    response = client.post(PATH, squeeze(body), field + b"Content-Encoding: %b\r\n" % name)
    assert outputs_of(response) == {"scores": SUM}
    assert front.door.calls[-1].tail == 0, "only the tensors went into a slot"
    raw = client.post(PATH, squeeze(IMAGE.tobytes()), RAW + b"Content-Encoding: %b\r\n" % name)
    assert binary_scores(raw) == [SUM]


def test_json_and_binary_mixed(front: FrontEnd, client: Client) -> None:
    inputs: list[dict[str, Any]] = [
        {"name": "a", "datatype": "INT32", "shape": [1, 2], "data": [[5, 6]]},
        {"name": "b", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
    ]
    sent = infer_body(inputs, np.array([1, 2], "<i4").tobytes(), outputs=[{"name": "difference"}])
    assert outputs_of(infer(client, "pair", sent)) == {"difference": [4, 4]}
    head = front.door.calls[-1].head
    assert [(tensor.offset, tensor.size, tensor.data) for tensor in head.inputs] == [
        (0, 8, None),
        (8, 8, None),
    ]
    assert head.tail_size == 16


def test_strings_and_bools_in_json(client: Client) -> None:
    words = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": ["ä", ""]}
    assert outputs_of(infer(client, "echo-BYTES", infer_body([words]))) == {"y": ["ä", ""]}
    flags = {"name": "x", "datatype": "BOOL", "shape": [1, 2], "data": [True, False]}
    assert outputs_of(infer(client, "echo-BOOL", infer_body([flags]))) == {"y": [True, False]}


def test_no_inputs_at_all(client: Client) -> None:
    response = infer(client, "nan", infer_body([], parameters={"binary_data_output": True}))
    assert response.status == 200
    assert np.isnan(np.frombuffer(response.body[-4:], "<f4")).all(), "binary passes NaN on"


def test_a_model_without_batches(client: Client) -> None:
    sent = infer_body([{"name": "x", "datatype": "INT64", "shape": [2], "data": [1, -2]}])
    assert outputs_of(infer(client, "unbatched", sent)) == {"y": [1, -2]}


def test_expect_continue(client: Client) -> None:
    body, field = image_body()
    whole = post(PATH, body, field + b"Expect: 100-continue\r\n")
    head = whole[: -len(body)]
    assert client.send(head).response().status == 100
    assert outputs_of(client.send(body).response()) == {"scores": SUM}


def test_many_requests_on_one_connection(front: FrontEnd, client: Client) -> None:
    body, field = image_body()
    client.send(post(PATH, body, field) * 20)
    for _ in range(20):
        assert outputs_of(client.response()) == {"scores": SUM}
    until(lambda: all(call.released for call in front.door.calls))


def test_a_long_answer_outlives_its_slot(client: Client) -> None:
    values = np.arange(50_000, dtype="<i4")
    tensor = {
        "name": "x",
        "datatype": "INT32",
        "shape": [1, 50_000],
        "parameters": {"binary_data_size": values.nbytes},
    }
    sent = infer_body([tensor], values.tobytes(), parameters={"binary_data_output": True})
    response = infer(client, "echo-INT32", sent)
    assert response.body.endswith(values.tobytes())


# ── bodies that take long to read are read in a thread ──


def long_json(value: Any = 7) -> tuple[bytes, bytes]:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 50_000], "data": [value] * 50_000}
    return infer_body([tensor], parameters={"binary_data_output": True})


def many_strings(count: int = 20_000, last: bytes = b"") -> tuple[bytes, bytes]:
    tail = bytes(4) * (count - 1) + (last or bytes(4))
    tensor = {
        "name": "x",
        "datatype": "BYTES",
        "shape": [1, count],
        "parameters": {"binary_data_size": len(tail)},
    }
    return infer_body([tensor], tail, parameters={"binary_data_output": True})


def test_long_json(client: Client) -> None:
    response = infer(client, "echo-INT32", long_json())
    assert response.body.endswith(np.full(50_000, 7, "<i4").tobytes())


def test_many_strings(client: Client) -> None:
    response = infer(client, "echo-BYTES", many_strings())
    assert response.body.endswith(bytes(80_000))


def test_a_long_head_with_its_data_beside_it(client: Client) -> None:
    text = {"name": "a", "datatype": "INT32", "shape": [1, 40_000], "data": [3] * 40_000}
    data = {
        "name": "b",
        "datatype": "INT32",
        "shape": [1, 40_000],
        "parameters": {"binary_data_size": 160_000},
    }
    wanted = [{"name": "sum", "parameters": {"binary_data": True}}]
    response = infer(client, "pair", infer_body([text, data], bytes(160_000), outputs=wanted))
    assert response.body.endswith(np.full(40_000, 3, "<i4").tobytes())


def test_errors_found_in_a_thread(client: Client) -> None:
    wrong = infer(client, "echo-INT32", long_json("seven"))
    assert (wrong.status, orjson.loads(wrong.body)["field"]) == (400, "input 'x'.data")
    lying = infer(client, "echo-BYTES", many_strings(last=b"\xff\xff\xff\xff"))
    assert (lying.status, orjson.loads(lying.body)["field"]) == (400, "input 'x'.data")
    assert infer(client, "echo-INT32", long_json()).status == 200


def test_a_bug_in_a_thread(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("carpool.frontend.http.infer_route.prepare", lambda *_arguments: 1 / 0)
    response = infer(client, "echo-INT32", long_json())
    assert (response.status, orjson.loads(response.body)["reason"]) == (500, "internal")
    assert "request-failed" in caplog.text


def test_leaving_while_a_thread_reads(front: FrontEnd) -> None:
    body, field = long_json()
    front.connect().send(post("/v2/models/echo-INT32/infer", body, field)).reset()
    until(lambda: front.server.server.connections == 0)
    front.until_slots_are_back()


# ── compressed answers ──


def zeros(*, binary: bool, count: int = 20_000) -> tuple[bytes, bytes]:
    tensor = {"name": "x", "datatype": "INT8", "shape": [1, count], "parameters": {"binary_data_size": count}}
    return infer_body([tensor], bytes(count), outputs=[{"name": "y", "parameters": {"binary_data": binary}}])


@pytest.mark.parametrize(
    ("accept", "binary", "encoding"),
    [
        (b"gzip", True, "gzip"),
        (b"deflate", True, "deflate"),
        (b"gzip;q=0.5", True, "gzip"),
        (b"gzip, deflate", True, None),  # what many libraries say on every request
        (b"*", True, None),
        (b"gzip, deflate, br", False, "gzip"),
        (b"gzip;q=0, deflate", False, "deflate"),
        (b"identity", False, None),
        (b"br", False, None),
        (b"", False, None),
    ],
)
def test_what_is_compressed(client: Client, accept: bytes, binary: bool, encoding: str | None) -> None:
    response = infer(client, "echo-INT8", zeros(binary=binary), b"Accept-Encoding: %b\r\n" % accept)
    assert response.fields.get("content-encoding") == encoding
    ways: dict[str | None, Any] = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}
    undo = ways[encoding]
    plain = infer(client, "echo-INT8", zeros(binary=binary))
    assert undo(response.body) == plain.body
    header_length = "inference-header-content-length"
    assert response.fields.get(header_length) == plain.fields.get(header_length)


def test_short_answers_are_not_compressed(client: Client) -> None:
    response = infer(client, "image", image_body(), b"Accept-Encoding: gzip\r\n")
    assert "content-encoding" not in response.fields


def test_what_does_not_shrink_is_sent_as_it_is(client: Client) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 4096, np.uint8).tobytes()
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, 4096], "parameters": {"binary_data_size": 4096}}
    sent = infer_body([tensor], noise, parameters={"binary_data_output": True})
    response = infer(client, "echo-UINT8", sent, b"Accept-Encoding: gzip\r\n")
    assert response.body.endswith(noise)


def test_without_memory_to_compress_it_an_answer_is_sent_as_it_is(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> NoReturn:
        raise MemoryError

    long = zeros(binary=True, count=500_000)
    plain = infer(client, "echo-INT8", long)
    monkeypatch.setattr(zlib, "compressobj", full)
    response = infer(client, "echo-INT8", long, b"Accept-Encoding: gzip\r\n")
    assert (response.status, response.body) == (200, plain.body)
    assert "content-encoding" not in response.fields


def test_errors_and_documents_are_never_compressed(client: Client) -> None:
    """tritonclient's asyncio face reads them as they come, whatever it offered."""
    accept = b"Accept-Encoding: gzip\r\n"
    for path in ("/metrics", "/v2/models/stats", "/v2/models/image/config"):
        assert "content-encoding" not in client.get(path, accept).fields
    assert "content-encoding" not in infer(client, "image", infer_body([]), accept).fields


# ── time, and who is asking ──


def test_server_timing(client: Client) -> None:
    number = r"\d+\.\d{3}"
    for sent in (image_body(), image_body(parameters={"binary_data_output": True}), infer_body([JSON_IMAGE])):
        timing = infer(client, "image", sent).fields["server-timing"]
        form = rf'decode;dur={number}, queue;dur=2\.000, infer;dur=4\.000, post;dur={number}, batch;desc="17"'
        assert re.fullmatch(form, timing)


def deadlines(front: FrontEnd) -> tuple[float, float]:
    """What the gate heard and what the engine heard, the latter from the last byte."""
    call = front.door.calls[-1]
    return front.door.gate_deadlines[0], call.deadline - call.arrived


@pytest.mark.parametrize("model", ["image", "image-eager", "image-knobs"])
def test_no_deadline(front: FrontEnd, client: Client, model: str) -> None:
    assert infer(client, model, image_body()).status == 200
    assert deadlines(front) == (INFINITY, INFINITY)


def test_the_deadline_counts_from_the_head(front: FrontEnd, client: Client) -> None:
    assert infer(client, "image", image_body(), b"X-Carpool-Deadline-Ms: 250.5\r\n").status == 200
    gate, engine = deadlines(front)
    assert gate == pytest.approx(0.2505)
    assert engine <= gate


@pytest.mark.parametrize(
    ("model", "is_deadline"), [("image", True), ("image-eager", True), ("image-knobs", False)]
)
def test_the_timeout_parameter(front: FrontEnd, client: Client, model: str, is_deadline: bool) -> None:
    sent = image_body(parameters={"timeout": 20_000})
    assert infer(client, model, sent).status == 200
    assert deadlines(front)[1] == (pytest.approx(0.02) if is_deadline else INFINITY)
    assert front.door.calls[-1].head.options.timeout == 0.02


def test_the_earliest_deadline_counts(front: FrontEnd, client: Client) -> None:
    sent = image_body(parameters={"timeout": 20_000_000})
    infer(client, "image", sent, b"X-Carpool-Deadline-Ms: 1000\r\n")
    assert deadlines(front)[1] <= 1.0


def test_sources(front: FrontEnd, client: Client) -> None:
    named = image_body(parameters={"source": "by parameter"})
    infer(client, "image", named)
    assert front.door.calls[-1].source == "by parameter"
    infer(client, "image", named, "X-Carpool-Source: Kamera Süd\r\n".encode())
    assert front.door.calls[-1].source == "Kamera Süd"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("X-Carpool-Deadline-Ms", ["", "0", "-5", "soon", "nan", "inf", "1e3", "0x10", "5, 5", "1" * 30]),
        ("X-Carpool-Source", ["a" * 129, "\xff", "a\tb"]),
        ("Inference-Header-Content-Length", ["-1", "x", "99999999", "1" * 40, "1.0"]),
    ],
)
def test_bad_fields_are_named(client: Client, field: str, values: list[str]) -> None:
    body, _ = infer_body([JSON_IMAGE])
    for value in values:
        line = f"{field}: {value}\r\n".encode("latin-1")
        response = client.post(PATH, body, line)
        assert response.status == 400, value
        document = orjson.loads(response.body)
        assert field in document["error"]
        assert document["field"] == field


# ── models that come and go ──


def test_a_new_catalogue_counts_from_the_next_request(front: FrontEnd, client: Client) -> None:
    sent = image_body()
    assert infer(client, "image", sent).status == 200
    catalog = front.door.catalog
    front.door.catalog = replace(catalog, number=2, newest={}, entries={})
    assert infer(client, "image", sent).status == 404
    newer = replace(catalog.newest["image"], version="7")
    front.door.models["image", "7"] = front.door.models["image", "1"]
    front.door.catalog = replace(catalog, number=3, newest={"image": newer})
    assert orjson.loads(infer(client, "image", sent).body)["model_version"] == "7"


# ── clients that leave ──


@pytest.mark.parametrize("manner", ["close", "reset"])
def test_leaving_while_waiting_cancels(front: FrontEnd, manner: str) -> None:
    front.door.held = True
    body, field = image_body()
    client = front.connect().send(post(PATH, body, field))
    call = front.wait_for_call()
    client.reset() if manner == "reset" else client.socket.close()
    until(lambda: call.cancelled)
    front.until_slots_are_back()
    assert front.count("image", "nv_inference_request_failure", '1",reason="CANCELED') == 1


def test_leaving_in_the_body_frees_the_slot(front: FrontEnd) -> None:
    body, field = image_body()
    client = front.connect().send(post(PATH, body, field)[:-3])
    until(lambda: bool(front.door.slots_in_use))
    client.reset()
    front.until_slots_are_back()
    assert not front.door.calls


def test_leaving_in_a_chunked_body(front: FrontEnd) -> None:
    with front.connect() as client:
        client.send(chunked(PATH, b"5\r\nabc", b"")).finish_sending()
        assert client.response().status == 400
    until(lambda: front.server.server.connections == 0)


def test_one_that_leaves_does_not_disturb_the_others(front: FrontEnd, client: Client) -> None:
    front.door.held = True
    body, field = image_body()
    leaving = front.connect().send(post(PATH, body, field))
    until(lambda: len(front.door.calls) == 1)
    client.send(post(PATH, body, field))
    until(lambda: len(front.door.calls) == 2)
    leaving.reset()
    until(lambda: front.door.calls[0].cancelled)
    front.run(front.door.calls[0].finish)
    front.run(front.door.calls[1].finish)
    assert outputs_of(client.response()) == {"scores": SUM}


def test_leaving_while_the_answer_is_compressed(front: FrontEnd) -> None:
    """The call is over by then; nothing is cancelled, and nothing is released twice."""
    front.door.held = True
    body, field = zeros(binary=True, count=500_000)
    client = front.connect()
    client.send(post("/v2/models/echo-INT8/infer", body, field + b"Accept-Encoding: gzip\r\n"))
    call = front.wait_for_call()
    front.run(call.finish)
    client.reset()
    front.until_slots_are_back()
    assert call.released
    until(lambda: front.server.server.connections == 0)


# ── counters ──


def test_counters(front: FrontEnd, client: Client) -> None:
    sent = image_body()
    answer = infer(client, "image", sent)
    assert infer(client, "image", infer_body([])).status == 400
    assert infer(client, "broken", infer_body([])).status == 500
    assert front.count("image", "nv_inference_request_success") == 1
    assert front.count("image", "nv_inference_request_failure", '1",reason="OTHER') == 1
    assert front.count("broken", "nv_inference_request_failure", '1",reason="BACKEND') == 1
    page = front.metrics()
    received = len(sent[0]) + 2 * len(infer_body([])[0])
    assert f"carpool_bytes_received_total {received}\n" in page
    assert f"carpool_bytes_sent_total {len(answer.body)}\n" in page


def test_latest_goes_through_the_door_with_its_source(front: FrontEnd, client: Client) -> None:
    infer(client, "image", image_body(), b"X-Carpool-Source: cam\r\nX-Carpool-Latest: 1\r\n")
    assert front.door.calls[-1].sender[:2] == ("cam", True)
    infer(client, "image", image_body(parameters={"source": "cam", "latest": True}))
    assert front.door.calls[-1].sender[:2] == ("cam", True)
    infer(client, "image", image_body(), b"X-Carpool-Source: cam\r\nX-Carpool-Latest: 0\r\n")
    assert front.door.calls[-1].sender[:2] == ("cam", False)


@pytest.mark.parametrize(
    ("parameters", "extra"),
    [({}, b"X-Carpool-Latest: 1\r\n"), ({"latest": True}, b""), ({}, b"X-Carpool-Latest: yes\r\n")],
)
def test_latest_without_a_source_says_to_name_one(
    client: Client, parameters: dict[str, Any], extra: bytes
) -> None:
    response = infer(client, "image", image_body(parameters=parameters), extra)
    assert response.status == 400
    assert orjson.loads(response.body)["field"] == "X-Carpool-Latest"
