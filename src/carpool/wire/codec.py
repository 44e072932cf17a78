"""Messages to bytes: answers, errors, and requests for clients. Tensors are copied only if strided."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from carpool.errors import CarpoolError, InvalidInput, ModelError, Unsupported
from carpool.types import Array, Datatype, InferRequest, InferResponse, RequestedOutput, SharedMemory, Tensor
from carpool.wire.classes import classify
from carpool.wire.head import Buffer, TensorHead, write_options, write_shared_memory, wrong
from carpool.wire.slices import SlicedJson, Values, is_long
from carpool.wire.strings import Between, PackedStrings, as_strings, check_strings, go_on, split_strings

if TYPE_CHECKING:
    from carpool.wire.long_json import LongNumbers

_RETAINED_HEADS = 256
_NO_LABELS: Mapping[str, Sequence[str]] = {}


class Placed(NamedTuple):
    """Describes an output that was written to a client's memory: what the answer says of it."""

    datatype: Datatype
    shape: tuple[int, ...]
    place: SharedMemory  # `byte_size` is what was written


class Encoded(NamedTuple):
    """Holds a body in pieces to be written one after the other."""

    buffers: list[Buffer]
    size: int
    header_length: int | None  # for Inference-Header-Content-Length; None when nothing is binary
    json: SlicedJson | None = None  # the head, where it is too long to be written at once


_NONE_PLACED: Mapping[str, Placed] = {}


def encode_response(
    response: InferResponse,
    outputs: Sequence[RequestedOutput] = (),
    *,
    binary_output: bool = False,
    labels: Mapping[str, Sequence[str]] = _NO_LABELS,
    batched: bool = True,
    placed: Mapping[str, Placed] = _NONE_PLACED,
    sliced: bool = False,
) -> Encoded:
    """The answer as the client asked for it: `outputs` and `binary_output` are the request's.

    Outputs that are wanted in shared memory must be there already, and in `placed`. With `sliced`, JSON that
    is long is still to be written: `Encoded.json`, and only what stands behind it is in the buffers.
    """
    if is_all_binary(response, outputs, binary_output):
        return _encode_binary(response)
    return _encode_listed(response, outputs, binary_output, labels, batched, placed, sliced)


def _encode_listed(
    response: InferResponse,
    outputs: Sequence[RequestedOutput],
    binary_output: bool,
    labels: Mapping[str, Sequence[str]],
    batched: bool,
    placed: Mapping[str, Placed],
    sliced: bool,
) -> Encoded:
    """Encodes each output in the form that was asked for."""
    listed: list[dict[str, Any]] = []
    tail: list[Buffer] = []
    if not outputs:
        for tensor in response.outputs:
            if not binary_output:
                check_form(RequestedOutput(tensor.name), tensor.datatype)
            listed.append(_list_tensor(tensor, binary_output, "output", tail, sliced))
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
        listed.append(_list_tensor(tensor, output.binary, "output", tail, sliced))
    document: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        document["id"] = response.id
    if response.parameters:
        document["parameters"] = response.parameters
    return _join(document, tail, listed)


def is_all_binary(response: InferResponse, outputs: Sequence[RequestedOutput], binary_output: bool) -> bool:
    """Returns whether the outputs are all that there is, and wanted as they are, as most clients want
    them."""
    if response.id or response.parameters:
        return False
    if not outputs:
        return binary_output
    if len(response.outputs) != len(outputs):
        return False
    for tensor, output in zip(response.outputs, outputs, strict=True):
        if output.name != tensor.name or not output.binary:
            return False
        if output.classification or output.shared_memory is not None:
            return False
    return True


def _encode_binary(response: InferResponse) -> Encoded:
    """All but the outputs' bytes was said in an answer before."""
    tail: list[Buffer] = []
    tensors: list[tuple[str, Datatype, tuple[int, ...], int]] = []
    size = 0
    for tensor in response.outputs:
        check_array(tensor, "output")
        data = to_binary(tensor)
        tail.append(data)
        tensors.append((tensor.name, tensor.datatype, tensor.shape, len(data)))
        size += len(data)
    head = _binary_head(response.model, response.version, *tensors)
    return Encoded([head, *tail], len(head) + size, len(head) if tail else None)


@lru_cache(maxsize=_RETAINED_HEADS)
def _binary_head(model: str, version: str, *tensors: tuple[str, Datatype, tuple[int, ...], int]) -> bytes:
    listed = [
        {
            "name": name,
            "datatype": datatype.value,
            "shape": shape,
            "parameters": {"binary_data_size": size},
        }
        for name, datatype, shape, size in tensors
    ]
    return orjson.dumps({"model_name": model, "model_version": version, "outputs": listed})


def with_id(body: bytes, header_length: int | None, request_id: str) -> Encoded:
    """Returns an answer without an id, as `encode_response` wrote it, for the request that has this one."""
    if not request_id:
        return Encoded([body], len(body), header_length)
    field = b'{"id":%b,' % orjson.dumps(request_id)
    more = len(field) - 1
    length = None if header_length is None else header_length + more
    return Encoded([field, memoryview(body)[1:]], len(body) + more, length)


def as_requested(
    output: RequestedOutput, tensor: Tensor, labels: Sequence[str] = (), *, batched: bool = True
) -> Tensor:
    check_form(output, tensor.datatype)
    if output.classification:
        return classify(tensor, output.classification, labels, batched=batched)
    return tensor


def check_form(output: RequestedOutput, datatype: Datatype) -> None:
    """Some datatypes cannot leave as JSON, or be classified."""
    if output.classification:
        if datatype is Datatype.BYTES:
            raise InvalidInput(
                f"class result not available for output due to unsupported type '{datatype.value}'",
                field=f"output '{output.name}'.parameters.classification",
            )
    elif not output.binary and datatype.binary_only and output.shared_memory is None:
        owner = f"output '{output.name}'"
        raise InvalidInput(
            f"{owner} is {datatype.value}, which JSON cannot represent: request it with binary_data",
            field=f"{owner}.parameters.binary_data",
        )


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
    for output in request.outputs:
        asked: dict[str, Any] = {"binary_data": output.binary}
        if output.classification:
            asked["classification"] = output.classification
        if output.shared_memory is not None:
            asked = write_shared_memory(output.shared_memory)
        document.setdefault("outputs", []).append({"name": output.name, "parameters": asked})
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
    if tensor.data.shape != tensor.shape or tensor.data.dtype != tensor.datatype.dtype:
        owner = f"{kind} '{tensor.name}'"
        raise blame(kind)(
            f"{owner} is {tensor.data.dtype}{list(tensor.data.shape)}, not the "
            f"{tensor.datatype.value}{list(tensor.shape)} that it declares",
            field=owner,
        )


def _list_tensor(
    tensor: Tensor, binary: bool, kind: str, tail: list[Buffer], sliced: bool = False
) -> dict[str, Any]:
    """The tensor's entry in the JSON head; its bytes are added to the tail when it is binary. With `sliced`,
    values that are long are still to be written."""
    check_array(tensor, kind)
    entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": tensor.shape}
    if binary:
        data = to_binary(tensor)
        tail.append(data)
        entry["parameters"] = {"binary_data_size": len(data)}
    else:
        entry["data"] = Values(tensor) if sliced and is_long(tensor) else to_json(tensor, kind)
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


def _in_slices(document: dict[str, Any], listed: Sequence[dict[str, Any]]) -> SlicedJson:
    """Returns the document with these outputs at its end, as `_join` would write it."""
    parts: list[bytes | Values] = [orjson.dumps(document)[:-1] + b',"outputs":[']
    for number, entry in enumerate(listed):
        values = entry.get("data")
        if isinstance(values, Values):
            del entry["data"]
            parts += [orjson.dumps(entry)[:-1] + b',"data":[', values, b"]}"]
        else:
            parts.append(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY))
        parts.append(b"," if number + 1 < len(listed) else b"]}")
    return SlicedJson(parts)


def _join(
    document: dict[str, Any], tail: list[Buffer], outputs: Sequence[dict[str, Any]] | None = None
) -> Encoded:
    """Writes the document, at its end the outputs of an answer."""
    if outputs is not None:
        if any(entry.get("data").__class__ is Values for entry in outputs):
            return Encoded(tail, sum(map(len, tail)), None, _in_slices(document, outputs))
        document["outputs"] = outputs
    head = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    size = len(head) + sum(map(len, tail))
    return Encoded([head, *tail], size, len(head) if tail else None)


# ---- tensor data between its two wire forms, binary and JSON, and numpy arrays ----------------------------


_LENGTH = struct.Struct("<I")
_BYTE = np.dtype(np.uint8)
_DEEPEST = 100  # levels of JSON, as in Triton
_JSON_TYPES: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool}), "true or false"),
    "u": (frozenset({int}), "integers"),
    "i": (frozenset({int}), "integers"),
    "f": (frozenset({int, float}), "numbers"),
    "O": (frozenset({str}), "strings"),
}


def bind(heads: Iterable[TensorHead], tail: Buffer, kind: str = "input", model: str = "") -> list[Tensor]:
    """Tensors over the bytes of the tail: fixed-size datatypes are views into it, not copies. `model` is for
    errors."""
    tensors = []
    for head in heads:
        if head.data is not None:
            data = from_json(head.data, head, f"{kind} '{head.name}'")
        elif head.shared_memory is not None:
            raise Unsupported(f"{kind} '{head.name}' is in shared memory, which is not enabled")
        elif head.datatype is Datatype.BYTES:
            data = split_strings(head, _bytes_of(head, tail, kind), f"{kind} '{head.name}'", model)
        else:
            data = _from_binary(head, tail, kind)
        tensors.append(Tensor(head.name, head.datatype, head.shape, data))
    return tensors


def bind_packed(heads: Iterable[TensorHead], tail: Buffer) -> dict[str, Array]:
    """Does the same for inputs that are only passed on: BYTES are not looked at before they are unpacked."""
    return {
        head.name: PackedStrings.of(head, _bytes_of(head, tail, "input"))
        if head.datatype is Datatype.BYTES
        else _from_binary(head, tail, "input")
        for head in heads
    }


def check_binary(heads: Iterable[TensorHead], tail: Buffer, model: str, between: Between = go_on) -> None:
    """Checks inputs that are binary as `bind` does, and makes no elements of them."""
    for head in heads:
        if head.datatype is Datatype.BYTES:
            check_strings(head, _bytes_of(head, tail, "input"), f"input '{head.name}'", model, between)
        else:
            _from_binary(head, tail, "input")


def _bytes_of(head: TensorHead, tail: Buffer, kind: str) -> memoryview:
    if head.offset + head.size > len(tail):
        raise InvalidInput(f"{kind} '{head.name}' ends behind the end of the body", field="body")
    return memoryview(tail)[head.offset : head.offset + head.size]


def _from_binary(head: TensorHead, tail: Buffer, kind: str) -> Array:
    _bytes_of(head, tail, kind)
    data: Array = np.ndarray(head.shape, head.datatype.dtype, tail, head.offset)
    if head.datatype is Datatype.BOOL and data.size and data.view(_BYTE).max() > 1:
        owner = f"{kind} '{head.name}'"
        raise InvalidInput(f"{owner} is BOOL, whose bytes must be 0 or 1", field=f"{owner}.data")
    return data


def from_json(values: list[Any] | LongNumbers, head: TensorHead, owner: str) -> Array:
    """A JSON `data` list, flat or nested as the shape says; every element must be right for the datatype."""
    field = f"{owner}.data"
    if not isinstance(values, list):
        return _from_long(values, head, field)
    flat = _flatten(values, head.shape, field)
    _check_count(len(flat), head.shape, field)
    return _elements(flat, head.datatype, field).reshape(head.shape)


def _from_long(values: LongNumbers, head: TensorHead, field: str) -> Array:
    """Reads some thousand elements at a time, so that other threads have their turn."""
    shape = values.shape()
    _check_count(math.prod(shape), head.shape, field)
    if 1 < len(shape) <= len(head.shape) and shape != head.shape:
        raise wrong(field, f"is not nested as shape {list(head.shape)}")
    data: Array = np.empty(math.prod(shape), head.datatype.dtype)
    filled = 0
    for flat in values.slices():
        data[filled : filled + len(flat)] = _elements(flat, head.datatype, field)
        filled += len(flat)
    return data.reshape(head.shape)


def _check_count(count: int, shape: Sequence[int], field: str) -> None:
    if count != math.prod(shape):
        raise wrong(field, f"has {count} elements, but shape {list(shape)} needs {math.prod(shape)}")


def _elements(flat: list[Any], datatype: Datatype, field: str) -> Array:
    dtype = datatype.dtype
    allowed, words = _JSON_TYPES[dtype.kind]
    if not allowed.issuperset(map(type, flat)):
        raise wrong(field, f"may hold only {words} for {datatype.value}")
    if dtype.kind == "O":
        return as_strings([text.encode() for text in flat], (len(flat),))
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            data: Array = np.array(flat, np.float64).astype(dtype)
        in_range = bool(np.isfinite(data).all())
    else:
        limits = np.iinfo(dtype) if dtype.kind != "b" and flat else None
        in_range = limits is None or (min(flat) >= limits.min and max(flat) <= limits.max)
        data = np.array(flat if in_range else (), dtype)
    if not in_range:
        raise wrong(field, f"holds a value out of range for {datatype.value}")
    return data


def _flatten(values: list[Any], shape: tuple[int, ...], field: str) -> list[Any]:
    """One level per dimension; lists that are not as long as the shape says are refused.

    What is nested deeper than its shape is flattened, as Triton does: then only the elements are counted.
    """
    if not values or type(values[0]) is not list:
        return values
    levels = _levels(values, field)
    if levels > len(shape):
        # Each pass looks at the lists of one level: together they cost no more than reading the JSON did.
        for depth in range(1, levels):
            if any(type(item) is not list for item in values):
                raise wrong(field, f"is nested unevenly at depth {depth}")
            values = list(chain.from_iterable(values))
        return values
    level: list[Any] = [values]
    for depth, dim in enumerate(shape):
        if any(type(row) is not list or len(row) != dim for row in level):
            raise wrong(field, f"is not nested as shape {list(shape)} at depth {depth}")
        level = list(chain.from_iterable(level))
    return level


def _levels(values: list[Any], field: str) -> int:
    """Returns how deep the first element lies."""
    levels = 0
    first: Any = values
    while type(first) is list:
        levels += 1
        if levels > _DEEPEST:
            raise InvalidInput(
                f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST}) in {field}", field=field
            )
        if not first:
            break
        first = first[0]
    return levels


def to_binary(tensor: Tensor) -> Buffer:
    """Returns the tensor's bytes; a view where the array already is one block."""
    if tensor.datatype is Datatype.BYTES:
        if isinstance(tensor.data, PackedStrings):
            return tensor.data.packed
        pieces: list[bytes] = []
        for element in tensor.data.ravel().tolist():
            pieces += (_LENGTH.pack(len(element)), element)
        return b"".join(pieces)
    if not tensor.data.size:
        return b""  # memoryview cannot cast an empty array
    data = tensor.data if tensor.data.flags.c_contiguous else np.ascontiguousarray(tensor.data)
    return data.data.cast("B")


def blame(kind: str) -> type[CarpoolError]:
    """Whose fault a tensor that cannot be written is: outputs come from the model, inputs from the caller."""
    return ModelError if kind == "output" else InvalidInput


def to_json(tensor: Tensor, kind: str) -> Any:
    """Returns what orjson writes as a flat list; NaN and infinity are refused, since it would write null."""
    data, owner = tensor.data, f"{kind} '{tensor.name}'"
    if tensor.datatype is Datatype.BYTES:
        try:
            return [element.decode() for element in data.ravel().tolist()]
        except UnicodeDecodeError:
            raise blame(kind)(f"{owner} is not UTF-8 text: it can only be binary", field=owner) from None
    if data.dtype.kind == "f" and not np.isfinite(data).all():
        raise blame(kind)(f"{owner} holds NaN or infinity, which can only be binary", field=owner)
    return np.ascontiguousarray(data).reshape(-1)
