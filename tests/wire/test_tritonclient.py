"""Bodies made and read by Triton's own Python client."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from carpool.errors import Unsupported
from carpool.types import Datatype, InferResponse, RequestedOutput, RequestOptions, SharedMemory, TensorSpec
from carpool.wire import v2
from wire.samples import SCORES, decode_request, joined, signature, tensor_of

VALUES = {
    Datatype.BOOL: [[True, False]],
    Datatype.FP16: [[0.5, np.inf]],
    Datatype.FP32: [[0.1, -3e38]],
    Datatype.FP64: [[0.1, 1e300]],
    Datatype.BYTES: [[b"ab", b""]],
}
NUMPY_TYPED = [datatype for datatype in Datatype if datatype is not Datatype.BF16]
FORMS = [(d, True) for d in NUMPY_TYPED] + [(d, False) for d in NUMPY_TYPED if not d.binary_only]


def array_of(datatype: Datatype) -> Any:
    return np.array(VALUES.get(datatype, [[1, 2]]), dtype=datatype.dtype)


def wire_input(datatype: Datatype, *, binary: bool) -> InferInput:
    tensor = InferInput("x", [1, 2], datatype.value)
    tensor.set_data_from_numpy(array_of(datatype), binary_data=binary)
    return tensor


def model_of(datatype: Datatype) -> Any:
    return signature(TensorSpec("x", datatype, (-1,)), outputs=(SCORES,))


@pytest.mark.parametrize(("datatype", "binary"), FORMS)
def test_inputs(datatype: Datatype, binary: bool) -> None:
    body, header_length = InferenceServerClient.generate_request_body([wire_input(datatype, binary=binary)])
    assert (header_length is None) is not binary
    request = decode_request(body, header_length, model_of(datatype))
    assert np.array_equal(request.inputs[0].data, array_of(datatype))
    assert request.binary_output  # the client asks for it when no outputs are listed


def test_bf16_inputs() -> None:
    tensor = InferInput("x", [1, 2], "BF16")
    tensor.set_data_from_numpy(np.array([[1, 2]], dtype=ml_dtypes.bfloat16))
    body, header_length = InferenceServerClient.generate_request_body([tensor])
    request = decode_request(body, header_length, model_of(Datatype.BF16))
    assert request.inputs[0].data.tolist() == [[0x3F80, 0x4000]]


def test_options_and_outputs() -> None:
    outputs = [InferRequestedOutput("scores", binary_data=False, class_count=3)]
    body, header_length = InferenceServerClient.generate_request_body(
        [wire_input(Datatype.UINT8, binary=True)],
        outputs=outputs,
        request_id="r-1",
        priority=2,
        timeout=2500,
        parameters={"source": "cam", "mine": 1},
    )
    request = decode_request(body, header_length, model_of(Datatype.UINT8))
    assert request.id == "r-1"
    assert request.options == RequestOptions(2, 0.0025, "cam", custom={"mine": 1})
    assert request.outputs == [RequestedOutput("scores", False, 3)]


def test_sequences_are_refused() -> None:
    body, header_length = InferenceServerClient.generate_request_body(
        [wire_input(Datatype.UINT8, binary=True)], sequence_id=9, sequence_start=True
    )
    with pytest.raises(Unsupported, match="sequences are not supported here") as refused:
        decode_request(body, header_length, model_of(Datatype.UINT8))
    assert refused.value.field == "parameters.sequence_id"


def test_shared_memory() -> None:
    tensor = InferInput("x", [1, 2], "FP32")
    tensor.set_shared_memory("in", 8, offset=4)
    output = InferRequestedOutput("scores")
    output.set_shared_memory("out", 16)
    body, header_length = InferenceServerClient.generate_request_body([tensor], outputs=[output])
    assert header_length is None
    head = v2.read_head(body, model_of(Datatype.FP32))
    assert head.inputs[0].shared_memory == SharedMemory("in", 8, 4)
    assert head.outputs[0].shared_memory == SharedMemory("out", 16)


@pytest.mark.parametrize(("datatype", "binary"), FORMS)
def test_outputs(datatype: Datatype, binary: bool) -> None:
    answer = InferResponse("net", [tensor_of("y", datatype, VALUES.get(datatype, [[1, 2]]))], id="r")
    encoded = v2.encode_response(answer, binary_output=binary)
    result = InferenceServerClient.parse_response_body(joined(encoded), header_length=encoded.header_length)
    found = result.as_numpy("y")
    if datatype is Datatype.BYTES and not binary:
        found = np.vectorize(str.encode, otypes=[object])(found)  # the client leaves JSON strings as they are
    assert np.array_equal(found, array_of(datatype))
    assert result.get_response()["id"] == "r"


def test_classification() -> None:
    answer = InferResponse("net", [tensor_of("y", Datatype.FP32, [[0.25, 0.75]])])
    encoded = v2.encode_response(answer, [RequestedOutput("y", True, 1)], labels={"y": ["cat", "dog"]})
    result = InferenceServerClient.parse_response_body(joined(encoded), header_length=encoded.header_length)
    assert result.as_numpy("y").tolist() == [[b"0.750000:1:dog"]]
