"""Answers to infer requests as bytes, put together by hand: heads repeat, and tensors are copied once."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from carpool.errors import ModelError
from carpool.frontend.call import Times
from carpool.link.door import ModelEntry
from carpool.types import RequestedOutput, Tensor
from carpool.wire.codec import check_array, to_binary
from carpool.wire.head import write_shared_memory
from carpool.wire.proto import message_class
from carpool.wire.v2 import Buffer, Placed, as_requested

TIMES = ("carpool_decode_ms", "carpool_queue_ms", "carpool_infer_ms", "carpool_post_ms")
BATCH = "carpool_batch"
FINAL = "triton_final_response"

_ModelInferResponse = message_class("ModelInferResponse")
_OutputTensor = message_class("ModelInferResponse.InferOutputTensor")

_ID, _OUTPUTS, _RAW = 0x1A, 0x2A, 0x32  # tags of ModelInferResponse
_INFER_RESPONSE = 0x12  # of ModelStreamInferResponse
_DOUBLE = struct.Struct("<d")


def field(tag: int, size: int) -> bytes:
    """What stands before a field of `size` bytes."""
    out = bytearray((tag,))
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def encode_answer(
    entry: ModelEntry,
    request_id: bytes,
    listed: Sequence[tuple[bytes, Buffer]],
    times: Times,
    more: bytes = b"",
) -> bytes:
    """A ModelInferResponse; `listed` has the head and the bytes of each output, `more` is appended."""
    pieces: list[Buffer] = [_prefix(entry.name, entry.version)]
    if request_id:
        pieces += (field(_ID, len(request_id)), request_id)
    pieces += (_times(*times[:4]), _batch(times.batch))
    for head, _ in listed:
        pieces.append(head)
    for _, data in listed:
        pieces += (field(_RAW, len(data)), data)
    pieces.append(more)
    return b"".join(pieces)


def in_stream(response: bytes) -> bytes:
    """As a ModelStreamInferResponse."""
    return field(_INFER_RESPONSE, len(response)) + response


def list_outputs(
    entry: ModelEntry,
    outputs: Sequence[RequestedOutput],
    tensors: Sequence[Tensor],
    placed: Mapping[str, Placed],
) -> list[tuple[bytes, Buffer]]:
    """Each output that was asked for, in that order: its head and its bytes.

    One that was written to a client's memory has no bytes, but still its place among them: clients count.
    """
    if not outputs:
        return [_listed(tensor) for tensor in tensors]
    produced = {tensor.name: tensor for tensor in tensors}
    batched = entry.signature.max_batch > 0
    listed: list[tuple[bytes, Buffer]] = []
    for output in outputs:
        name = output.name
        if name in placed:
            listed.append((_placed_head(name, placed[name]), b""))
        elif name in produced:
            labels = entry.labels.get(name, ())
            listed.append(_listed(as_requested(output, produced[name], labels, batched=batched)))
        else:
            raise ModelError(f"the model gave no output '{name}'", field=f"output '{name}'")
    return listed


def _listed(tensor: Tensor) -> tuple[bytes, Buffer]:
    check_array(tensor, "output")
    return _output_head(tensor.name, tensor.datatype.value, tensor.shape), to_binary(tensor)


@lru_cache(maxsize=256)
def _prefix(name: str, version: str) -> bytes:
    prefix: bytes = _ModelInferResponse(model_name=name, model_version=version).SerializeToString()
    return prefix


@lru_cache(maxsize=1024)
def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    head: bytes = _OutputTensor(name=name, datatype=datatype, shape=shape).SerializeToString()
    return field(_OUTPUTS, len(head)) + head


def _placed_head(name: str, placed: Placed) -> bytes:
    output = _OutputTensor(name=name, datatype=placed.datatype.value, shape=placed.shape)
    for key, value in write_shared_memory(placed.place).items():
        if isinstance(value, str):
            output.parameters[key].string_param = value
        else:
            output.parameters[key].int64_param = value
    head: bytes = output.SerializeToString()
    return field(_OUTPUTS, len(head)) + head


# ---- parameters --------------------------------------------------------------------------------------------


def _times_layout() -> tuple[struct.Struct, tuple[bytes, ...]]:
    """Doubles have a fixed size, so that everything around the four of them is constant."""
    constants = []
    for name in TIMES:
        response = _ModelInferResponse()
        response.parameters[name].double_param = 1.0
        constants.append(response.SerializeToString().removesuffix(_DOUBLE.pack(1.0)))
    layout = "".join(f"{len(constant)}sd" for constant in constants)
    return struct.Struct(f"<{layout}"), tuple(constants)


_TIMES, (_C0, _C1, _C2, _C3) = _times_layout()


def _times(decode: float, queue: float, infer: float, post: float) -> bytes:
    return _TIMES.pack(_C0, decode, _C1, queue, _C2, infer, _C3, post)


@lru_cache(maxsize=4096)
def _batch(images: int) -> bytes:
    response = _ModelInferResponse()
    response.parameters[BATCH].int64_param = images
    batch: bytes = response.SerializeToString()
    return batch


def final_parameter() -> bytes:
    """Says in a stream that nothing more comes for a request."""
    response = _ModelInferResponse()
    response.parameters[FINAL].bool_param = True
    final: bytes = response.SerializeToString()
    return final
