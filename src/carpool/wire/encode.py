"""Messages to bytes: answers, errors, and requests for clients. Tensors are copied only if strided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from carpool.errors import CarpoolError, ModelError, Unsupported
from carpool.types import Array, Datatype, InferRequest, InferResponse, RequestedOutput, SharedMemory, Tensor
from carpool.wire.check import check_form
from carpool.wire.head import Buffer
from carpool.wire.parameters import write_options, write_shared_memory
from carpool.wire.tensors import blame, to_binary, to_json

_NO_LABELS: Mapping[str, Sequence[str]] = {}


class Placed(NamedTuple):
    """An output that was written to a client's memory: what the answer says of it."""

    datatype: Datatype
    shape: tuple[int, ...]
    place: SharedMemory  # `byte_size` is what was written


class Encoded(NamedTuple):
    """A body in pieces to be written one after the other."""

    buffers: list[Buffer]
    size: int
    header_length: int | None  # for Inference-Header-Content-Length; None when nothing is binary


_NONE_PLACED: Mapping[str, Placed] = {}


def encode_response(
    response: InferResponse,
    outputs: Sequence[RequestedOutput] = (),
    *,
    binary_output: bool = False,
    labels: Mapping[str, Sequence[str]] = _NO_LABELS,
    batched: bool = True,
    placed: Mapping[str, Placed] = _NONE_PLACED,
) -> Encoded:
    """The answer as the client asked for it: `outputs` and `binary_output` are the request's.

    Outputs that are wanted in shared memory must be there already, and in `placed`.
    """
    listed: list[dict[str, Any]] = []
    tail: list[Buffer] = []
    if not outputs:
        for tensor in response.outputs:
            if not binary_output:
                check_form(RequestedOutput(tensor.name), tensor.datatype)
            listed.append(_list_tensor(tensor, binary_output, "output", tail))
    produced = {tensor.name: tensor for tensor in response.outputs} if outputs else {}
    for output in outputs:
        if output.name not in produced:
            raise ModelError(f"the model gave no output '{output.name}'", field=f"output '{output.name}'")
        if output.shared_memory is not None:
            listed.append(_list_placed(output.name, placed.get(output.name)))
            continue
        tensor = produced[output.name]
        if output.classification or not output.binary:
            tensor = as_requested(output, tensor, labels.get(output.name, ()), batched=batched)
        listed.append(_list_tensor(tensor, output.binary, "output", tail))
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = listed
    return _join(document, tail)


def as_requested(
    output: RequestedOutput, tensor: Tensor, labels: Sequence[str] = (), *, batched: bool = True
) -> Tensor:
    """The tensor itself, or its best classes."""
    check_form(output, tensor.datatype)
    if output.classification:
        return classify(tensor, output.classification, labels, batched=batched)
    return tensor


def encode_request(request: InferRequest, *, binary: bool = True) -> Encoded:
    """A request as a client sends it; `binary` False writes as JSON every input that JSON can carry."""
    tail: list[Buffer] = []
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    document["inputs"] = [
        _list_tensor(tensor, binary or tensor.datatype.binary_only, "input", tail)
        for tensor in request.inputs
    ]
    parameters = write_options(request.options)
    if request.binary_output:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    if request.outputs:
        document["outputs"] = [_list_requested(output) for output in request.outputs]
    return _join(document, tail)


def encode_error(error: CarpoolError) -> bytes:
    """The JSON body every refused or failed request gets."""
    document: dict[str, Any] = {"error": error.message, "reason": error.reason}
    for name in ("field", "predicted_ms", "retry_after_s"):
        value = getattr(error, name, None)
        if value is not None:
            document[name] = value
    document |= error.numbers
    try:
        return orjson.dumps(document)
    except TypeError:  # text from outside may hold lone surrogates
        for name, value in document.items():
            document[name] = value.encode(errors="replace").decode() if isinstance(value, str) else value
        return orjson.dumps(document)


def check_array(tensor: Tensor, kind: str) -> None:
    """The array must be what the tensor says it is."""
    if tensor.data.shape != tensor.shape or tensor.data.dtype != tensor.datatype.dtype:
        owner = f"{kind} '{tensor.name}'"
        raise blame(kind)(
            f"{owner} is {tensor.data.dtype}{list(tensor.data.shape)},"
            f" not the {tensor.datatype.value}{list(tensor.shape)} it says",
            field=owner,
        )


def _list_tensor(tensor: Tensor, binary: bool, kind: str, tail: list[Buffer]) -> dict[str, Any]:
    """The tensor's entry in the JSON head; its bytes are added to the tail when it is binary."""
    check_array(tensor, kind)
    entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
    if binary:
        data = to_binary(tensor)
        tail.append(data)
        entry["parameters"] = {"binary_data_size": len(data)}
    else:
        entry["data"] = to_json(tensor, kind)
    return entry


def _list_placed(name: str, placed: Placed | None) -> dict[str, Any]:
    if placed is None:
        raise Unsupported(f"output '{name}' is wanted in shared memory, which is not enabled")
    return {
        "name": name,
        "datatype": placed.datatype.value,
        "shape": placed.shape,
        # Triton's C++ client reads a size from any parameters that an output has: none of it follows here.
        "parameters": {**write_shared_memory(placed.place), "binary_data_size": 0},
    }


def _list_requested(output: RequestedOutput) -> dict[str, Any]:
    parameters: dict[str, Any] = {"binary_data": output.binary}
    if output.classification:
        parameters["classification"] = output.classification
    if output.shared_memory is not None:
        parameters = write_shared_memory(output.shared_memory)
    return {"name": output.name, "parameters": parameters}


def _join(document: dict[str, Any], tail: list[Buffer]) -> Encoded:
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    size = len(head) + sum(map(len, tail))
    return Encoded([head, *tail], size, len(head) if tail else None)


# ---- the classification extension: an output's best k values as "value:index[:label]" strings --------------


def classify(tensor: Tensor, k: int, labels: Sequence[str] = (), *, batched: bool = True) -> Tensor:
    """Per batch row, the k highest values in descending order; ties keep the lower index first."""
    values = _numbers(tensor)
    row_shape = values.shape[1:] if batched else values.shape
    row_count = values.shape[0] if batched and values.ndim else 1
    rows = values.reshape(row_count, math.prod(row_shape))
    k = min(k, rows.shape[1])
    shape = (row_count, k) if batched else (k,)
    found = np.empty((row_count, k), dtype=object)
    for row, numbers in enumerate(rows):
        for column, index in enumerate(_best(numbers, k)):
            found[row, column] = _describe(numbers[index], index, labels)
    return Tensor(tensor.name, Datatype.BYTES, shape, found.reshape(shape))


def _numbers(tensor: Tensor) -> Array:
    if tensor.datatype is Datatype.BF16:
        widened: Array = (tensor.data.astype(np.uint32) << 16).view(np.float32)
        return widened
    return tensor.data


def _best(numbers: Array, k: int) -> list[int]:
    keys = np.where(np.isnan(numbers), -np.inf, numbers) if numbers.dtype.kind == "f" else numbers
    # sorting the reversed row, then reversing, keeps equal values in index order
    order = len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]
    best: list[int] = order[:k].tolist()
    return best


def _describe(value: np.generic, index: int, labels: Sequence[str]) -> bytes:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()
