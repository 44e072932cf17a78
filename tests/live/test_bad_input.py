"""Bad input end to end: each case is a clear error that names the field, and good requests work after it."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from onnx import helper

from backends import onnx_models
from frontend.http.harness import chunked, parse_response_head, post
from live.server import LAYOUTS, PATIENCE_S, Live, error_of, infer_path, outputs_of, serving

MIB = 1 << 20
LIMITS = {
    "CARPOOL_MAX_BODY_BYTES": str(MIB),
    "CARPOOL_HEADER_TIMEOUT_S": "2",
    "CARPOOL_BODY_TIMEOUT_S": "2",
    "CARPOOL_SLOTS": "16",
}
FUZZ_S = 6.0
HUGE = 2**62


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("bad")
    models = folder / "models"
    onnx_models.identity(models / "same" / "1" / "model.onnx")
    onnx_models.identity(models / "free" / "1" / "model.onnx", "UINT8", ("batch", "height", "width"))
    onnx_models.identity(models / "text" / "1" / "model.onnx", "BYTES", ("batch", 1))
    onnx_models.identity(models / "flags" / "1" / "model.onnx", "BOOL", ("batch", 2))
    shape = ("batch", 2)
    onnx_models.write(
        models / "pair" / "1" / "model.onnx",
        [helper.make_node("Add", ["a", "b"], ["sum"])],
        [("a", "INT32", shape), ("b", "INT32", shape)],
        [("sum", "INT32", shape)],
    )
    with serving(models, frontends=request.param, folder=folder, environment=LIMITS) as running:
        pids = [*running.frontend_pids, running.engine_pid]
        yield running
        assert [*running.frontend_pids, running.engine_pid] == pids, "a process died of bad input"


def good(server: Live) -> None:
    """A request that must work, whatever came before."""
    with server.connect() as client:
        body = orjson.dumps({"inputs": [X]})
        assert outputs_of(client.post(infer_path("same"), body))["y"] == [1, 2, 3]


X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
A: dict[str, Any] = {"name": "a", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
B: dict[str, Any] = {**A, "name": "b"}
BINARY: dict[str, Any] = {
    "name": "x",
    "datatype": "FP32",
    "shape": [1, 3],
    "parameters": {"binary_data_size": 12},
}
FREE: dict[str, Any] = {"name": "x", "datatype": "UINT8", "shape": [1, 1, 1], "data": [1]}


def with_x(**changes: Any) -> Any:
    return {"inputs": [{**X, **changes}]}


def binary(shape: list[int], size: Any, **changes: Any) -> Any:
    return {"inputs": [{**BINARY, "shape": shape, "parameters": {"binary_data_size": size}, **changes}]}


# ---- the request's JSON: model, document, status, and what the field of the error must name

DOCUMENTS: dict[str, tuple[str, Any, str]] = {
    "wrong input name": ("same", with_x(name="z"), "'z'"),
    "no input name": ("same", {"inputs": [{k: v for k, v in X.items() if k != "name"}]}, "name"),
    "a name that is no text": ("same", with_x(name=7), "name"),
    "wrong datatype": ("same", with_x(datatype="INT32"), "datatype"),
    "unknown datatype": ("same", with_x(datatype="FP33"), "datatype"),
    "a datatype that is no text": ("same", with_x(datatype=["FP32"]), "datatype"),
    "no datatype": ("same", {"inputs": [{k: v for k, v in X.items() if k != "datatype"}]}, "datatype"),
    "wrong shape": ("same", with_x(shape=[1, 4], data=[1, 2, 3, 4]), "shape"),
    "too few dimensions": ("same", with_x(shape=[3]), "shape"),
    "too many dimensions": ("same", with_x(shape=[1, 3, 1]), "shape"),
    "a thousand dimensions": ("same", with_x(shape=[1] * 1000), "shape"),
    "no shape": ("same", {"inputs": [{k: v for k, v in X.items() if k != "shape"}]}, "shape"),
    "a shape that is no list": ("same", with_x(shape="[1,3]"), "shape"),
    "a shape of texts": ("same", with_x(shape=["1", "3"]), "shape"),
    "a fractional dimension": ("same", with_x(shape=[1.0, 3]), "shape"),
    "a boolean dimension": ("same", with_x(shape=[True, 3]), "shape"),
    "a negative dimension": ("same", with_x(shape=[1, -3]), "shape"),
    "two negative dimensions": ("same", with_x(shape=[-1, -3]), "shape"),
    "no images": ("same", with_x(shape=[0, 3], data=[]), "shape"),
    "too many images": ("same", with_x(shape=[33, 3], data=[0] * 99), "shape"),
    "a huge dimension": ("free", {"inputs": [{**FREE, "shape": [1, HUGE, 1]}]}, "'x'"),
    "dimensions whose product overflows": ("free", {"inputs": [{**FREE, "shape": [1, 2**32, 2**32]}]}, "'x'"),
    "a product that overflows to the size": (
        "free",
        {"inputs": [{**FREE, "shape": [1, 2**63 - 1, 2**63 - 1]}]},
        "'x'",
    ),
    "a dimension beyond 64 bits": ("free", {"inputs": [{**FREE, "shape": [1, 10**30, 1]}]}, "shape"),
    "a huge number of images": ("free", {"inputs": [{**FREE, "shape": [HUGE, 1, 1]}]}, "'x'"),
    "fewer values than the shape": ("same", with_x(data=[1, 2]), "data"),
    "more values than the shape": ("same", with_x(data=[1, 2, 3, 4]), "data"),
    "values of another type": ("same", with_x(data=["1", "2", "3"]), "data"),
    "null values": ("same", with_x(data=[1, None, 3]), "data"),
    "ragged values": ("same", with_x(data=[[1, 2], [3]]), "data"),
    "data that is no list": ("same", with_x(data="123"), "data"),
    "no data": ("same", {"inputs": [{k: v for k, v in X.items() if k != "data"}]}, "data"),
    "data in two ways": ("same", with_x(parameters={"binary_data_size": 12}), "data"),
    "a number beyond its type": ("pair", {"inputs": [{**A, "data": [2**31, 0]}, B]}, "data"),
    "a fraction for an integer": ("pair", {"inputs": [{**A, "data": [1.5, 0]}, B]}, "data"),
    "a number for a flag": (
        "flags",
        {"inputs": [{**X, "datatype": "BOOL", "shape": [1, 2], "data": [0, 2]}]},
        "data",
    ),
    "a missing input": ("pair", {"inputs": [A]}, "inputs"),
    "an extra input": ("same", {"inputs": [X, {**X, "name": "z"}]}, "'z'"),
    "an input twice": ("same", {"inputs": [X, X]}, "'x'"),
    "different numbers of images": ("pair", {"inputs": [A, {**B, "shape": [2, 2], "data": [1] * 4}]}, "'b'"),
    "no inputs": ("same", {}, "inputs"),
    "an empty list of inputs": ("same", {"inputs": []}, "inputs"),
    "inputs that are no list": ("same", {"inputs": X}, "inputs"),
    "an input that is no object": ("same", {"inputs": [7]}, "input"),
    "a hundred thousand inputs": ("same", {"inputs": [{}] * 100_000}, "body"),
    "an unknown output": ("same", {"inputs": [X], "outputs": [{"name": "z"}]}, "'z'"),
    "an output twice": ("same", {"inputs": [X], "outputs": [{"name": "y"}] * 2}, "'y'"),
    "an id that is no text": ("same", {"inputs": [X], "id": 5}, "id"),
    "a priority below 0": ("same", {"inputs": [X], "parameters": {"priority": -1}}, "priority"),
    "a timeout that is no number": ("same", {"inputs": [X], "parameters": {"timeout": "soon"}}, "timeout"),
    "an endless timeout": ("same", {"inputs": [X], "parameters": {"timeout": 10**30}}, "timeout"),
    "classes below 0": (
        "same",
        {"inputs": [X], "outputs": [{"name": "y", "parameters": {"classification": -1}}]},
        "classification",
    ),
}


@pytest.mark.parametrize("case", DOCUMENTS)
def test_a_request_that_cannot_be_right(server: Live, case: str) -> None:
    model, document, field = DOCUMENTS[case]
    with server.connect() as client:
        error = error_of(client.post(infer_path(model), dumps(document)), 400)
        assert field in error["field"], error
        assert error["reason"] == "invalid-input"
        # On the same connection, since nothing is wrong with HTTP.
        assert client.post(infer_path("same"), orjson.dumps({"inputs": [X]})).status == 200


def dumps(document: Any) -> bytes:
    """The standard library's, since orjson has no integers beyond 64 bits."""
    return json.dumps(document).encode()


# ---- the body around it: (body, header fields), and what the field of the error must name

HEAD = orjson.dumps({"inputs": [BINARY]})
TAIL = bytes(12)


def length(number: object) -> bytes:
    return b"Inference-Header-Content-Length: %b\r\n" % str(number).encode()


BODIES: dict[str, tuple[str, bytes, bytes, str]] = {
    "no JSON at all": ("same", b"hello", b"", "body"),
    "an empty body": ("same", b"", b"", "body"),
    "JSON that ends early": ("same", HEAD[:-1], b"", "body"),
    "JSON that is no object": ("same", b"[]", b"", "body"),
    "deep JSON": ("same", b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "body"),
    "deep data": ("same", b'{"inputs":[{"data":' + b"[" * 5000 + b"]" * 5000 + b"}]}", b"", "body"),
    "not UTF-8": ("same", b'{"id":"\xff"}', b"", "body"),
    "a header length beyond the body": ("same", HEAD + TAIL, length(10_000), "Inference-Header"),
    "a header length below 0": ("same", HEAD + TAIL, length(-1), "Inference-Header"),
    "a header length in words": ("same", HEAD + TAIL, length("all"), "Inference-Header"),
    "a header length of 400 digits": ("same", HEAD + TAIL, length("9" * 400), "Inference-Header"),
    "a header length that is too short": ("same", HEAD + TAIL, length(len(HEAD) - 1), "body"),
    "a header length that is too long": ("same", HEAD + TAIL, length(len(HEAD) + 1), "body"),
    "binary data without its header length": ("same", HEAD + TAIL, b"", "body"),
    "fewer bytes than announced": ("same", HEAD + TAIL[1:], length(len(HEAD)), "body"),
    "more bytes than announced": ("same", HEAD + TAIL + b"x", length(len(HEAD)), "body"),
    "a raw body of the wrong size": ("same", b"abc", length(0), "body"),
    "a raw body for a model with two inputs": ("pair", bytes(8), length(0), "Inference-Header"),
}
for name, shape, size in (
    ("a binary size that is too small", [1, 3], 11),
    ("a binary size that is too large", [1, 3], 13),
    ("a binary size below 0", [1, 3], -12),
    ("a binary size in words", [1, 3], "12"),
    ("a binary size beyond 64 bits", [1, 3], 10**30),
    ("a binary size that overflows to 12", [1, 3], 2**64 + 12),
):
    document = dumps(binary(shape, size))
    BODIES[name] = ("same", document + TAIL, length(len(document)), "binary_data_size")
_FREE = dumps(binary([1, 2**32, 2**32], 0, datatype="UINT8"))
BODIES["a shape whose bytes overflow to 0"] = ("free", _FREE, length(len(_FREE)), "'x'")
_TEXT = orjson.dumps(binary([1, 1], 8, datatype="BYTES"))
BODIES["a text that says to be longer than the body"] = (
    "text",
    _TEXT + b"\xff\xff\xff\xff" + b"abcd",
    length(len(_TEXT)),
    "'x'",
)
_FLAGS = orjson.dumps(binary([1, 2], 2, datatype="BOOL"))
BODIES["a flag of 7"] = ("flags", _FLAGS + b"\x00\x07", length(len(_FLAGS)), "'x'")


@pytest.mark.parametrize("case", BODIES)
def test_a_body_that_cannot_be_right(server: Live, case: str) -> None:
    model, body, fields, field = BODIES[case]
    with server.connect() as client:
        error = error_of(client.post(infer_path(model), body, fields), 400)
        assert field in error.get("field", ""), error
        assert client.post(infer_path("same"), orjson.dumps({"inputs": [X]})).status == 200
        if body:  # in chunks its length is known at the end only
            size = b"%x\r\n" % len(body)
            again = client.send(chunked(infer_path(model), size + body + b"\r\n0\r\n\r\n", fields)).response()
            assert again.status == 400
            assert client.post(infer_path("same"), orjson.dumps({"inputs": [X]})).status == 200


def test_text_that_onnx_cannot_take(server: Live) -> None:
    with server.connect() as client:
        error = error_of(client.post(infer_path("text"), b"\xff\xfe", length(0)), 400)
    assert "UTF-8" in error["error"]
    good(server)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        (b"X-Carpool-Deadline-Ms: -1", "X-Carpool-Deadline-Ms"),
        (b"X-Carpool-Deadline-Ms: soon", "X-Carpool-Deadline-Ms"),
        (b"X-Carpool-Deadline-Ms: nan", "X-Carpool-Deadline-Ms"),
        (b"X-Carpool-Deadline-Ms: 1e999", "X-Carpool-Deadline-Ms"),
        (b"X-Carpool-Source: " + b"a" * 1000, "X-Carpool-Source"),
        (b"X-Carpool-Source: \xff\xfe", "X-Carpool-Source"),
    ],
)
def test_header_fields_that_cannot_be_right(server: Live, field: bytes, name: str) -> None:
    with server.connect() as client:
        body = orjson.dumps({"inputs": [X]})
        error = error_of(client.post(infer_path("same"), body, field + b"\r\n"), 400)
        assert error["field"] == name
        assert client.post(infer_path("same"), body).status == 200


# ---- compression


def test_a_gzip_bomb_is_stopped(server: Live) -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    assert len(bomb) < MIB
    for encoding, body in ((b"gzip", bomb), (b"deflate", zlib.compress(bytes(64 * MIB)))):
        with server.connect() as client:
            field = b"Content-Encoding: %b\r\n" % encoding
            error_of(client.post(infer_path("same"), body, field), 413, "too-large")
        good(server)


def test_bodies_that_are_not_what_their_encoding_says(server: Live) -> None:
    whole = gzip.compress(orjson.dumps({"inputs": [X]}))
    for body in (b"not gzip", whole[:-4], whole[:-12], whole + b"more", whole[:15] + b"\0" + whole[16:]):
        with server.connect() as client:
            error_of(client.post(infer_path("same"), body, b"Content-Encoding: gzip\r\n"), 400)
        good(server)
    with server.connect() as client:
        error_of(client.post(infer_path("same"), whole, b"Content-Encoding: br\r\n"), 415)
    good(server)


# ---- HTTP itself


def test_too_large_is_said_before_the_body_is_sent(server: Live) -> None:
    for fields, status in (
        (b"Content-Length: %d\r\n" % (MIB + 1), 413),
        (b"Content-Length: 9%b\r\n" % (b"9" * 50), 413),
    ):
        with server.connect() as client:
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (infer_path("same").encode(), fields)
            error_of(client.send(head).response(), status, "too-large")
        good(server)


def test_chunks_beyond_the_limit(server: Live) -> None:
    with server.connect() as client:
        client.send(chunked(infer_path("same"), b"%x\r\n" % (2 * MIB) + bytes(MIB // 2)))
        client.send(bytes(MIB - MIB // 2 + 1000))
        error_of(client.response(), 413, "too-large")
    good(server)


@pytest.mark.parametrize("fields", [length(len(HEAD)), b""], ids=["in place", "gathered"])
def test_a_body_that_ends_early(server: Live, fields: bytes) -> None:
    """Fewer bytes than Content-Length says, and then the end."""
    sent = post(infer_path("same"), HEAD + TAIL, fields)
    for missing in (1, 5, len(HEAD)):
        with server.connect() as client:
            response = client.send(sent[:-missing]).finish_sending().response()
            assert "body ended" in error_of(response, 400)["error"]
            assert client.is_closed()
        good(server)


@pytest.mark.parametrize("fields", [length(len(HEAD)), b""], ids=["in place", "gathered"])
def test_a_body_that_never_ends(server: Live, fields: bytes) -> None:
    """Fewer bytes than Content-Length says, and then nothing: it is not waited for without end."""
    with server.connect() as client:
        client.send(post(infer_path("same"), HEAD + TAIL, fields)[:-1])
        good(server)
        error_of(client.response(), 408, "timeout")
        assert client.is_closed()
    good(server)


def test_a_head_that_never_ends(server: Live) -> None:
    with server.connect() as client:
        client.send(b"GET /v2 HTTP/1.1\r\nHost:")
        error_of(client.response(), 408, "timeout")
    good(server)


def test_a_body_longer_than_it_says_is_another_request(server: Live) -> None:
    """What lies behind Content-Length is read as the next request, which it is not."""
    body = orjson.dumps({"inputs": [X]})
    with server.connect() as client:
        client.send(post(infer_path("same"), body) + b"leftovers\r\n\r\n")
        assert client.response().status == 200
        error_of(client.response(), 400)
        assert client.is_closed()
    good(server)


NOT_HTTP = {
    "garbage": os.urandom(64).replace(b"\r\n", b"..") + b"\r\n\r\n",
    "text": b"hello, is anyone there?\r\n\r\n",
    "an HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "HTTP/2 by number": b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(60),
    "nothing but line ends": b"\n\n\n\n",
    "two lengths": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"
    ),
    "a length and chunks": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a length below 0": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -3\r\n\r\n",
    "a chunk size below 0": chunked("/v2/repository/index", b"-1\r\n"),
    "a chunk size of 40 digits": chunked("/v2/repository/index", b"f" * 40 + b"\r\n"),
    "an endless head": b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 100_000,
    "ten thousand fields": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: a\r\n" * 5000,
}


@pytest.mark.parametrize("case", NOT_HTTP)
def test_what_is_not_http(server: Live, case: str) -> None:
    with server.connect() as client:
        response = client.send(NOT_HTTP[case]).response()
        assert 400 <= response.status < 600, response
        assert response.status != 500
        assert orjson.loads(response.body)["error"]
        assert client.is_closed()
    good(server)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../same",
        "%2e%2e%2fsame",
        "..%2fsame",
        "same%00",
        "same%2f..%2fsame",
        "%2fetc%2fpasswd",
        "same/versions/..",
        "same/versions/-1",
        "same/versions/%31%30",
        "same/versions/1e0",
        "%ff",
        "%",
        "a" * 5000,
        "same;x=1",
        "SAME",
        "",
        "%20same",
    ],
)
def test_path_tricks_in_model_names(server: Live, name: str) -> None:
    body = orjson.dumps({"inputs": [X]})
    with server.connect() as client:
        for response in (client.post(f"/v2/models/{name}/infer", body), client.get(f"/v2/models/{name}")):
            assert response.status in (400, 404, 405), response
            document = orjson.loads(response.body)
            assert document["error"]
            assert "root" not in document["error"]
            assert len(document["error"]) < 500
    good(server)


# ---- anything at all


def mutations(chance: random.Random) -> Iterator[bytes]:
    """Good requests of every kind, and what little is left of them after some damage."""
    gzipped = gzip.compress(HEAD + TAIL)
    whole = [
        post(infer_path("same"), orjson.dumps({"inputs": [X]})),
        post(infer_path("same"), HEAD + TAIL, length(len(HEAD))),
        post(infer_path("same"), gzipped, length(len(HEAD)) + b"Content-Encoding: gzip\r\n"),
        chunked(
            infer_path("same"), b"%x\r\n%b\r\n0\r\n\r\n" % (len(HEAD + TAIL), HEAD + TAIL), length(len(HEAD))
        ),
        post(infer_path("text"), _TEXT + b"\x04\0\0\0" + b"abcd", length(len(_TEXT))),
        post(infer_path("pair"), orjson.dumps({"inputs": [A, B], "outputs": [{"name": "sum"}]})),
        post("/v2/repository/index", b'{"ready": true}'),
        b"GET /v2/models/same/stats HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ]
    words = [
        b"-1",
        b"0",
        b"99999999999999999999",
        b"\0",
        b"\r\n",
        b'"',
        b"[",
        b"{",
        b"null",
        b"\xff",
        b":",
        b"1e9",
    ]
    damages: list[Callable[[bytearray, int], None]] = [
        lambda data, at: data.__setitem__(at, chance.randrange(256)),
        lambda data, at: data.__delitem__(slice(at, at + chance.randrange(1, 20))),
        lambda data, at: data.__setitem__(slice(at, at), chance.choice(words)),
        lambda data, at: data.__setitem__(slice(at, at + chance.randrange(1, 6)), chance.choice(words)),
        lambda data, at: data.__setitem__(slice(at, at), data[at : at + chance.randrange(1, 200)]),
    ]
    while True:
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 5)):
            if data:
                chance.choice(damages)(data, chance.randrange(len(data)))
        yield bytes(data)


def answers(connection: socket.socket) -> list[int]:
    """The statuses of all answers until the server closes; each must be whole."""
    received = bytearray()
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass  # closed with some of our bytes unread
    statuses = []
    while received:
        head, separator, rest = bytes(received).partition(b"\r\n\r\n")
        assert separator, f"half a head: {head!r}"
        status, fields = parse_response_head(head)
        size = 0 if status in (100, 204) else int(fields["content-length"])
        assert len(rest) >= size, f"half a body: {rest!r}"
        statuses.append(status)
        received = bytearray(rest[size:])
    return statuses


def test_damaged_requests_get_an_answer_or_a_close(server: Live) -> None:
    """Seeded, so that a failure can be repeated, and bounded in time, not in number."""
    chance = random.Random(20240607)
    end = time.monotonic() + FUZZ_S / 2
    seen: set[int] = set()
    for count, sent in enumerate(mutations(chance), 1):
        with server.connect() as client:
            client.socket.sendall(sent)
            client.finish_sending()
            try:
                statuses = answers(client.socket)
            except AssertionError as error:
                raise AssertionError(f"number {count}: {sent!r}") from error
            assert 500 not in statuses, sent
            seen |= set(statuses)
        if count % 50 == 0:
            good(server)
        if time.monotonic() > end and seen >= {200, 400, 404}:
            break
        assert time.monotonic() < end + PATIENCE_S, seen
    good(server)
    server.until_metric(0, "nv_inference_pending_request_count", model="same")
