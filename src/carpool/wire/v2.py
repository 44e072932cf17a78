"""Translates protocol v2 over HTTP between bytes and messages: the one module the rest of Carpool imports
from here.

A server that receives the body in place uses the steps one by one:
`read_header_length` → `read_head` (or `raw_head`) → `check_tail` → `bind`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from functools import lru_cache

from carpool.errors import InvalidInput, Unsupported
from carpool.types import Datatype, InferResponse, RequestedOutput, Signature, TensorSpec
from carpool.wire.codec import (
    Encoded,
    Placed,
    as_requested,
    bind,
    bind_packed,
    check_binary,
    check_form,
    encode_error,
    encode_request,
    encode_response,
    is_all_binary,
    with_id,
)
from carpool.wire.head import (
    DEFAULT_OPTIONS,
    MAX_STRINGS,
    Buffer,
    RequestHead,
    TensorHead,
    load_object,
    parse_head,
    parse_tensors,
    read_object,
    shorten,
)

__all__ = ["HEADER_LENGTH", "Buffer", "Encoded", "Placed", "RequestHead", "TensorHead", "as_requested"]
__all__ += [
    "bind",
    "bind_packed",
    "check_binary",
    "check_head",
    "check_tail",
    "decode_error",
    "decode_response",
]
__all__ += ["encode_error", "encode_request", "encode_response", "is_all_binary", "parse_head"]
__all__ += ["raw_head", "read_head", "read_header_length", "with_id"]

HEADER_LENGTH = "Inference-Header-Content-Length"
_RETAINED_HEAD_BYTES = 1024
_RETAINED_HEADS = 256
_LOOKED_AT = (Datatype.BYTES, Datatype.BOOL)  # not every sequence of bytes is one of these
_RAW_HEADS = 256
_LEADING_ID = re.compile(rb'\{"id": ?"([\w.:/+=-]+)",')


def read_header_length(value: str | bytes | None, body_size: int | None = None) -> int | None:
    """The header's value, or None when absent; `body_size` is None while it is not known."""
    if value is None:
        return None
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    text = text.strip(" \t")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidInput(f"{HEADER_LENGTH} must be an integer of 0 or more", field=HEADER_LENGTH)
    length = int(text)
    if body_size is not None and length > body_size:
        raise InvalidInput(
            f"{HEADER_LENGTH} is {length}, but the body has only {body_size} bytes", field=HEADER_LENGTH
        )
    return length


def read_head(json: Buffer, signature: Signature) -> RequestHead:
    """Parse a request's JSON and check it against the model. Small heads are cached: clients repeat them."""
    if len(json) > _RETAINED_HEAD_BYTES:
        return check_head(parse_head(json, signature.model), signature)
    found = _LEADING_ID.match(json)
    if found is None:
        return _read_repeated(bytes(json), signature)
    # every request has its own id: cache the rest, which is a whole head with the brace put back
    head = _read_repeated(b"{" + json[found.end() :], signature)
    own = head.id or str(found[1], "ascii")
    options, binary, tail = head.options, head.binary_output, head.tail_size
    return RequestHead(own, head.inputs, head.outputs, options, binary, tail, head.batch, plain=head.plain)


@lru_cache(maxsize=_RETAINED_HEADS)
def _read_repeated(json: bytes, signature: Signature) -> RequestHead:
    return check_head(parse_head(json, signature.model), signature)


def decode_response(body: Buffer, header_length: int | None) -> InferResponse:
    """Decodes, on the client's side, what a server answered to an infer request."""
    view = memoryview(body)
    end = _head_end(header_length, len(view))
    document = load_object(view[:end], "response")
    heads, tail_size = parse_tensors(document, "output")
    if tail_size != len(view) - end:
        raise InvalidInput(
            f"the response lists {tail_size} binary bytes, but {len(view) - end} follow its head",
            field="body",
        )
    return InferResponse(
        model=str(document.get("model_name", "")),
        outputs=bind(heads, view[end:], "output"),
        version=str(document.get("model_version", "")),
        id=str(document.get("id", "")),
        parameters=read_object(document.get("parameters"), "parameters"),
    )


def decode_error(body: Buffer) -> tuple[str, str]:
    """The sentence and the reason in an error body; one that is not JSON, as of a proxy, is the sentence."""
    try:
        document = load_object(body, "error")
    except InvalidInput:
        return bytes(body[:200]).decode(errors="replace"), ""
    return str(document.get("error", "")), str(document.get("reason", ""))


def _head_end(header_length: int | None, size: int) -> int:
    if header_length is None:
        return size
    if not 0 <= header_length <= size:
        raise InvalidInput(
            f"{HEADER_LENGTH} is {header_length}, but the body has {size} bytes", field=HEADER_LENGTH
        )
    return header_length


# ---- whether a head fits the model that it asks for, before a single tensor byte is needed -----------------


def check_head(head: RequestHead, signature: Signature) -> RequestHead:
    """Check names, datatypes, shapes and outputs against the model; fills in the batch size."""
    specs = signature.input_named
    batch = strings = 0
    for tensor in head.inputs:
        spec = specs.get(tensor.name)
        if spec is None:
            raise _unknown("input", tensor.name, specs, signature.model)
        if tensor.datatype is not spec.datatype:
            raise InvalidInput(
                f"inference input '{tensor.name}' data-type is '{tensor.datatype.value}',"
                f" but model '{signature.model}' expects '{spec.datatype.value}'",
                field=f"input '{tensor.name}'.datatype",
            )
        rows = _check_shape(tensor, spec, signature)
        if batch and rows != batch:
            raise InvalidInput(
                f"input '{tensor.name}' batch size does not match other inputs for '{signature.model}'",
                field=f"input '{tensor.name}'.shape",
            )
        batch = rows
        if tensor.datatype is Datatype.BYTES and -1 in spec.shape:
            strings += math.prod(tensor.shape)
            if strings > MAX_STRINGS:
                raise _too_many_strings(tensor, strings, signature)
    if len(head.inputs) != len(specs):
        _check_missing(head, signature)
    head.batch = batch or 1
    _check_outputs(head, signature)
    if head.options.sequence_id and not signature.told:  # 0 and "" are what clients send for none
        raise Unsupported(
            "sequences are not supported here: leave sequence_id out",
            field="parameters.sequence_id",
        )
    head.plain = all(output.shared_memory is None for output in head.outputs) and not any(
        tensor.data is not None or tensor.shared_memory is not None or tensor.datatype in _LOOKED_AT
        for tensor in head.inputs
    )
    return head


def check_tail(head: RequestHead, available: int, model: str) -> None:
    """The tensor bytes behind the JSON must be exactly those that the head lists."""
    if head.tail_size == available:
        return
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
    raise InvalidInput(f"{said}: {counts}", field="body")


@lru_cache(maxsize=_RAW_HEADS)
def raw_head(signature: Signature, size: int) -> RequestHead:
    """The head of a raw binary request: its body is the model's only input, batch 1."""
    if len(signature.inputs) != 1:
        raise InvalidInput(
            "Raw request must only have 1 input (found 1) to be deduced but got"
            f" {len(signature.inputs)} inputs in '{signature.model}' model configuration",
            field=HEADER_LENGTH,
        )
    spec = signature.inputs[0]
    shape = (1, *_raw_shape(spec, size)) if signature.max_batch else _raw_shape(spec, size)
    tensor = TensorHead(spec.name, spec.datatype, shape, size=size, framed=False)
    plain = spec.datatype not in _LOOKED_AT
    return RequestHead("", (tensor,), (), DEFAULT_OPTIONS, True, size, plain=plain)


def _raw_shape(spec: TensorSpec, size: int) -> tuple[int, ...]:
    field = f"input '{spec.name}'.shape"
    variable = spec.shape.count(-1)
    fixed = math.prod(dim for dim in spec.shape if dim != -1)
    if variable > 1:
        raise InvalidInput(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one"
            " variable-sized dimension; send a JSON head",
            field=field,
        )
    if spec.datatype is Datatype.BYTES:
        if variable or fixed != 1:
            raise InvalidInput(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]", field=field
            )
        return spec.shape
    unit = fixed * spec.datatype.size
    length, rest = divmod(size, unit) if unit else (0, size)
    if rest or (not variable and length != min(unit, 1)):
        needed = f"a multiple of {unit}" if variable else f"{unit}"
        raise InvalidInput(f"input '{spec.name}' needs {needed} bytes, but the body has {size}", field="body")
    return tuple(length if dim == -1 else dim for dim in spec.shape)


def _check_shape(tensor: TensorHead, spec: TensorSpec, signature: Signature) -> int:
    """Returns the tensor's batch size: its first dimension, or 1 when the model takes no batches."""
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
        if output.classification:
            _check_classes(output, spec, head.batch, signature)
    if not head.outputs and not head.binary_output:
        for spec in signature.outputs:
            check_form(RequestedOutput(spec.name), spec.datatype)


def _check_classes(output: RequestedOutput, spec: TensorSpec, rows: int, signature: Signature) -> None:
    """A row has no more classes than values, however many are asked for."""
    has = output.classification if -1 in spec.shape else math.prod(spec.shape)
    of_row = MAX_STRINGS // rows
    most = signature.classes if has <= of_row else min(signature.classes, of_row)
    if output.classification > most:
        of_rows = f" for each of {rows} rows" if most < signature.classes else ""
        raise InvalidInput(
            f"classification asks for {output.classification:,} classes of output {shorten(output.name)} of"
            f" model '{signature.model}': ask for at most {most:,}{of_rows}",
            field=f"output {shorten(output.name)}.parameters.classification",
        )


def _unknown(kind: str, name: str, valid: Iterable[str], model: str) -> InvalidInput:
    near = difflib.get_close_matches(name[:80], valid, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(map(repr, valid))}"
    message = f"unexpected inference {kind} {shorten(name)} for model '{model}'; {hint}"
    return InvalidInput(message, field=f"{kind} {shorten(name)}")


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
        if got or not signature.max_batch:
            return
        raise InvalidInput(
            f"model '{signature.model}' needs at least one of its inputs: without any, the number of rows "
            "is not known",
            field="inputs",
        )
    most, least = len(signature.inputs), len(required)
    expected = f"{most} inputs" if most == least else f"number of inputs between {least} and {most}"
    raise InvalidInput(
        f"expected {expected} but got {len(got)} inputs for model '{signature.model}'."
        f" Got input(s) {_listed(got)}, but missing required input(s) {_listed(missing)}."
        " Please provide all required input(s).",
        field="inputs",
    )


def _too_many_strings(tensor: TensorHead, strings: int, signature: Signature) -> InvalidInput:
    return InvalidInput(
        f"the request has {strings:,} strings up to input {shorten(tensor.name)}, but one for model"
        f" '{signature.model}' may have at most {MAX_STRINGS:,}: send them in several requests",
        field=f"input {shorten(tensor.name)}.shape",
    )


def _dims(shape: tuple[int, ...]) -> str:
    """Returns them as Triton writes them: without spaces."""
    return f"[{','.join(map(str, shape))}]"


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(map(shorten, names))}]"
