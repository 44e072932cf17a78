"""ModelInfer over a real channel: what is answered, and how refusals look."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.core.front_load import Outside
from carpool.errors import (
    Cancelled,
    CarpoolError,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    Replaced,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from carpool.frontend.grpc.grpc_service import STATUSES
from carpool.link.catalog import IndexEntry, PublishedServer
from carpool.types import Datatype
from frontend.fake_door import echo
from frontend.grpc.front_end import (
    MAX_BODY,
    SERVICE,
    SUM,
    FrontEnd,
    channel,
    floats,
    front_end,
    image_request,
    infer,
    refusal,
    send,
)
from frontend.http.front_end import IMAGE
from frontend.http.harness import PATIENCE
from waiting import until

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def shared_front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture
def front(shared_front: FrontEnd) -> Iterator[FrontEnd]:
    door = shared_front.door
    door.calls.clear()
    door.gate_deadlines.clear()
    yield shared_front
    door.held, door.refusal, door.serving, door.slots = False, None, True, 64
    shared_front.until_slots_are_back()


@pytest.fixture
def connected(front: FrontEnd) -> Iterator[grpc.Channel]:
    with channel(front) as made:
        yield made


def one_input(model: str, datatype: str, shape: list[int], raw: bytes | None = None, **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


# ---- answers


def test_an_answer_has_the_outputs_the_id_and_where_the_time_went(connected: grpc.Channel) -> None:
    response = infer(connected, image_request(id="r-1"))
    assert (response.model_name, response.model_version, response.id) == ("image", "1", "r-1")
    assert [(output.name, output.datatype, list(output.shape)) for output in response.outputs] == [
        ("scores", "FP32", [1, 4])
    ]
    assert floats(response) == SUM
    parameters = response.parameters
    assert parameters["carpool_batch"].int64_param == 17
    assert parameters["carpool_queue_ms"].double_param == pytest.approx(2.0)
    assert parameters["carpool_infer_ms"].double_param == pytest.approx(4.0)
    assert parameters["carpool_decode_ms"].double_param >= 0.5
    assert parameters["carpool_post_ms"].double_param >= 0.5


@pytest.mark.parametrize("error", [None, ModelError("died")])
def test_what_an_answers_way_takes_is_learned(
    front: FrontEnd, connected: grpc.Channel, error: ModelError | None
) -> None:
    front.door.outside, front.door.held = Outside(), True
    request = image_request().SerializeToString()
    future = connected.unary_unary(SERVICE + "ModelInfer").future(request, timeout=PATIENCE)
    (call,) = front.wait_for_calls()
    front.run(lambda: call.finish(error))
    until(lambda: front.door.outside.seconds > 0.0)
    assert (future.exception(PATIENCE) is None) == (error is None)


def test_the_same_request_again_is_the_same_head(front: FrontEnd, connected: grpc.Channel) -> None:
    for number in range(3):
        infer(connected, image_request(id=str(number)))
    heads = {id(call.head) for call in front.door.calls}
    assert len(heads) == 1


def test_a_new_catalogue_is_looked_at_again(front: FrontEnd, connected: grpc.Channel) -> None:
    infer(connected, image_request())
    before = front.door.catalog
    entries = {key: entry for key, entry in before.entries.items() if key[0] != "image"}
    newest = {key: entry for key, entry in before.newest.items() if key != "image"}
    front.run(lambda: front.door.renew(entries=entries, newest=newest, index=()))
    try:
        assert refusal(lambda: infer(connected, image_request()))[0] is Code.NOT_FOUND
    finally:
        front.run(lambda: front.door.renew(entries=before.entries, newest=before.newest, index=before.index))
    assert floats(infer(connected, image_request())) == SUM


def test_an_answer_names_the_version_that_was_asked_though_another_is_loaded(
    front: FrontEnd, connected: grpc.Channel
) -> None:
    front.door.held = True
    before = front.door.catalog
    future = connected.unary_unary(SERVICE + "ModelInfer").future(
        one_input("versions", "FP32", [1, 1], bytes(4)).SerializeToString(), timeout=PATIENCE
    )
    call = front.wait_for_calls()[0]
    front.run(
        lambda: front.door.renew(newest={**before.newest, "versions": before.entries["versions", "10"]})
    )
    other = connected.unary_unary(SERVICE + "ModelInfer").future(
        one_input("versions", "FP32", [1, 1], bytes(4)).SerializeToString(), timeout=PATIENCE
    )
    second = front.wait_for_calls(2)[1]
    front.run(call.finish)
    front.run(second.finish)
    front.run(lambda: front.door.renew(newest=before.newest))
    answers = [pb.ModelInferResponse.FromString(one.result()) for one in (future, other)]
    assert [answer.model_version for answer in answers] == ["2", "10"]


@pytest.mark.parametrize("datatype", list(Datatype))
def test_raw_tensors_of_every_datatype_go_through(connected: grpc.Channel, datatype: Datatype) -> None:
    raw = {Datatype.BYTES: struct.pack("<I", 2) + b"ab", Datatype.BOOL: b"\1"}.get(
        datatype, bytes(datatype.size)
    )
    response = infer(connected, one_input(f"echo-{datatype.value}", datatype.value, [1, 1], raw))
    assert response.outputs[0].datatype == datatype.value
    assert response.raw_output_contents[0] == raw


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, -1.5]),
        ("FP64", "fp64_contents", [0.1, 1e300]),
        ("BYTES", "bytes_contents", [b"", b"abc"]),
    ],
)
def test_typed_contents_are_accepted(
    connected: grpc.Channel, datatype: str, field: str, values: list[Any]
) -> None:
    request = one_input(f"echo-{datatype}", datatype, [1, 2])
    getattr(request.inputs[0].contents, field).extend(values)
    raw = infer(connected, request).raw_output_contents[0]
    if datatype == "BYTES":
        assert raw == struct.pack("<I", 0) + struct.pack("<I", 3) + b"abc"
    else:
        assert np.frombuffer(raw, Datatype(datatype).dtype).tolist() == values


def test_many_typed_values_are_read_aside(connected: grpc.Channel) -> None:
    values = np.arange(40_000, dtype=np.float32)
    request = one_input("echo-FP32", "FP32", [1, 40_000])
    request.inputs[0].contents.fp32_contents.extend(values.tolist())
    assert floats(infer(connected, request)) == values.tolist()


def test_many_strings_are_checked_aside(front: FrontEnd, connected: grpc.Channel) -> None:
    raw = (struct.pack("<I", 20) + b"x" * 20) * 5000
    request = one_input("echo-BYTES", "BYTES", [1, 5000], raw)
    assert infer(connected, request).raw_output_contents[0] == raw
    request.raw_input_contents[0] = raw[:-24] + struct.pack("<I", 21) + b"x" * 20
    status, details, metadata = refusal(lambda: infer(connected, request))
    assert (status, metadata["carpool-field"]) == (Code.INVALID_ARGUMENT, "input 'x'.data")
    assert "expected 5000 string elements" in details


def test_outputs_come_in_the_order_asked_for_and_classified(connected: grpc.Channel) -> None:
    request = pb.ModelInferRequest(model_name="pair")
    for name, value in (("a", 7), ("b", 2)):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        request.raw_input_contents.append(struct.pack("<i", value))
    for name in ("difference", "sum"):
        request.outputs.add(name=name)
    response = infer(connected, request)
    assert [output.name for output in response.outputs] == ["difference", "sum"]
    assert [struct.unpack("<i", raw)[0] for raw in response.raw_output_contents] == [5, 9]
    request = image_request()
    request.outputs.add(name="scores").parameters["classification"].int64_param = 2
    response = infer(connected, request)
    assert response.outputs[0].datatype == "BYTES"
    assert b"15.000000:0:cat" in response.raw_output_contents[0]


def test_nan_goes_out_as_it_is(connected: grpc.Channel) -> None:
    assert np.isnan(floats(infer(connected, pb.ModelInferRequest(model_name="nan")))[0])


@pytest.mark.parametrize(("kind", "value"), [("uint64_param", 3), ("int64_param", 3), ("string_param", "3")])
def test_options_reach_the_door(front: FrontEnd, connected: grpc.Channel, kind: str, value: Any) -> None:
    request = image_request("image-knobs")
    setattr(request.parameters["priority"], kind, value)
    request.parameters["timeout"].int64_param = 250_000
    request.parameters["source"].string_param = "gate-3"
    request.parameters["mine"].double_param = 0.5
    infer(connected, request)
    call = front.door.calls[-1]
    assert (call.head.options.priority, call.head.options.timeout, call.source) == (3, 0.25, "gate-3")
    assert call.deadline > call.arrived + 1.0  # with knobs the timeout is Triton's


# ---- deadlines, sources, compression


def test_the_calls_deadline_is_the_requests(front: FrontEnd, connected: grpc.Channel) -> None:
    infer(connected, image_request(), timeout=5000.0)
    call = front.door.calls[-1]
    assert call.deadline - call.arrived == pytest.approx(5000.0, rel=0.01)  # it crossed the wire, rounded
    assert front.door.gate_deadlines[-1] == pytest.approx(5000.0, rel=0.01)


def test_metadata_gives_a_deadline_and_a_source(front: FrontEnd, connected: grpc.Channel) -> None:
    metadata = (("x-carpool-deadline-ms", "1500.5"), ("x-carpool-source", "camera 7"))
    infer(connected, image_request(), metadata=metadata)
    call = front.door.calls[-1]
    assert call.source == "camera 7"
    assert call.arrived < call.deadline <= call.arrived + 1.5005


def test_the_timeout_parameter_is_a_deadline_without_fixed(front: FrontEnd, connected: grpc.Channel) -> None:
    request = image_request("image-eager")
    request.parameters["timeout"].int64_param = 250_000
    infer(connected, request)
    assert front.door.calls[-1].deadline == pytest.approx(front.door.calls[-1].arrived + 0.25)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("x-carpool-deadline-ms", "soon"),
        ("x-carpool-deadline-ms", "0"),
        ("x-carpool-source", "x" * 129),
        ("x-carpool-compression", "brotli"),
    ],
)
def test_metadata_that_cannot_be_is_named(connected: grpc.Channel, key: str, value: str) -> None:
    status, _, metadata = refusal(lambda: infer(connected, image_request(), metadata=((key, value),)))
    assert status is Code.INVALID_ARGUMENT
    assert metadata["carpool-field"].lower() == key


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_accepted(connected: grpc.Channel, algorithm: grpc.Compression) -> None:
    request = one_input("echo-UINT8", "UINT8", [1, 100_000], bytes(100_000))
    assert infer(connected, request, compression=algorithm).raw_output_contents[0] == bytes(100_000)


@pytest.mark.parametrize("name", ["gzip", "deflate", "identity"])
def test_answers_are_compressed_on_request(front: FrontEnd, connected: grpc.Channel, name: str) -> None:
    request = one_input("echo-UINT8", "UINT8", [1, 100_000], bytes(100_000))
    response = infer(connected, request, metadata=(("x-carpool-compression", name),))
    assert response.raw_output_contents[0] == bytes(100_000)


@pytest.mark.parametrize("size", [10_000, 1_000_000], ids=["at once", "in a thread"])
def test_without_memory_to_compress_it_an_answer_is_sent_as_it_is(
    connected: grpc.Channel, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def full(*_arguments: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(zlib, "compressobj", full)
    request = one_input("echo-UINT8", "UINT8", [1, size], bytes(size))
    response = infer(connected, request, metadata=(("x-carpool-compression", "gzip"),))
    assert response.raw_output_contents[0] == bytes(size)


# ---- refusals


@pytest.mark.parametrize("kind", STATUSES, ids=lambda kind: kind.__name__)
def test_every_error_has_its_status(
    front: FrontEnd, connected: grpc.Channel, kind: type[CarpoolError]
) -> None:
    front.door.held = True
    request = image_request().SerializeToString()
    future = connected.unary_unary(SERVICE + "ModelInfer").future(request, timeout=PATIENCE)
    call = front.wait_for_calls()[0]
    front.run(lambda: call.finish(kind("a sentence with ümlauts")))
    status, details, metadata = refusal(future.result)
    assert (status.name, details) == (STATUSES[kind].name, "a sentence with ümlauts")
    assert metadata["carpool-reason"] == kind.reason
    assert metadata["server-timing"].startswith("decode;dur=")
    assert 'batch;desc="17"' in metadata["server-timing"]


def test_the_table_is_the_one_of_the_documents() -> None:
    assert {kind: status.name for kind, status in STATUSES.items()} == {
        InvalidInput: "INVALID_ARGUMENT",
        ConfigError: "INVALID_ARGUMENT",
        TooLarge: "INVALID_ARGUMENT",
        Cancelled: "CANCELLED",
        Unauthenticated: "UNAUTHENTICATED",
        Forbidden: "PERMISSION_DENIED",
        NotFound: "NOT_FOUND",
        Replaced: "ABORTED",
        Refused: "RESOURCE_EXHAUSTED",
        Unsupported: "UNIMPLEMENTED",
        Unavailable: "UNAVAILABLE",
        DeadlineExceeded: "DEADLINE_EXCEEDED",
    }


def test_a_refusal_at_the_gate_says_when_to_come_back(front: FrontEnd, connected: grpc.Channel) -> None:
    front.door.refusal = Refused("no", reason="cannot-finish", predicted_ms=93.5, retry_after_s=1.2)
    rejected = "nv_inference_request_failure"
    before = front.count("image", rejected, reason="REJECTED")
    status, details, metadata = refusal(lambda: infer(connected, image_request()))
    assert (status, details) == (Code.RESOURCE_EXHAUSTED, "no")
    assert metadata["carpool-reason"] == "cannot-finish"
    assert (metadata["carpool-predicted-ms"], metadata["retry-after"]) == ("93.500", "2")
    assert not front.door.calls
    assert front.count("image", rejected, reason="REJECTED") == before + 1
    assert front.door.turned[-1] == ("image", "cannot-finish", 1, "")


def test_no_slot_and_not_serving_are_unavailable(front: FrontEnd, connected: grpc.Channel) -> None:
    front.door.slots = 0
    status, _, metadata = refusal(lambda: infer(connected, image_request()))
    assert (status, metadata["carpool-reason"], metadata["retry-after"]) == (
        Code.UNAVAILABLE,
        "no-slots",
        "1",
    )
    front.door.slots = 8
    infer(connected, image_request())
    front.door.serving = False
    counted = front.count("image", "nv_inference_request_failure", reason="OTHER")
    status, _, metadata = refusal(lambda: infer(connected, image_request()))
    assert (status, metadata["carpool-reason"]) == (Code.UNAVAILABLE, "not-serving")
    assert front.count("image", "nv_inference_request_failure", reason="OTHER") == counted + 1


def test_a_model_that_raises_is_internal(connected: grpc.Channel) -> None:
    status, details, _ = refusal(lambda: infer(connected, pb.ModelInferRequest(model_name="broken")))
    assert status is Code.INTERNAL
    assert "ValueError" in details


def test_a_model_that_breaks_its_word_is_internal(front: FrontEnd, connected: grpc.Channel) -> None:
    front.door.held = True
    request = image_request().SerializeToString()
    future = connected.unary_unary(SERVICE + "ModelInfer").future(request, timeout=PATIENCE)
    call = front.wait_for_calls()[0]
    front.run(lambda: call.finish(ModelError("died")))
    assert refusal(future.result)[0] is Code.INTERNAL


def changed(**changes: Any) -> Any:
    request = image_request()
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def bad_requests() -> Iterator[tuple[str, Any, grpc.StatusCode, str]]:
    yield "no such model", changed(model_name="nothing"), Code.NOT_FOUND, "unknown model"
    yield "no model", pb.ModelInferRequest(), Code.NOT_FOUND, "unknown model"
    yield "no such version", changed(model_version="9"), Code.NOT_FOUND, "it serves 1"
    yield "no inputs", pb.ModelInferRequest(model_name="image"), Code.INVALID_ARGUMENT, "expected 1 inputs"
    for size in (0, 5, 7):
        request = image_request()
        request.raw_input_contents[0] = bytes(size)
        yield f"{size} bytes", request, Code.INVALID_ARGUMENT, f"Expected 6, got {size}"
    request = image_request()
    request.raw_input_contents.append(b"")
    yield "one too many", request, Code.INVALID_ARGUMENT, "1 more than there are inputs for"
    request = image_request()
    request.inputs.add(name="more", datatype="UINT8", shape=[1])
    yield "one too few", request, Code.INVALID_ARGUMENT, "no entry for input 'more'"
    request = image_request()
    request.inputs[0].contents.uint_contents.extend(range(6))
    yield "both ways", request, Code.INVALID_ARGUMENT, "give one of the two"
    request = image_request()
    del request.raw_input_contents[:]
    yield "neither way", request, Code.INVALID_ARGUMENT, "has 0 values"
    request = image_request()
    del request.raw_input_contents[:]
    request.inputs[0].contents.uint_contents.extend(range(5))
    yield "too few values", request, Code.INVALID_ARGUMENT, "has 5 values, but shape [1, 2, 3] needs 6"
    request = image_request()
    del request.raw_input_contents[:]
    request.inputs[0].contents.int_contents.extend(range(6))
    yield "the wrong field", request, Code.INVALID_ARGUMENT, "uint_contents, not into int_contents"
    request = image_request()
    del request.raw_input_contents[:]
    request.inputs[0].contents.uint_contents.extend([0, 1, 2, 3, 4, 256])
    yield "a value too large", request, Code.INVALID_ARGUMENT, "out of range for UINT8"
    request = one_input("echo-FP16", "FP16", [1, 1])
    request.inputs[0].contents.fp32_contents.append(1.0)
    yield "FP16 values", request, Code.INVALID_ARGUMENT, "only raw_input_contents"
    for shape in ([], [1], [9, 2, 3], [1, 2, 4], [-1, 2, 3], [2**40, 2**40, 3], [1] * 40):
        request = image_request()
        request.inputs[0].shape[:] = shape
        yield f"shape {shape}"[:30], request, Code.INVALID_ARGUMENT, "shape"
    request = image_request()
    request.inputs[0].datatype = "UINT9"
    yield "no datatype", request, Code.INVALID_ARGUMENT, "no valid datatype"
    request = image_request()
    request.inputs[0].name = ""
    yield "no name", request, Code.INVALID_ARGUMENT, "needs a name"
    request = image_request()
    request.inputs.add(name="image", datatype="UINT8", shape=[1, 2, 3])
    request.raw_input_contents.append(IMAGE.tobytes())
    yield "twice", request, Code.INVALID_ARGUMENT, "already exists in request"
    request = image_request()
    request.outputs.add(name="score")
    yield "no such output", request, Code.INVALID_ARGUMENT, "did you mean 'scores'?"
    request = image_request()
    request.outputs.add(name="scores").parameters["classification"].int64_param = -1
    yield "classes below 0", request, Code.INVALID_ARGUMENT, "must be an integer of 0 or more"
    request = image_request()
    request.parameters["priority"].int64_param = -1
    yield "priority below 0", request, Code.INVALID_ARGUMENT, "parameters.priority"
    request = image_request()
    request.parameters["timeout"].string_param = "soon"
    yield "no number", request, Code.INVALID_ARGUMENT, "parameters.timeout"
    request = image_request()
    request.parameters["triton_secret"].bool_param = True
    yield "reserved", request, Code.INVALID_ARGUMENT, "reserved for Triton usage"
    request = image_request()
    request.parameters["empty"].SetInParent()
    yield "without a value", request, Code.INVALID_ARGUMENT, "has no value"
    request = image_request()
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 6
    del request.raw_input_contents[:]
    yield "not allowed", request, Code.UNIMPLEMENTED, "--allow-client-shm"
    yield "BOOL of 2", one_input("echo-BOOL", "BOOL", [1, 1], b"\2"), Code.INVALID_ARGUMENT, "must be 0 or 1"
    lying = struct.pack("<I", 9) + b"ab"
    yield (
        "BYTES lie",
        one_input("echo-BYTES", "BYTES", [1, 1], lying),
        Code.INVALID_ARGUMENT,
        "expected 1 string elements",
    )


@pytest.mark.parametrize(
    ("request_", "status", "words"),
    [pytest.param(*rest, id=name) for name, *rest in bad_requests()],
)
def test_bad_requests_are_told_what_to_change(
    front: FrontEnd, connected: grpc.Channel, request_: Any, status: grpc.StatusCode, words: str
) -> None:
    for _ in range(2):  # an error must not be remembered as an answer
        found, details, metadata = refusal(lambda: infer(connected, request_))
        assert found is status, details
        assert words in details
        assert metadata["carpool-reason"]
    front.until_slots_are_back()
    assert floats(infer(connected, image_request())) == SUM


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a\xff",
        b"\x0a\x05ab",
        b"\xff" * 20,
        b"\x0b" * 100,
        b"\x1a\x02\xff\xfe",
        b"\x3a" + b"\x80" * 1000,
        b"{}",
    ],
    ids=lambda message: message[:8].hex(),
)
def test_garbage_is_an_invalid_argument(connected: grpc.Channel, message: bytes) -> None:
    status, details, _ = refusal(lambda: send(connected, message))
    assert (status, "ModelInferRequest" in details or "UTF-8" in details) == (Code.INVALID_ARGUMENT, True)


def test_an_id_that_is_no_text_is_named_also_when_its_kind_is_known(connected: grpc.Channel) -> None:
    infer(connected, image_request())
    status, _, metadata = refusal(
        lambda: send(connected, image_request().SerializeToString() + b"\x1a\x01\xff")
    )
    assert (status, metadata["carpool-field"]) == (Code.INVALID_ARGUMENT, "id")


def test_names_from_outside_do_not_break_the_metadata(connected: grpc.Channel) -> None:
    request = image_request()
    request.inputs[0].name = "naïve\n☃" + "x" * 5000
    status, details, metadata = refusal(lambda: infer(connected, request))
    assert status is Code.INVALID_ARGUMENT
    assert metadata["carpool-field"].isascii()
    assert len(details) < 1100


def test_an_unknown_method_is_unimplemented(connected: grpc.Channel) -> None:
    assert refusal(lambda: send(connected, b"", "ModelDream"))[0] is Code.UNIMPLEMENTED


# ---- sizes


def test_inputs_up_to_the_limit_are_taken_and_more_is_refused(connected: grpc.Channel) -> None:
    for size, fits in ((MAX_BODY, True), (MAX_BODY + 1, False)):
        request = one_input("echo-UINT8", "UINT8", [1, size], bytes(size))
        if fits:
            assert len(infer(connected, request).raw_output_contents[0]) == size
        else:
            status, details, metadata = refusal(lambda request=request: infer(connected, request))
            assert (status, metadata["carpool-reason"]) == (Code.INVALID_ARGUMENT, "too-large")
            assert str(MAX_BODY) in details


@pytest.mark.parametrize("algorithm", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_what_is_too_long_is_refused_before_it_is_all_in_memory(
    front: FrontEnd, connected: grpc.Channel, algorithm: grpc.Compression
) -> None:
    """By the announced length, and by what comes out while it is decompressed."""
    status, details, _ = refusal(lambda: send(connected, bytes(64 << 20), compression=algorithm))
    assert status is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in details
    assert not front.door.calls
    assert floats(infer(connected, image_request())) == SUM


# ---- clients that leave


def pending(front: FrontEnd, connected: grpc.Channel, model: str = "image") -> grpc.Future:
    request = image_request(model).SerializeToString()
    future = connected.unary_unary(SERVICE + "ModelInfer").future(request, timeout=PATIENCE)
    front.wait_for_calls()
    return future


def test_a_client_that_cancels_gives_up_its_place(front: FrontEnd, connected: grpc.Channel) -> None:
    front.door.held = True
    before = front.count("image", "nv_inference_request_failure", reason="CANCELED")
    future = pending(front, connected)
    future.cancel()
    until(lambda: front.door.calls[0].cancelled)
    front.until_slots_are_back()
    until(lambda: front.count("image", "nv_inference_request_failure", reason="CANCELED") == before + 1)


def test_a_deadline_that_passes_gives_up_its_place(front: FrontEnd, connected: grpc.Channel) -> None:
    front.door.held = True
    for seconds in (0.2, 1.0, 5.0):  # the first is enough, unless the machine is slow to take the call
        status, _, _ = refusal(lambda seconds=seconds: infer(connected, image_request(), timeout=seconds))
        assert status is Code.DEADLINE_EXCEEDED
        if front.door.calls:
            break
    until(lambda: front.door.calls[0].cancelled)


def test_a_channel_that_closes_gives_up_its_places(front: FrontEnd) -> None:
    front.door.held = True
    with channel(front) as connected:
        call = connected.unary_unary(SERVICE + "ModelInfer")
        message = image_request().SerializeToString()
        futures = [call.future(message, timeout=PATIENCE) for _ in range(5)]
        front.wait_for_calls(len(futures))
    until(lambda: all(call.cancelled for call in front.door.calls))


def test_leaving_in_the_moment_of_the_answer_is_harmless(front: FrontEnd, connected: grpc.Channel) -> None:
    """The call must be released, not cancelled: the fake door asserts it."""
    front.door.held = True
    for _ in range(30):
        front.door.calls.clear()
        future = pending(front, connected)
        call = front.door.calls[0]
        future.cancel()
        front.run(call.finish)
        until(lambda call=call: call.cancelled or call.released)
    front.until_slots_are_back()


def test_leaving_while_a_thread_reads_is_harmless(front: FrontEnd, connected: grpc.Channel) -> None:
    raw = (struct.pack("<I", 20) + b"x" * 20) * 20_000
    request = one_input("echo-BYTES", "BYTES", [1, 20_000], raw).SerializeToString()
    for _ in range(10):
        connected.unary_unary(SERVICE + "ModelInfer").future(request, timeout=PATIENCE).cancel()
    front.until_slots_are_back()
    assert floats(infer(connected, image_request())) == SUM


# ---- many at once


def mixed(connected: grpc.Channel, number: int, kind: int) -> str:
    """One request of some kind; what went wrong with a good one."""
    if kind == 0:
        refusal(lambda: send(connected, b"\xff" * (number % 30) + b"\x0a"))
    elif kind == 1:
        refusal(lambda: infer(connected, image_request("nothing")))
    elif kind == 2:
        connected.unary_unary(SERVICE + "ModelInfer").future(image_request().SerializeToString()).cancel()
    else:
        raw = bytes((number % 256,)) * 1000
        response = infer(connected, one_input("echo-UINT8", "UINT8", [1, 1000], raw, id=str(number)))
        return "" if (response.raw_output_contents[0], response.id) == (raw, str(number)) else f"{number} "
    return ""


def test_neighbours_are_unharmed(front: FrontEnd) -> None:
    """Good requests, bad ones, garbage and quitters at the same time, on several connections."""
    wrong: list[str] = []

    def one(first: int) -> None:
        with channel(front) as connected:
            for turn in range(25):
                try:
                    wrong.append(mixed(connected, first * 25 + turn, (first + turn) % 5))
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (len(wrong), "".join(wrong)) == (200, "")
    front.until_slots_are_back()


def test_successes_and_bytes_are_counted() -> None:
    with front_end(echo("e", Datatype.UINT8)) as front, channel(front) as connected:
        for _ in range(3):
            infer(connected, one_input("e", "UINT8", [1, 100], bytes(100)))
        assert front.count("e", "nv_inference_request_success") == 3
        refusal(lambda: infer(connected, one_input("e", "UINT8", [1, 100], bytes(99))))
        assert front.count("e", "nv_inference_request_failure", reason="OTHER") == 1


def test_latest_goes_through_the_door_and_needs_a_source(front: FrontEnd, connected: grpc.Channel) -> None:
    latest = ("x-carpool-latest", "1")
    infer(connected, image_request(), metadata=(latest, ("x-carpool-source", "cam")))
    assert front.door.calls[-1].sender[:2] == ("cam", True)
    request = image_request()
    request.parameters["latest"].bool_param = True
    request.parameters["source"].string_param = "cam"
    infer(connected, request)
    assert front.door.calls[-1].sender[:2] == ("cam", True)
    status, _, metadata = refusal(lambda: infer(connected, image_request(), metadata=(latest,)))
    assert status is Code.INVALID_ARGUMENT
    assert metadata["carpool-field"] == "X-Carpool-Latest"


def test_a_request_that_is_wrong_for_any_model_loads_none() -> None:
    with front_end() as front, channel(front) as connected:
        asked: list[str] = []
        front.door.answers["demand"] = lambda arguments: asked.append(arguments["model"]) or {}
        cold = IndexEntry("cold", "1", "UNAVAILABLE", "it is loaded on demand")
        said = PublishedServer(on_demand={"cold": ""})
        front.run(lambda: front.door.renew(index=[cold], server=said))
        method = connected.unary_unary(SERVICE + "ModelInfer")
        wrong = pb.ModelInferRequest(model_name="cold")
        wrong.inputs.add(name="x", datatype="NONSENSE", shape=[1])
        for message, loads in ((wrong, []), (image_request("cold"), ["cold"])):
            with pytest.raises(grpc.RpcError):
                method(message.SerializeToString(), timeout=PATIENCE)
            assert asked == loads
