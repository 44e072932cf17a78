"""What one side writes, the other side reads back: every datatype, shape and form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.types import (
    Datatype,
    InferResponse,
    RequestedOutput,
    RequestOptions,
    SharedMemory,
    Signature,
    Tensor,
    TensorSpec,
)
from carpool.wire import v2
from later import many
from wire.samples import decode_request, joined, request_of
from wire.strategies import names, options, requested, tensors


def assert_same(found: list[Tensor], sent: list[Tensor]) -> None:
    for one, other in zip(found, sent, strict=True):
        assert (one.name, one.datatype, one.shape) == (other.name, other.datatype, other.shape)
        assert one.data.shape == one.shape
        assert one.data.dtype == other.data.dtype
        equal_nan = one.data.dtype.kind == "f"
        assert np.array_equal(one.data, other.data, equal_nan=equal_nan)


def model_for(sent: list[Tensor], max_batch: int, outputs: Sequence[RequestedOutput] = ()) -> Signature:
    inputs = tuple(TensorSpec(t.name, t.datatype, t.shape[1:] if max_batch else t.shape) for t in sent)
    given_outputs = tuple(TensorSpec(output.name, Datatype.FP32, (1,)) for output in outputs)
    return Signature("net", inputs, given_outputs, max_batch)


@settings(max_examples=many(150), deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([0, 4]))
def test_requests(data: st.DataObject, binary: bool, max_batch: int) -> None:
    rows = data.draw(st.integers(1, max_batch)) if max_batch else None
    drawn = data.draw(st.lists(names, min_size=1, max_size=3, unique=True))
    sent = [data.draw(tensors(name, rows, json=not binary)) for name in drawn]
    outputs = data.draw(st.lists(requested, max_size=2, unique_by=lambda output: output.name))
    request = request_of(
        *sent,
        id=data.draw(st.just("") | names),
        outputs=outputs,
        options=data.draw(st.just(RequestOptions()) | options),
        binary_output=data.draw(st.booleans()),
        batch=rows or 1,
    )
    encoded = v2.encode_request(request, binary=binary)
    found = decode_request(joined(encoded), encoded.header_length, model_for(sent, max_batch, outputs))
    assert_same(found.inputs, sent)
    assert list(found.outputs) == outputs
    assert (found.id, found.options, found.batch) == (request.id, request.options, request.batch)
    assert found.binary_output is request.binary_output


@settings(max_examples=many(100), deadline=None)
@given(st.data(), st.booleans())
def test_responses(data: st.DataObject, binary: bool) -> None:
    drawn = data.draw(st.lists(names, max_size=3, unique=True))
    sent = [data.draw(tensors(name, json=not binary)) for name in drawn]
    answer = InferResponse("net", sent, version="3", id=data.draw(names))
    encoded = v2.encode_response(answer, binary_output=binary)
    found = v2.decode_response(joined(encoded), encoded.header_length)
    assert_same(found.outputs, sent)
    assert (found.model, found.version, found.id) == ("net", "3", answer.id)


def test_a_json_request_still_sends_half_precision_as_binary() -> None:
    half = Tensor("h", Datatype.FP16, (1, 2), np.float16([[1, 2]]))
    plain = Tensor("p", Datatype.INT32, (1, 1), np.int32([[7]]))
    encoded = v2.encode_request(request_of(half, plain), binary=False)
    assert encoded.header_length is not None
    found = decode_request(joined(encoded), encoded.header_length, model_for([half, plain], 4))
    assert_same(found.inputs, [half, plain])


def test_an_output_in_shared_memory() -> None:
    outputs = [RequestedOutput("y", shared_memory=SharedMemory("r", 16, 4))]
    plain = Tensor("p", Datatype.INT32, (1, 1), np.int32([[7]]))
    encoded = v2.encode_request(request_of(plain, outputs=outputs))
    found = decode_request(joined(encoded), encoded.header_length, model_for([plain], 4, outputs))
    assert found.outputs == outputs
