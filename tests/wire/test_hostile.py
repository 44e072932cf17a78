"""Requests that are wrong: each gets one sentence, and the field it is about."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from carpool.errors import InvalidInput, Unsupported
from carpool.types import Datatype, TensorSpec
from carpool.wire import v2
from carpool.wire.head import MAX_JSON_LISTS, MAX_JSON_VALUES, MAX_PARAMETERS, load_object, parse_head
from carpool.wire.long_json import LongNumbers
from wire.samples import IMAGE, SCORES, body, decode_json, decode_request, entry, image_body, signature

BINARY = {"binary_data_size": 6}


def refusal(whole: bytes, header_length: int | None, model: Any = IMAGE) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        decode_request(whole, header_length, model)
    assert caught.value.field
    return caught.value


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"name": "imge"}, "input 'imge'", "did you mean 'image'?"),
        ({"name": "x" * 9000}, "input 'xxx", "it has 'image'"),
        ({"name": ""}, "inputs.name", "needs a name"),
        ({"name": 3}, "inputs.name", "needs a name"),
        ({"datatype": "INT8"}, "input 'image'.datatype", "is 'INT8', but model 'net' expects 'UINT8'"),
        ({"datatype": "FLOAT"}, "input 'image'.datatype", "valid are BOOL, UINT8"),
        ({"datatype": []}, "input 'image'.datatype", "no valid datatype"),
        ({"shape": [2, 3]}, "input 'image'.shape", "Expected [-1,2,3], got [2,3]"),
        ({"shape": [1, 3, 2]}, "input 'image'.shape", "got [1,3,2]; the first dimension is the batch"),
        ({"shape": [-1, -2, 3]}, "input 'image'.shape", "only integers of 0 or more"),
        ({"shape": [True, 2, 3]}, "input 'image'.shape", "only integers"),
        ({"shape": [1.0, 2, 3]}, "input 'image'.shape", "only integers"),
        ({"shape": "6"}, "input 'image'.shape", "must be a list"),
        ({"shape": [1] * 33}, "input 'image'.shape", "at most 32"),
        (
            {"shape": [2**62, 2**62]},
            "input 'image'.shape",
            "causes total element count to exceed maximum size of",
        ),
        (
            {"shape": [2**62, 0]},
            "input 'image'.shape",
            "causes total element count to exceed maximum size of",
        ),
        ({"shape": None}, "input 'image'.shape", "must be a list"),
        ({"parameters": {}}, "input 'image'.data", "has no data"),
        ({"parameters": None}, "input 'image'.data", "has no data"),
        ({"data": [1]}, "input 'image'.data", "in more than one way"),
        ({"parameters": [6]}, "input 'image'.parameters", "must be a JSON object"),
        (
            {"parameters": {"binary_data_size": 5}},
            "binary_data_size",
            "input byte size mismatch for input 'image' for model 'net'. Expected 6, got 5; the shape is",
        ),
        ({"parameters": {"binary_data_size": -6}}, "binary_data_size", "0 or more"),
        ({"parameters": {"binary_data_size": 6.0}}, "binary_data_size", "integer"),
        ({"parameters": {"binary_data_size": True}}, "binary_data_size", "integer"),
    ],
)
def test_a_wrong_input(change: dict[str, Any], field: str, words: str) -> None:
    error = refusal(*image_body(**change))
    assert field in str(error.field)
    assert words in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("document", "field", "words"),
    [
        ([], "body", "must be a JSON object"),
        (7, "body", "must be a JSON object"),
        ({}, "inputs", "must be a JSON array"),
        ({"inputs": {}}, "inputs", "must be a JSON array"),
        ({"inputs": [3]}, "inputs", "must be a JSON object"),
        ({"inputs": [{}] * 1025}, "inputs", "more than 1024"),
        (
            {"inputs": []},
            "inputs",
            "expected 1 inputs but got 0 inputs for model 'net'. Got input(s) [], but missing required"
            " input(s) ['image']. Please provide all required input(s).",
        ),
        ({"inputs": [entry(data=[0] * 6)] * 2}, "input 'image'", "already exists in request"),
        ({"inputs": [], "id": 7}, "id", "must be a string"),
        ({"inputs": [], "parameters": 3}, "parameters", "JSON object"),
        ({"inputs": [], "parameters": {"priority": -1}}, "parameters.priority", "0 or more"),
        ({"inputs": [], "parameters": {"priority": True}}, "parameters.priority", "0 or more"),
        ({"inputs": [], "parameters": {"timeout": 1.5}}, "parameters.timeout", "integer"),
        ({"inputs": [], "parameters": {"source": "s" * 129}}, "parameters.source", "at most 128"),
        ({"inputs": [], "parameters": {"source": "gate\n3"}}, "parameters.source", "printable"),
        ({"inputs": [], "parameters": {"source": "\x1b[31m"}}, "parameters.source", "printable"),
        ({"inputs": [], "parameters": {"sequence_id": -1}}, "parameters.sequence_id", "0 or more"),
        ({"inputs": [], "parameters": {"sequence_start": 1}}, "parameters.sequence_start", "true or false"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output", "true"),
        ({"inputs": [], "parameters": {"headers": "x"}}, "parameters.headers", "reserved"),
        ({"inputs": [], "parameters": {"triton_x": 1}}, "parameters.triton_x", "reserved"),
        ({"inputs": [], "parameters": {"mine": [1]}}, "parameters.mine", "string, a number or a bool"),
        ({"inputs": [], "outputs": {}}, "outputs", "JSON array"),
        ({"inputs": [], "outputs": [{"name": "a"}] * 2}, "output 'a'", "already exists in request"),
        ({"inputs": [], "outputs": [{"name": "a", "parameters": {"binary_data": 1}}]}, "binary_data", "true"),
        (
            {"inputs": [], "outputs": [{"name": "a", "parameters": {"classification": "1"}}]},
            "classif",
            "integer",
        ),
        (
            {"inputs": [entry(data=[0] * 6)], "outputs": [{"name": "score"}]},
            "output 'score'",
            "did you mean 'scores'?",
        ),
    ],
)
def test_a_wrong_document(document: Any, field: str, words: str) -> None:
    error = refusal(body(document)[0], None)
    assert field in str(error.field)
    assert words in error.message


@pytest.mark.parametrize(
    ("json", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"inputs": NaN}', "not valid JSON"),
        (b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"id":"x"}', "must be a JSON array"),
        (b'{"id":"x",,"inputs":[]}', "not valid JSON"),
    ],
)
def test_wrong_json(json: bytes, words: str) -> None:
    assert words in refusal(json, None).message


@pytest.mark.parametrize(
    ("values", "datatype", "words"),
    [
        ([300, 0], "UINT8", "out of range for UINT8"),
        ([-1, 0], "UINT32", "out of range"),
        ([2**63, 0], "INT64", "out of range"),
        ([1.5, 0], "INT32", "only integers for INT32"),
        ([1.0, 0], "INT32", "only integers"),
        ([True, 0], "INT32", "only integers"),
        ([1e39, 0], "FP32", "out of range for FP32"),
        (["NaN", 0], "FP32", "only numbers"),
        ([None, 0], "FP64", "only numbers"),
        ([True, 0.5], "FP64", "only numbers"),
        ([0, 1], "BOOL", "only true or false"),
        ([1, 2], "BYTES", "only strings"),
        ([1, 2], "FP16", "which JSON cannot represent"),
        ([1, 2], "BF16", "which JSON cannot represent"),
        ([1], "INT8", "has 1 elements, but shape [1, 2] needs 2"),
        ([1, 2, 3], "INT8", "has 3 elements"),
        ([[1], [2]], "INT8", "not nested as shape [1, 2] at depth 0"),
        ([[1, 2, 3]], "INT8", "not nested as shape [1, 2] at depth 1"),
        ([[[1, 2], [3]]], "INT8", "has 3 elements"),
        ([[[1], 2]], "INT8", "nested unevenly at depth 2"),
        ([[[1], [[2]]]], "INT8", "only integers"),
        ([[[[]]]], "INT8", "has 0 elements"),
        ([[1, 2], 3], "INT8", "not nested"),
        ([1, [2]], "INT8", "only integers"),
        ("ab", "BYTES", "must be a JSON array"),
    ],
)
def test_wrong_json_values(values: Any, datatype: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode_json(values, datatype)
    assert caught.value.field == "input 'x'.data"
    assert words in caught.value.message


@pytest.mark.parametrize(("rows", "bound"), [(0, ">= 1"), (9, "<= 8"), (2**30, "<= 8")])
def test_batch_limits_have_the_words_users_know(rows: int, bound: str) -> None:
    error = refusal(*image_body(shape=[rows, 2, 3], parameters={"binary_data_size": rows * 6}))
    assert error.message == f"inference request batch-size must be {bound} for 'net'"


def test_inputs_must_agree_on_the_batch() -> None:
    model = signature(TensorSpec("a", Datatype.INT8, ()), TensorSpec("b", Datatype.INT8, ()))
    inputs = [entry("a", "INT8", [1], data=[1]), entry("b", "INT8", [2], data=[1, 2])]
    assert "does not match other inputs" in refusal(body({"inputs": inputs})[0], None, model).message


@pytest.mark.parametrize("extra", [-1, 1, 100])
def test_the_body_must_be_as_long_as_the_head_says(extra: int) -> None:
    whole, end = image_body()
    whole = whole[:extra] if extra < 0 else whole + bytes(extra)
    message = refusal(whole, end).message
    assert f"take 6 bytes, but {6 + extra} follow" in message
    if extra > 0:
        assert message.startswith("unexpected additional input data for model 'net'")
    else:
        assert message.startswith(
            "unexpected size for input 'image', expecting 1 additional bytes for model 'net'"
        )


def test_binary_data_without_a_header_length() -> None:
    json = body({"inputs": [entry(parameters=BINARY)]})[0]
    assert "take 6 bytes, but 0 follow" in refusal(json, None).message


def test_binding_never_reads_past_the_tail() -> None:
    whole, end = image_body()
    head = v2.read_head(whole[:end], IMAGE)
    with pytest.raises(InvalidInput, match="behind the end"):
        v2.bind(head.inputs, b"short")


@pytest.mark.parametrize("value", ["-1", "+1", "1_0", "", "ten", "1.0", "٣", "9" * 19, b"\xff", "101"])
def test_wrong_header_lengths(value: str | bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        v2.read_header_length(value, 100)
    assert caught.value.field == v2.HEADER_LENGTH


@pytest.mark.parametrize("header_length", [-1, 10_000])
def test_a_header_length_outside_the_body(header_length: int) -> None:
    assert refusal(image_body()[0], header_length).field == v2.HEADER_LENGTH


@pytest.mark.parametrize(
    ("specs", "size", "words"),
    [
        (
            [TensorSpec("a", Datatype.UINT8, (2, 3)), SCORES],
            6,
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs",
        ),
        (
            [TensorSpec("a", Datatype.UINT8, (-1, -1))],
            6,
            "can not be deduced because there are more than one variable-sized dimension",
        ),
        ([TensorSpec("a", Datatype.UINT8, (2, 3))], 12, "needs 6 bytes, but the body has 12"),
        ([TensorSpec("a", Datatype.UINT8, (2, 3))], 0, "needs 6 bytes"),
        ([TensorSpec("a", Datatype.FP32, (-1, 3))], 25, "needs a multiple of 12 bytes"),
        ([TensorSpec("a", Datatype.BYTES, (-1,))], 6, "the model must have input shape [1]"),
        ([TensorSpec("a", Datatype.BYTES, (2,))], 6, "the model must have input shape [1]"),
    ],
)
def test_wrong_raw_requests(specs: list[TensorSpec], size: int, words: str) -> None:
    assert words in refusal(bytes(size), 0, signature(*specs)).message


@pytest.mark.parametrize(
    ("shape", "tail"),
    [
        ([1, 1], b"\x03\0\0\0hi"),
        ([1, 2], b"\x04\0\0\0abcd"),
        ([1, 1], b"\xff\xff\xff\xffhi"),
        ([1, 1], b"\x00\0\0\0\x00\0\0\0"),
        ([1, 1], b"\x01\0\0\0hi"),
        ([1, 1], b"\x01\0"),
        ([1, 0], b"\x00\0\0\0"),
        ([1, 2**40], b"\x00\0\0\0"),
    ],
)
def test_wrong_bytes_elements(shape: list[int], tail: bytes) -> None:
    model = signature(TensorSpec("x", Datatype.BYTES, (-1,)))
    head = {"inputs": [entry("x", "BYTES", shape, parameters={"binary_data_size": len(tail)})]}
    assert "input 'x'" in str(refusal(*body(head, tail), model).field)


def test_bool_bytes_are_0_or_1() -> None:
    model = signature(TensorSpec("x", Datatype.BOOL, (2,)))
    head = {"inputs": [entry("x", "BOOL", [1, 2], parameters={"binary_data_size": 2})]}
    assert "must be 0 or 1" in refusal(*body(head, b"\1\2"), model).message


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"shared_memory_region": "", "shared_memory_byte_size": 6}, "name of a region"),
        ({"shared_memory_region": "r"}, "shared_memory_byte_size is missing"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 5}, "Expected 6, got 5"),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 6, "shared_memory_offset": -1},
            "0 or more",
        ),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 6, **BINARY}, "more than one way"),
    ],
)
def test_wrong_shared_memory(parameters: dict[str, Any], words: str) -> None:
    assert words in refusal(*image_body(parameters=parameters)).message


def test_shared_memory_that_nobody_resolved() -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 6}
    with pytest.raises(Unsupported, match="shared memory"):
        decode_request(body({"inputs": [entry(parameters=parameters)]})[0], None, IMAGE)


@pytest.mark.parametrize("outputs", [[], [{"name": "half"}]])
def test_outputs_that_json_cannot_carry_are_refused_before_the_model_runs(outputs: list[Any]) -> None:
    model = signature(*IMAGE.inputs, outputs=(TensorSpec("half", Datatype.FP16, (4,)),))
    document = {"inputs": [entry(data=[0] * 6)], "outputs": outputs}
    error = refusal(body(document)[0], None, model)
    assert error.field == "output 'half'.parameters.binary_data"


def test_bytes_outputs_cannot_be_classified() -> None:
    model = signature(*IMAGE.inputs, outputs=(TensorSpec("text", Datatype.BYTES, (4,)),))
    outputs = [{"name": "text", "parameters": {"classification": 1}}]
    error = refusal(body({"inputs": [entry(data=[0] * 6)], "outputs": outputs})[0], None, model)
    assert "class result not available for output due to unsupported type 'BYTES'" in error.message


@pytest.mark.parametrize("levels", [3, 50, 100])
def test_json_nested_deeper_than_its_shape_is_flattened(levels: int) -> None:
    values: Any = [7, 8]
    for _ in range(levels - 1):
        values = [values]
    assert decode_json(values, "INT8").data.tolist() == [[7, 8]]


def test_json_nested_too_deep() -> None:
    values: Any = [7, 8]
    for _ in range(100):
        values = [values]
    with pytest.raises(InvalidInput, match=r"JSON nesting depth exceeds maximum allowed limit \(100\)"):
        decode_json(values, "INT8")


@pytest.mark.parametrize("piece", [b"0,", b"[],", b"{},", b'"",'])
def test_json_of_too_many_values_is_refused_before_it_is_read(piece: bytes) -> None:
    most = MAX_JSON_VALUES if piece in (b"0,", b'"",') else MAX_JSON_LISTS
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="values or"):
            load_object(b'{"a":[' + piece * most + b"0]}", "request")
        assert tracemalloc.get_traced_memory()[1] < 5 * most + (4 << 20)
    finally:
        tracemalloc.stop()
    count = most // 60
    found = load_object(b'{"a":[' + piece * count + b"0]}", "request")["a"]
    assert isinstance(found, LongNumbers) or len(found) == count + 1
    with pytest.raises(InvalidInput, match=r"more than 100,000 values or 10,000 lists$"):
        load_object(b'{"a":[' + piece * (most // 20) + b"0]}", "request", tensors=False)
    assert load_object(b'{"a":"' + b"A" * most + b'"}', "request", tensors=False)


def test_parameters_are_counted_before_any_of_them_is_read() -> None:
    few = b",".join(b'"k%d":1' % number for number in range(MAX_PARAMETERS))
    tensor = b'{"name":"x","datatype":"INT8","shape":[1],"parameters":{%b}}'
    assert len(parse_head(b'{"inputs":[],"parameters":{%b}}' % few).options.custom) == MAX_PARAMETERS
    for json, field in (
        (b'{"inputs":[],"parameters":{%b,"more":1}}' % few, "parameters"),
        (b'{"inputs":[%b]}' % (tensor % (few + b',"more":1')), "input 'x'.parameters"),
        (b'{"inputs":[],"outputs":[{"name":"y","parameters":{%b,"more":1}}]}' % few, "output 'y'.parameters"),
    ):
        with pytest.raises(InvalidInput, match="may hold at most 1,024 parameters") as raised:
            parse_head(json)
        assert raised.value.field == field
