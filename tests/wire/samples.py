"""Models and bodies that several wire tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from carpool.types import Datatype, InferRequest, Signature, Tensor, TensorSpec
from carpool.wire import v2

SCORES = TensorSpec("scores", Datatype.FP32, (4,))


def signature(
    *inputs: TensorSpec, max_batch: int = 8, outputs: tuple[TensorSpec, ...] = (SCORES,)
) -> Signature:
    return Signature("net", inputs, outputs, max_batch)


IMAGE = signature(TensorSpec("image", Datatype.UINT8, (2, 3)))


def entry(
    name: str = "image", datatype: str = "UINT8", shape: Any = (1, 2, 3), **rest: Any
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), **rest}


def body(head: Any, tail: bytes = b"") -> tuple[bytes, int]:
    json = orjson.dumps(head)
    return json + tail, len(json)


def decode_request(whole: v2.Buffer, header_length: int | None, model: Signature) -> InferRequest:
    """All that a server does with an infer request, which receives it in parts."""
    view = memoryview(whole)
    end = len(view) if header_length is None else header_length
    v2.read_header_length(str(end), len(view))
    head = v2.raw_head(model, len(view)) if header_length == 0 else v2.read_head(view[:end], model)
    v2.check_tail(head, len(view) - end, model.model)
    return InferRequest(
        model=model.model,
        inputs=v2.bind(head.inputs, view[end:]),
        id=head.id,
        outputs=head.outputs,
        options=head.options,
        binary_output=head.binary_output,
        batch=head.batch,
    )


def image_body(**changes: Any) -> tuple[bytes, int]:
    """A valid binary request for IMAGE; `changes` are put over its one input."""
    tensor = {**entry(parameters={"binary_data_size": 6}), **changes}
    return body({"inputs": [tensor]}, bytes(range(6)))


def decode_json(values: Any, datatype: str, shape: Any = (1, 2)) -> Tensor:
    """Decode one JSON tensor through a model that takes exactly that."""
    spec = TensorSpec("x", Datatype(datatype), tuple(shape))
    head, _ = body({"inputs": [entry("x", datatype, shape, data=values)]})
    return decode_request(head, None, signature(spec, max_batch=0)).inputs[0]


def joined(encoded: v2.Encoded) -> bytes:
    whole = b"".join(encoded.buffers)
    assert len(whole) == encoded.size
    return whole


def tensor_of(name: str, datatype: Datatype, data: Any) -> Tensor:
    array = np.array(data, dtype=datatype.dtype)
    return Tensor(name, datatype, array.shape, array)


def request_of(*tensors: Tensor, **fields: Any) -> InferRequest:
    return InferRequest("net", list(tensors), **fields)
