"""Whether a request's head fits the model it asks for, before a single tensor byte is needed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from functools import lru_cache

from carpool.errors import InvalidInput, Unsupported
from carpool.types import Datatype, RequestedOutput, Signature, TensorSpec
from carpool.wire.head import DEFAULT_OPTIONS, RequestHead, TensorHead, shorten, wrong

_LOOKED_AT = (Datatype.BYTES, Datatype.BOOL)  # not every sequence of bytes is one of these
_RAW_HEADS = 256


def check_head(head: RequestHead, signature: Signature) -> RequestHead:
    """Check names, datatypes, shapes and outputs against the model; fills in the batch size."""
    specs = signature.input_named
    batch = 0
    for tensor in head.inputs:
        spec = specs.get(tensor.name)
        if spec is None:
            raise _unknown("input", tensor.name, specs, signature.model)
        if tensor.datatype is not spec.datatype:
            raise _wrong_datatype(tensor, spec, signature.model)
        rows = _check_shape(tensor, spec, signature)
        if batch and rows != batch:
            field = f"input '{tensor.name}'.shape"
            raise InvalidInput(
                f"input '{tensor.name}' batch size does not match other inputs for '{signature.model}'",
                field=field,
            )
        batch = rows
    if len(head.inputs) != len(specs):
        _check_missing(head, signature)
    _check_outputs(head, signature)
    if head.options.sequence_id:  # 0 and "" are what clients send for none
        raise Unsupported(
            "sequences are not offered: each request is answered on its own; leave sequence_id out",
            field="parameters.sequence_id",
        )
    head.batch = batch or 1
    head.plain = _is_plain(head)
    return head


def _is_plain(head: RequestHead) -> bool:
    for tensor in head.inputs:
        if tensor.data is not None or tensor.shared_memory is not None or tensor.datatype in _LOOKED_AT:
            return False
    return all(output.shared_memory is None for output in head.outputs)


def check_tail(head: RequestHead, available: int, model: str) -> None:
    """The tensor bytes behind the JSON must be exactly those that the head lists."""
    if head.tail_size != available:
        raise _wrong_tail(head, available, model)


def _wrong_tail(head: RequestHead, available: int, model: str) -> InvalidInput:
    counts = f"the binary inputs take {head.tail_size} bytes, but {available} follow the JSON head"
    if available > head.tail_size:
        said = f"unexpected additional input data for model '{model}'"
    else:
        short = next(tensor for tensor in head.inputs if tensor.offset + tensor.size > available)
        missing = short.offset + short.size - max(available, short.offset)
        said = (
            f"unexpected size for input {shorten(short.name)}, expecting {missing} additional bytes"
            f" for model '{model}'"
        )
    return InvalidInput(f"{said}: {counts}", field="body")


@lru_cache(maxsize=_RAW_HEADS)
def raw_head(signature: Signature, size: int) -> RequestHead:
    """The head of a raw binary request: its body is the model's only input, batch 1."""
    if len(signature.inputs) != 1:
        raise InvalidInput(
            f"a raw binary request needs a model with one input,"
            f" but '{signature.model}' has {len(signature.inputs)}",
            field="Inference-Header-Content-Length",
        )
    spec = signature.inputs[0]
    shape = _raw_shape(spec, size)
    if signature.max_batch:
        shape = (1, *shape)
    tensor = TensorHead(spec.name, spec.datatype, shape, size=size, framed=False)
    plain = spec.datatype not in _LOOKED_AT
    return RequestHead("", (tensor,), (), DEFAULT_OPTIONS, True, size, plain=plain)


def _raw_shape(spec: TensorSpec, size: int) -> tuple[int, ...]:
    field = f"input '{spec.name}'.shape"
    variable = spec.shape.count(-1)
    fixed = math.prod(dim for dim in spec.shape if dim != -1)
    if spec.datatype is Datatype.BYTES:
        if variable or fixed != 1:
            raise wrong(field, "must be [1] for a raw binary request of BYTES")
        return spec.shape
    if variable > 1:
        raise wrong(field, "has more than one variable dimension: send a JSON head")
    unit = fixed * spec.datatype.size
    length, rest = divmod(size, unit) if unit else (0, size)
    if rest or (not variable and length != min(unit, 1)):
        needed = f"a multiple of {unit}" if variable else f"{unit}"
        raise InvalidInput(f"input '{spec.name}' needs {needed} bytes, but the body has {size}", field="body")
    return tuple(length if dim == -1 else dim for dim in spec.shape)


def _check_shape(tensor: TensorHead, spec: TensorSpec, signature: Signature) -> int:
    """The tensor's batch size: its first dimension, or 1 when the model takes no batches."""
    shape, limit = tensor.shape, signature.max_batch
    if not limit:
        if shape != spec.shape and not _fits(shape, spec.shape):
            raise _wrong_shape(tensor, spec, signature)
        return 1
    if not shape or (shape[1:] != spec.shape and not _fits(shape[1:], spec.shape)):
        raise _wrong_shape(tensor, spec, signature)
    if not 1 <= shape[0] <= limit:
        bound = f"<= {limit}" if shape[0] else ">= 1"
        raise InvalidInput(
            f"inference request batch-size must be {bound} for '{signature.model}'",
            field=f"input '{tensor.name}'.shape",
        )
    return shape[0]


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (-1, s) for s, w in zip(shape, wanted, strict=True))


def _check_outputs(head: RequestHead, signature: Signature) -> None:
    specs = signature.output_named
    for output in head.outputs:
        spec = specs.get(output.name)
        if spec is None:
            raise _unknown("output", output.name, specs, signature.model)
        check_form(output, spec.datatype)
    if not head.outputs and not head.binary_output:
        for spec in signature.outputs:
            check_form(RequestedOutput(spec.name), spec.datatype)


def check_form(output: RequestedOutput, datatype: Datatype) -> None:
    """Some datatypes cannot leave as JSON, or be classified."""
    if output.classification:
        if datatype is Datatype.BYTES:
            owner = f"output '{output.name}'"
            field = f"{owner}.parameters.classification"
            raise InvalidInput(f"{owner} is BYTES and cannot be classified", field=field)
    elif not output.binary and datatype.binary_only and output.shared_memory is None:
        owner = f"output '{output.name}'"
        raise InvalidInput(
            f"{owner} is {datatype.value}, which JSON cannot carry: ask for it with binary_data",
            field=f"{owner}.parameters.binary_data",
        )


def _unknown(kind: str, name: str, valid: Iterable[str], model: str) -> InvalidInput:
    near = difflib.get_close_matches(name[:80], valid, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(map(repr, valid))}"
    message = f"unexpected inference {kind} {shorten(name)} for model '{model}'; {hint}"
    return InvalidInput(message, field=f"{kind} {shorten(name)}")


def _wrong_datatype(tensor: TensorHead, spec: TensorSpec, model: str) -> InvalidInput:
    return InvalidInput(
        f"inference input '{tensor.name}' data-type is '{tensor.datatype.value}',"
        f" but model '{model}' expects '{spec.datatype.value}'",
        field=f"input '{tensor.name}'.datatype",
    )


def _wrong_shape(tensor: TensorHead, spec: TensorSpec, signature: Signature) -> InvalidInput:
    expected = spec.full_shape(signature.max_batch)
    note = "; the first dimension is the batch" if signature.max_batch else ""
    return InvalidInput(
        f"unexpected shape for input '{tensor.name}' for model '{signature.model}'."
        f" Expected {_dims(expected)}, got {_dims(tensor.shape)}{note}",
        field=f"input '{tensor.name}'.shape",
    )


def _check_missing(head: RequestHead, signature: Signature) -> None:
    """Optional inputs may be left out; but where there are batches, one input must say how large this is."""
    got = [tensor.name for tensor in head.inputs]
    required = [spec.name for spec in signature.inputs if not spec.optional]
    missing = [name for name in required if name not in got]
    if not missing:
        if not got and signature.max_batch:
            raise InvalidInput(
                f"model '{signature.model}' needs one of its inputs at least: without any, a request does not"
                " say how many rows it has",
                field="inputs",
            )
        return
    most, least = len(signature.inputs), len(required)
    expected = f"{most} inputs" if most == least else f"number of inputs between {least} and {most}"
    raise InvalidInput(
        f"expected {expected} but got {len(got)} inputs for model '{signature.model}'."
        f" Got input(s) {_listed(got)}, but missing required input(s) {_listed(missing)}."
        " Please provide all required input(s).",
        field="inputs",
    )


def _dims(shape: tuple[int, ...]) -> str:
    """As Triton writes them: without spaces."""
    return f"[{','.join(map(str, shape))}]"


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(map(shorten, names))}]"
