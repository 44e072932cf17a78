"""Whatever bytes come, a status goes back, nothing leaks, and the next request is served."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from frontend.grpc.front_end import SUM, FrontEnd, channel, floats, front_end, image_request, infer, send
from later import many

# What a server may say to nonsense. INTERNAL and UNKNOWN would be bugs.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}
BOUNDED = settings(
    max_examples=many(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
IMAGE = image_request().SerializeToString()


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture(scope="module")
def connected(front: FrontEnd) -> Iterator[grpc.Channel]:
    with channel(front) as made:
        yield made


def survives(front: FrontEnd, connected: grpc.Channel, message: bytes, method: str = "ModelInfer") -> None:
    status, details = said(connected, message, method)
    assert status in ALLOWED, (status, details)
    assert details
    front.until_slots_are_back()


def said(connected: grpc.Channel, message: bytes, method: str) -> tuple[grpc.StatusCode, str | None]:
    try:
        send(connected, message, method)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, "an answer"


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good request with some bytes changed, cut out or put in."""
    message = bytearray(IMAGE)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(message)))
        end = min(len(message), start + draw(st.integers(0, 6)))
        message[start:end] = draw(st.binary(max_size=6))
    return bytes(message)


names = st.sampled_from(["image", "x", "a", "b", "", "é"]) | st.text(max_size=5)
parameters = st.dictionaries(
    st.sampled_from(["priority", "timeout", "source", "sequence_id", "classification", "headers"])
    | st.sampled_from(
        ["shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "binary_data"]
    )
    | st.text(max_size=4),
    st.tuples(st.just("int64_param"), st.integers(-(2**63), 2**63 - 1))
    | st.tuples(st.just("uint64_param"), st.integers(0, 2**64 - 1))
    | st.tuples(st.just("string_param"), st.text(max_size=5))
    | st.tuples(st.just("double_param"), st.floats())
    | st.tuples(st.just("bool_param"), st.booleans()),
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Messages that are well formed and mean nothing."""
    models = ["image", "pair", "unbatched", "echo-BYTES", "echo-BOOL", "echo-FP16", "echo-UINT8", "nan", "x"]
    request = pb.ModelInferRequest(model_name=draw(st.sampled_from(models)), id=draw(st.text(max_size=5)))
    for key, (kind, value) in draw(parameters).items():
        setattr(request.parameters[key], kind, value)
    for _ in range(draw(st.integers(0, 3))):
        datatypes = st.sampled_from(["UINT8", "BYTES", "BOOL", "INT32", "INT64", "FP16", "", "X"])
        tensor = request.inputs.add(name=draw(names), datatype=draw(datatypes))
        tensor.shape.extend(draw(st.lists(st.integers(-1, 4) | st.just(2**62), max_size=4)))
        for key, (kind, value) in draw(parameters).items():
            setattr(tensor.parameters[key], kind, value)
        if draw(st.booleans()):
            tensor.contents.int_contents.extend(draw(st.lists(st.integers(-300, 300), max_size=6)))
        if draw(st.booleans()):
            tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=3), max_size=4)))
    for _ in range(draw(st.integers(0, 2))):
        output = request.outputs.add(name=draw(names))
        for key, (kind, value) in draw(parameters).items():
            setattr(output.parameters[key], kind, value)
    request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=24), max_size=3)))
    return bytes(request.SerializeToString())


@BOUNDED
@given(message=st.binary(max_size=200))
def test_any_bytes(front: FrontEnd, connected: grpc.Channel, message: bytes) -> None:
    survives(front, connected, message)


@BOUNDED
@given(message=mutated())
def test_almost_good_requests(front: FrontEnd, connected: grpc.Channel, message: bytes) -> None:
    survives(front, connected, message)
    assert floats(infer(connected, image_request())) == SUM


@BOUNDED
@given(message=requests())
def test_well_formed_nonsense(front: FrontEnd, connected: grpc.Channel, message: bytes) -> None:
    survives(front, connected, message)


@BOUNDED
@given(
    method=st.sampled_from(
        ["ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "RepositoryIndex"]
    ),
    message=st.binary(max_size=40),
)
def test_any_bytes_to_other_calls(
    front: FrontEnd, connected: grpc.Channel, method: str, message: bytes
) -> None:
    survives(front, connected, message, method)
