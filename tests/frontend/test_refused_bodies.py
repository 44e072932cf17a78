"""Refused bodies are freed at once, by both doors and whatever the refusal: without the collector."""

from __future__ import annotations

import contextlib
import gc
import gzip
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.errors import CarpoolError, ModelError, Refused, TooLarge, Unavailable
from carpool.frontend.grpc import infer_messages
from carpool.frontend.grpc.h2_connection import H2Connection
from carpool.types import Array, Datatype, TensorSpec
from frontend.fake_door import FakeModel, echo
from frontend.grpc import front_end as over_grpc
from frontend.http import front_end as over_http
from frontend.http.harness import chunked, post
from frontend.http.test_app_images import holding
from frontend.http.test_multipart import BOUNDARY, file_part, form
from frontend.picture_models import models as picture_models
from frontend.picture_models import picture, writer
from waiting import until

BIG = 6 << 20
ROOM = 32 << 20
FORM = b"Content-Type: multipart/form-data; boundary=%b\r\n" % BOUNDARY
JSON = b"Content-Type: application/json\r\n"
GZIP = b"Content-Encoding: gzip\r\n"
RAW = b"Inference-Header-Content-Length: 0\r\n"
TIMES = 3


def crash(_inputs: Mapping[str, Array]) -> dict[str, Array]:
    raise ModelError("the model raised ValueError: no")


def served_models() -> list[FakeModel]:
    given, wanted = TensorSpec("x", Datatype.UINT8, (-1,)), TensorSpec("y", Datatype.UINT8, (-1,))
    return [
        echo("bytes", Datatype.UINT8),
        echo("bool", Datatype.BOOL),
        echo("text", Datatype.BYTES),
        FakeModel("broken", [given], [wanted], crash),
        *picture_models(),
        writer("letters"),
    ]


@contextlib.contextmanager
def nothing_is_kept() -> Iterator[None]:
    """Of what is allocated in here, less than a body stays, although nobody collects."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        until(lambda: tracemalloc.get_traced_memory()[0] - before < BIG // 2)
    finally:
        tracemalloc.stop()
        gc.enable()


def tensor(size: int, name: str = "x", datatype: str = "UINT8") -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "datatype": datatype, "shape": [1, size], "parameters": parameters}


def binary(head: Mapping[str, Any], tail: bytes, model: str = "bytes") -> bytes:
    json = orjson.dumps({"inputs": [head]})
    field = b"Inference-Header-Content-Length: %d\r\n" % len(json)
    return post(f"/v2/models/{model}/infer", json + tail, field)


def chat(picture: str) -> bytes:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    document = {"model": "letters", "messages": [{"role": "user", "content": [part]}]}
    return post("/v1/chat/completions", orjson.dumps(document), JSON)


ZEROS = bytes(BIG)

HTTP_REQUESTS: dict[str, Callable[[], bytes]] = {
    "no picture": lambda: post("/detect", ZEROS),
    "a picture that ends early": lambda: post("/detect", picture(size=(64, 64))[:300] + ZEROS),
    "no picture in a form": lambda: post("/detect", form(file_part(ZEROS)), FORM),
    "a broken form": lambda: post("/detect", ZEROS, FORM),
    "pictures in bad JSON": lambda: post("/detect", b'{"image": "' + ZEROS, JSON),
    "pictures in bad base64": lambda: post("/detect", orjson.dumps({"image": "!" * BIG}), JSON),
    "a chat without a picture": lambda: chat("A" * BIG),
    "a chat in bad base64": lambda: chat("!" * BIG),
    "a chat of blanks": lambda: chat("AA A " * (BIG // 5)),
    "a chat in bad JSON": lambda: post("/v1/chat/completions", ZEROS, JSON),
    "generate without a picture": lambda: post(
        "/v2/models/letters/generate", orjson.dumps({"image": "A" * BIG}), JSON
    ),
    "generate of lists": lambda: post(
        "/v2/models/bytes/generate", b'{"x":[%b[]]}' % (b"[]," * (BIG // 3)), JSON
    ),
    "bad JSON": lambda: post("/v2/models/bytes/infer", ZEROS),
    "JSON that is too deep": lambda: post("/v2/models/bytes/infer", b"[" * BIG),
    "JSON of a wrong tensor": lambda: post(
        "/v2/models/bytes/infer",
        orjson.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1, 1], "data": [0] * BIG}]}),
    ),
    "a wrong name": lambda: binary(tensor(BIG, "z"), ZEROS),
    "a wrong size": lambda: binary(tensor(BIG - 1), ZEROS),
    "bytes that are no BOOL": lambda: binary(tensor(BIG, datatype="BOOL"), b"\7" * BIG, "bool"),
    "bytes that are no BYTES": lambda: binary(
        tensor(BIG, datatype="BYTES") | {"shape": [1, 1]}, b"\xff" * BIG, "text"
    ),
    "BYTES of many elements": lambda: binary(
        tensor(BIG, datatype="BYTES") | {"shape": [1, BIG // 4]}, b"\xff" * BIG, "text"
    ),
    "a model that raises": lambda: binary(tensor(BIG), ZEROS, "broken"),
    "raw bytes for a model of pictures": lambda: post("/v2/models/finder/infer", ZEROS, RAW),
    "BYTES that are no picture": lambda: binary(
        {
            "name": "image",
            "datatype": "BYTES",
            "shape": [1, 1],
            "parameters": {"binary_data_size": BIG + 4},
        },
        BIG.to_bytes(4, "little") + ZEROS,
        "finder",
    ),
    "no gzip": lambda: post("/v2/models/bytes/infer", ZEROS, GZIP),
    "gzip of bad JSON": lambda: post("/v2/models/bytes/infer", gzip.compress(ZEROS, 1), GZIP),
    "gzip of no picture": lambda: post("/detect", gzip.compress(ZEROS, 1), GZIP),
    "gzip of too much": lambda: post("/detect", gzip.compress(bytes(2 * ROOM), 1), GZIP),
    "chunks of bad JSON": lambda: chunked("/v2/models/bytes/infer", b"%x\r\n%b\r\n0\r\n\r\n" % (BIG, ZEROS)),
    "an unknown model": lambda: post("/v2/models/nobody/infer", ZEROS),
    "an unknown path": lambda: post("/nothing", ZEROS),
    "an option nobody knows": lambda: post("/detect?colour=red", ZEROS),
    "too much for a small document": lambda: post("/v2/repository/index", ZEROS),
}

REFUSALS: dict[str, CarpoolError] = {
    "overload": Refused("enough", retry_after_s=1.0),
    "unavailable": Unavailable("not now"),
    "too large": TooLarge("too much"),
}


@pytest.fixture(scope="module")
def http() -> Iterator[over_http.FrontEnd]:
    with over_http.front_end(*served_models(), max_body_bytes=ROOM) as found:
        yield found


def send(found: over_http.FrontEnd, message: bytes) -> int:
    found.door.calls.clear()
    with found.connect() as client:
        with contextlib.suppress(OSError):
            client.send(message)
        return client.response().status


@pytest.mark.parametrize("kind", HTTP_REQUESTS)
def test_over_http_what_is_refused_is_freed(http: over_http.FrontEnd, kind: str) -> None:
    message = HTTP_REQUESTS[kind]()
    send(http, message)  # whatever is made once is there
    with nothing_is_kept():
        for _ in range(TIMES):
            assert send(http, message) >= 400
            http.door.calls.clear()


@pytest.mark.parametrize("kind", REFUSALS)
@pytest.mark.parametrize("path", ["/detect", "/v2/models/bytes/infer"])
def test_over_http_what_the_gate_refuses_is_freed(http: over_http.FrontEnd, kind: str, path: str) -> None:
    http.door.refusal = REFUSALS[kind]
    try:
        with nothing_is_kept():
            for _ in range(TIMES):
                assert send(http, post(path, ZEROS, RAW)) >= 400
    finally:
        http.door.refusal = None


def test_over_http_no_picture_among_several_is_kept(http: over_http.FrontEnd) -> None:
    message = post("/detect", form(*[file_part(ZEROS)] * 3), FORM)
    with nothing_is_kept():
        for _ in range(TIMES):
            assert send(http, message) == 200  # the errors are in the list


def test_a_chunked_body_that_was_answered_is_freed(http: over_http.FrontEnd) -> None:
    message = chunked("/v2/models/bytes/infer", b"%x\r\n%b\r\n0\r\n\r\n" % (BIG, ZEROS), RAW)
    with nothing_is_kept():
        for _ in range(TIMES):
            assert send(http, message) == 200
            http.door.calls.clear()


def test_over_http_what_finds_no_slot_is_freed(http: over_http.FrontEnd) -> None:
    http.door.slots = 0
    try:
        with nothing_is_kept():
            for _ in range(TIMES):
                assert send(http, post("/v2/models/bytes/infer", gzip.compress(ZEROS, 1), RAW + GZIP)) == 503
    finally:
        http.door.slots = 64


def test_a_bug_in_a_thread_keeps_no_body(http: over_http.FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(
        "carpool.observe.logs.Logger.exception", lambda *_, **__: None
    )  # pytest would keep it
    monkeypatch.setattr("carpool.frontend.http.infer_route.prepare", prepare)
    monkeypatch.setattr("carpool.frontend.http.image_route.read_pictures", prepare)
    with nothing_is_kept():
        for _ in range(TIMES):
            assert send(http, post("/v2/models/bytes/infer", ZEROS)) == 500
            assert send(http, post("/detect", ZEROS, FORM)) == 500


def test_pictures_of_clients_that_left_are_freed(http: over_http.FrontEnd) -> None:
    workers = http.app._service.with_pictures().workers
    with nothing_is_kept():
        for _ in range(TIMES):
            with holding(http), http.connect() as client:
                client.send(post("/detect", picture(size=(64, 64)) + ZEROS))
                until(lambda: workers.waiting == 1)
            until(lambda: workers.waiting == 0)
            http.door.calls.clear()  # the pretended door remembers them


# ── gRPC ──


def grpc_request(model: str, datatype: str, raw: bytes, shape: list[int], name: str = "x") -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    return bytes(request.SerializeToString())


def typed() -> bytes:
    request = pb.ModelInferRequest(model_name="bytes")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, 1])
    request.inputs[0].contents.uint_contents.extend(np.full(BIG // 4, 300).tolist())
    return bytes(request.SerializeToString())


GRPC_REQUESTS: dict[str, Callable[[], bytes]] = {
    "a wrong size": lambda: grpc_request("bytes", "UINT8", ZEROS, [1, 5]),
    "an unknown model": lambda: grpc_request("nobody", "UINT8", ZEROS, [1, BIG]),
    "a wrong name": lambda: grpc_request("bytes", "UINT8", ZEROS, [1, BIG], "z"),
    "bytes that are no BOOL": lambda: grpc_request("bool", "BOOL", b"\7" * BIG, [1, BIG]),
    "bytes that are no BYTES": lambda: grpc_request("text", "BYTES", b"\xff" * BIG, [1, 1]),
    "BYTES of many elements": lambda: grpc_request("text", "BYTES", b"\xff" * BIG, [1, BIG // 4]),
    "a model that raises": lambda: grpc_request("broken", "UINT8", ZEROS, [1, BIG]),
    "BYTES that are no picture": lambda: grpc_request(
        "finder", "BYTES", BIG.to_bytes(4, "little") + ZEROS, [1, 1], "image"
    ),
    "typed contents": typed,
    "no message": lambda: b"\xff" * BIG,
}


@pytest.fixture(scope="module")
def by_grpc() -> Iterator[over_grpc.FrontEnd]:
    with over_grpc.front_end(*served_models(), max_body_bytes=ROOM) as found:
        yield found


def refused(connected: grpc.Channel, message: bytes, method: str = "ModelInfer") -> grpc.StatusCode:
    code = over_grpc.refusal(lambda: over_grpc.send(connected, message, method))[0]
    assert code is not grpc.StatusCode.UNKNOWN
    return code


@pytest.mark.parametrize("kind", GRPC_REQUESTS)
def test_over_grpc_what_is_refused_is_freed(by_grpc: over_grpc.FrontEnd, kind: str) -> None:
    message = GRPC_REQUESTS[kind]()
    with over_grpc.channel(by_grpc) as connected:
        refused(connected, message)
        by_grpc.door.calls.clear()
        with nothing_is_kept():
            for _ in range(TIMES):
                refused(connected, message)
                by_grpc.door.calls.clear()


@pytest.mark.parametrize("method", ["ModelMetadata", "RepositoryModelLoad", "ModelStatistics"])
def test_over_grpc_other_calls_keep_nothing_either(by_grpc: over_grpc.FrontEnd, method: str) -> None:
    with over_grpc.channel(by_grpc) as connected:
        refused(connected, b"\xff" * BIG, method)
        with nothing_is_kept():
            for _ in range(TIMES):
                refused(connected, b"\xff" * BIG, method)


@pytest.mark.parametrize("kind", REFUSALS)
def test_over_grpc_what_the_gate_refuses_is_freed(by_grpc: over_grpc.FrontEnd, kind: str) -> None:
    by_grpc.door.refusal = REFUSALS[kind]
    try:
        with over_grpc.channel(by_grpc) as connected, nothing_is_kept():
            for _ in range(TIMES):
                refused(connected, grpc_request("bytes", "UINT8", ZEROS, [1, BIG]))
    finally:
        by_grpc.door.refusal = None


def test_in_a_stream_what_is_refused_is_freed(by_grpc: over_grpc.FrontEnd) -> None:
    message = grpc_request("bytes", "UINT8", ZEROS, [1, 5])
    with over_grpc.channel(by_grpc) as connected:
        stream = connected.stream_stream(over_grpc.SERVICE + "ModelStreamInfer")
        with nothing_is_kept():
            assert len(list(stream(iter([message] * TIMES)))) == TIMES


def test_over_grpc_what_is_read_for_nobody_is_freed(
    by_grpc: over_grpc.FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed messages that wait are asked for in grpc/test_inflater.py."""
    begun, go_on, real = threading.Semaphore(0), threading.Event(), infer_messages.take_apart_whole

    def held(*given: Any) -> Any:
        begun.release()
        assert go_on.wait(60)
        return real(*given)

    monkeypatch.setattr(infer_messages, "take_apart_whole", held)
    with over_grpc.channel(by_grpc) as connected, nothing_is_kept():
        call = connected.unary_unary(over_grpc.SERVICE + "ModelInfer")
        calls = [call.future(ZEROS) for _ in range(2)]  # as many as there are threads
        for _ in calls:
            assert begun.acquire(timeout=30)
        for one in calls:
            one.cancel()
        until(lambda: by_grpc.server.service.running == 0)
        go_on.set()


def test_grpc_connections_that_are_gone_are_freed(by_grpc: over_grpc.FrontEnd) -> None:
    def alive() -> int:
        return sum(isinstance(one, H2Connection) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        for number in range(5):
            with over_grpc.channel(by_grpc) as connected:
                refused(connected, grpc_request("nobody", "UINT8", bytes(number), [1, number]))
        until(lambda: alive() <= before)
    finally:
        gc.enable()
