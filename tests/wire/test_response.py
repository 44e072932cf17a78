"""Answers and errors: what is written, in which form, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from carpool.errors import CarpoolError, InvalidInput, ModelError, Refused, Unsupported
from carpool.types import Datatype, InferResponse, RequestedOutput, SharedMemory, Tensor
from carpool.wire import v2
from wire.samples import body, entry, joined, tensor_of

SCORES = tensor_of("scores", Datatype.FP32, [[0.5, 1.5]])
NAMES = tensor_of("names", Datatype.BYTES, [[b"cat", b"\xc3\xa9"]])
ANSWER = InferResponse("net", [SCORES, NAMES], version="2", id="r1")


def test_everything_as_json() -> None:
    encoded = v2.encode_response(ANSWER)
    assert encoded.header_length is None
    assert orjson.loads(joined(encoded)) == {
        "model_name": "net",
        "model_version": "2",
        "id": "r1",
        "outputs": [
            {"name": "scores", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]},
            {"name": "names", "datatype": "BYTES", "shape": [1, 2], "data": ["cat", "é"]},
        ],
    }


def test_each_output_has_its_own_form_and_the_requested_order() -> None:
    outputs = [RequestedOutput("names", binary=True), RequestedOutput("scores")]
    encoded = v2.encode_response(ANSWER, outputs)
    assert encoded.header_length is not None
    whole = joined(encoded)
    listed = orjson.loads(whole[: encoded.header_length])["outputs"]
    assert [output["name"] for output in listed] == ["names", "scores"]
    assert listed[0]["parameters"] == {"binary_data_size": 13}
    assert whole[encoded.header_length :] == b"\3\0\0\0cat\2\0\0\0\xc3\xa9"


def test_a_binary_tensor_is_not_copied() -> None:
    encoded = v2.encode_response(ANSWER, [RequestedOutput("scores", binary=True)])
    assert np.shares_memory(np.frombuffer(encoded.buffers[1], np.uint8), SCORES.data)


def test_a_strided_tensor_is_written_in_row_order() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3).T
    answer = InferResponse("net", [Tensor("x", Datatype.INT16, (3, 2), data)])
    binary = v2.encode_response(answer, binary_output=True)
    assert v2.decode_response(joined(binary), binary.header_length).outputs[0].data.tolist() == data.tolist()
    assert orjson.loads(joined(v2.encode_response(answer)))["outputs"][0]["data"] == [0, 3, 1, 4, 2, 5]


def test_parameters_of_the_answer() -> None:
    encoded = v2.encode_response(InferResponse("net", [], parameters={"batch": 17}))
    assert v2.decode_response(joined(encoded), None).parameters == {"batch": 17}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_json_never_turns_a_number_into_null(value: float) -> None:
    answer = InferResponse("net", [tensor_of("scores", Datatype.FP32, [1.0, value])])
    with pytest.raises(ModelError, match="output 'scores' holds NaN or infinity"):
        v2.encode_response(answer)
    encoded = v2.encode_response(answer, binary_output=True)
    assert not np.isfinite(v2.decode_response(joined(encoded), encoded.header_length).outputs[0].data).all()


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_is_binary_only(datatype: Datatype) -> None:
    answer = InferResponse("net", [tensor_of("half", datatype, [1, 2])])
    with pytest.raises(InvalidInput, match=r"output 'half' is .*which JSON cannot represent"):
        v2.encode_response(answer)


def test_bytes_that_are_not_text_are_binary_only() -> None:
    with pytest.raises(ModelError, match="output 'x' is not UTF-8"):
        v2.encode_response(InferResponse("net", [tensor_of("x", Datatype.BYTES, [b"\xff"])]))


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", Datatype.FP32, (2,), np.zeros(2)),
        Tensor("x", Datatype.FP32, (2,), np.zeros(3, np.float32)),
    ],
)
def test_a_tensor_that_is_not_what_it_says(tensor: Tensor) -> None:
    with pytest.raises(ModelError, match=r"output 'x' is float.*not the FP32\[2\]"):
        v2.encode_response(InferResponse("net", [tensor]))


def test_an_output_the_model_did_not_give() -> None:
    with pytest.raises(ModelError, match="no output 'boxes'"):
        v2.encode_response(ANSWER, [RequestedOutput("boxes")])


def test_an_output_in_shared_memory_is_for_the_server_to_place() -> None:
    with pytest.raises(Unsupported, match="shared memory"):
        v2.encode_response(ANSWER, [RequestedOutput("scores", shared_memory=SharedMemory("r", 8))])


@pytest.mark.parametrize(
    ("error", "document"),
    [
        (InvalidInput("no", field="id"), {"error": "no", "reason": "invalid-input", "field": "id"}),
        (
            Refused("full", predicted_ms=80.5, retry_after_s=1),
            {"error": "full", "reason": "overload", "predicted_ms": 80.5, "retry_after_s": 1},
        ),
        (
            Refused("\ud800", reason="full", predicted_ms=2.5),
            {"error": "?", "reason": "full", "predicted_ms": 2.5},
        ),
    ],
)
def test_errors(error: CarpoolError, document: dict[str, Any]) -> None:
    written = v2.encode_error(error)
    assert orjson.loads(written) == document
    assert v2.decode_error(written) == (document["error"], document["reason"])


def test_error_bodies_of_others() -> None:
    assert v2.decode_error(b"") == ("", "")
    assert v2.decode_error(b'{"error":"x"}') == ("x", "")
    assert v2.decode_error(b"<html>502</html>") == ("<html>502</html>", "")


@pytest.mark.parametrize("cut", [-1, 1])
def test_a_response_that_is_cut_short_or_too_long(cut: int) -> None:
    whole, end = body(
        {"outputs": [entry("x", "UINT8", [2], parameters={"binary_data_size": 2})]}, bytes(2 + cut)
    )
    with pytest.raises(InvalidInput, match="lists 2 binary bytes"):
        v2.decode_response(whole, end)
