"""Requests that are right: every form a tensor, an option and an output can take."""

from __future__ import annotations

import numpy as np
import pytest

from carpool.errors import InvalidInput
from carpool.types import Datatype, RequestedOutput, RequestOptions, SharedMemory, TensorSpec
from carpool.wire import v2
from wire.samples import IMAGE, body, decode_json, decode_request, entry, image_body, signature


def test_a_binary_tensor_is_a_view_into_the_body() -> None:
    whole, header_length = image_body()
    buffer = bytearray(whole)
    request = decode_request(buffer, header_length, IMAGE)
    image = request.inputs[0]
    assert (image.name, image.datatype, image.shape) == ("image", Datatype.UINT8, (1, 2, 3))
    buffer[header_length] = 99
    assert image.data.tolist() == [[[99, 1, 2], [3, 4, 5]]]
    assert (request.model, request.batch, request.id) == ("net", 1, "")


def test_two_binary_tensors_lie_one_after_the_other() -> None:
    model = signature(TensorSpec("a", Datatype.UINT8, (-1,)), TensorSpec("b", Datatype.FP32, ()))
    first = entry("b", "FP32", [2], parameters={"binary_data_size": 8})
    second = entry("a", "UINT8", [2, 1], parameters={"binary_data_size": 2})
    whole, end = body({"inputs": [first, second]}, np.float32([1.5, 2]).tobytes() + b"\x07\x08")
    head = v2.read_head(whole[:end], model)
    assert [(t.offset, t.size) for t in head.inputs] == [(0, 8), (8, 2)]
    assert (head.tail_size, head.batch) == (10, 2)
    b, a = v2.bind(head.inputs, whole[end:])
    assert b.data.tolist() == [1.5, 2.0]
    assert a.data.tolist() == [[7], [8]]


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FP32", [1, -2.5]),
        ("FP64", [1e300, 0.1]),
    ],
)
def test_json_values(datatype: str, values: list[float]) -> None:
    for data in (values, [values]):
        tensor = decode_json(data, datatype)
        assert tensor.data.dtype == Datatype(datatype).dtype
        assert tensor.data.tolist() == [values]


def test_json_strings_become_bytes() -> None:
    assert decode_json(["é", ""], "BYTES").data.tolist() == [["é".encode(), b""]]


def test_the_largest_fp32_as_its_own_shortest_text_is_in_range() -> None:
    assert decode_json([3.4028235e38, 0], "FP32").data[0, 0] == np.finfo(np.float32).max


def test_empty_tensors() -> None:
    assert decode_json([], "FP32", (0, 3)).data.shape == (0, 3)
    assert decode_json([[], []], "INT32", (2, 0)).data.shape == (2, 0)
    model = signature(TensorSpec("x", Datatype.FP32, (-1,)))
    for shape in ([1, 0], [3, 0]):
        whole, end = body({"inputs": [entry("x", "FP32", shape, parameters={"binary_data_size": 0})]})
        assert decode_request(whole, end, model).inputs[0].data.shape == tuple(shape)


def test_bytes_elements_carry_their_length() -> None:
    model = signature(TensorSpec("x", Datatype.BYTES, (-1,)))
    tail = b"\x02\0\0\0hi\0\0\0\0"
    whole, end = body(
        {"inputs": [entry("x", "BYTES", [1, 2], parameters={"binary_data_size": len(tail)})]}, tail
    )
    assert decode_request(whole, end, model).inputs[0].data.tolist() == [[b"hi", b""]]


@pytest.mark.parametrize(
    ("shape", "datatype", "size", "found"),
    [
        ((2, 3), Datatype.UINT8, 6, (1, 2, 3)),
        ((-1, 3), Datatype.FP32, 24, (1, 2, 3)),
        ((-1, 3), Datatype.FP32, 0, (1, 0, 3)),
        ((1,), Datatype.BYTES, 5, (1, 1)),
    ],
)
def test_a_raw_body_is_the_only_input(
    shape: tuple[int, ...], datatype: Datatype, size: int, found: tuple[int, ...]
) -> None:
    request = decode_request(bytes(size), 0, signature(TensorSpec("x", datatype, shape)))
    assert request.inputs[0].shape == request.inputs[0].data.shape == found
    assert request.binary_output
    if datatype is Datatype.BYTES:
        assert request.inputs[0].data[0, 0] == bytes(size)


def test_a_raw_body_for_a_model_without_batches() -> None:
    model = signature(TensorSpec("x", Datatype.INT16, (2,)), max_batch=0)
    assert decode_request(b"\1\0\2\0", 0, model).inputs[0].data.tolist() == [1, 2]


def test_options_are_typed_and_custom_ones_kept() -> None:
    parameters = {
        "priority": 2,
        "timeout": 1500,
        "source": "cam-3",
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": False,
        "binary_data_output": True,
        "colour": "red",
        "triton_enable_empty_final_response": True,
    }
    head = v2.parse_head(body({"inputs": [entry(data=[0] * 6)], "parameters": parameters})[0])
    custom = {"colour": "red", "triton_enable_empty_final_response": True}
    assert head.options == RequestOptions(2, 0.0015, "cam-3", "s", True, False, custom)
    assert head.binary_output


def test_a_timeout_of_zero_is_none() -> None:
    head = v2.parse_head(body({"inputs": [], "parameters": {"timeout": 0}})[0])
    assert head.options.timeout is None


def test_listed_outputs_say_for_themselves_whether_they_are_binary() -> None:
    """As in Triton: the request's own default is for those who list none."""
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 4}
    document = {
        "inputs": [],
        "parameters": {"binary_data_output": True},
        "outputs": [
            {"name": "a"},
            {"name": "b", "parameters": {"binary_data": False, "classification": 3}},
            {"name": "c", "parameters": shared},
        ],
    }
    assert v2.parse_head(body(document)[0]).outputs == [
        RequestedOutput("a", False),
        RequestedOutput("b", False, 3),
        RequestedOutput("c", False, 0, SharedMemory("r", 16, 4)),
    ]


def test_an_input_in_shared_memory_is_in_the_head() -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 6}
    head = v2.read_head(body({"inputs": [entry(parameters=parameters)]})[0], IMAGE)
    assert head.inputs[0].shared_memory == SharedMemory("r", 6)
    assert head.tail_size == 0


@pytest.mark.parametrize("start", ['{"id":"7",', '{"id": "7",', '{ "id":"7",', '{"id":"\\u0037",'])
def test_ids_of_equal_heads_are_not_mixed_up(start: str) -> None:
    rest = '"inputs":[{"name":"image","datatype":"UINT8","shape":[1,2,3],"data":[1,2,3,4,5,6]}]}'
    assert v2.read_head((start + rest).encode(), IMAGE).id == "7"
    assert v2.read_head((start.replace("7", "8") + rest).encode(), IMAGE).id == "8"
    assert v2.read_head(("{" + rest).encode(), IMAGE).id == ""


def test_equal_heads_are_judged_per_model() -> None:
    whole, end = image_body()
    v2.read_head(whole[:end], IMAGE)
    other = signature(TensorSpec("image", Datatype.UINT8, (-1, -1)), max_batch=0, outputs=())
    with pytest.raises(InvalidInput, match="unexpected shape"):
        v2.read_head(whole[:end], other)


@pytest.mark.parametrize(("value", "found"), [(None, None), ("0", 0), (b" 12 ", 12), ("007", 7)])
def test_header_length(value: str | bytes | None, found: int | None) -> None:
    assert v2.read_header_length(value, 100) == found


def test_full_shape() -> None:
    spec = TensorSpec("x", Datatype.BF16, (3, -1))
    assert (spec.full_shape(8), spec.full_shape(0)) == ((-1, 3, -1), (3, -1))
    assert [d.size for d in (Datatype.BF16, Datatype.BYTES, Datatype.BOOL, Datatype.FP64)] == [2, 0, 1, 8]
