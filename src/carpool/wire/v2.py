"""Protocol v2 over HTTP, between bytes and messages: the one module the rest of Carpool imports from here.

A server that receives the body in place uses the steps one by one:
`read_header_length` → `read_head` (or `raw_head`) → `check_tail` → `bind`. `decode_request` is all of them.
"""

from __future__ import annotations

import re
from functools import lru_cache

from carpool.errors import InvalidInput
from carpool.types import InferRequest, InferResponse, Scalar, Signature
from carpool.wire.check import check_head, check_tail, raw_head
from carpool.wire.codec import (
    Encoded,
    Placed,
    as_requested,
    bind,
    encode_error,
    encode_request,
    encode_response,
)
from carpool.wire.head import (
    Buffer,
    RequestHead,
    TensorHead,
    load_object,
    parse_head,
    parse_tensors,
    read_object,
)

__all__ = [
    "HEADER_LENGTH",
    "Buffer",
    "Encoded",
    "Placed",
    "RequestHead",
    "TensorHead",
    "as_requested",
    "bind",
]
__all__ += ["check_head", "check_tail", "decode_error", "decode_request", "decode_response", "encode_error"]
__all__ += ["encode_request", "encode_response", "parse_head", "raw_head", "read_head", "read_header_length"]

HEADER_LENGTH = "Inference-Header-Content-Length"
_CACHED_HEAD_BYTES = 1024
_CACHED_HEADS = 256
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
    if len(json) > _CACHED_HEAD_BYTES:
        return check_head(parse_head(json, signature.model), signature)
    found = _LEADING_ID.match(json)
    if found is None:
        return _read_cached(bytes(json), signature)
    # every request has its own id: cache the rest, which is a whole head with the brace put back
    head = _read_cached(b"{" + json[found.end() :], signature)
    own = head.id or str(found[1], "ascii")
    options, binary, tail = head.options, head.binary_output, head.tail_size
    return RequestHead(own, head.inputs, head.outputs, options, binary, tail, head.batch, plain=head.plain)


@lru_cache(maxsize=_CACHED_HEADS)
def _read_cached(json: bytes, signature: Signature) -> RequestHead:
    return check_head(parse_head(json, signature.model), signature)


def decode_request(body: Buffer, header_length: int | None, signature: Signature) -> InferRequest:
    """A whole infer request. Tensors of fixed-size datatypes are views into `body`."""
    view = memoryview(body)
    end = _head_end(header_length, len(view))
    head = raw_head(signature, len(view)) if header_length == 0 else read_head(view[:end], signature)
    check_tail(head, len(view) - end, signature.model)
    return InferRequest(
        model=signature.model,
        inputs=bind(head.inputs, view[end:]),
        id=head.id,
        outputs=head.outputs,
        options=head.options,
        binary_output=head.binary_output,
        batch=head.batch,
    )


def decode_response(body: Buffer, header_length: int | None) -> InferResponse:
    """The client's side: what a server answered to an infer request."""
    view = memoryview(body)
    end = _head_end(header_length, len(view))
    document = load_object(view[:end], "response")
    heads, tail_size = parse_tensors(document, "output")
    if tail_size != len(view) - end:
        raise InvalidInput(
            f"the response lists {tail_size} binary bytes, but {len(view) - end} follow its head",
            field="body",
        )
    parameters: dict[str, Scalar] = read_object(document.get("parameters"), "parameters")
    return InferResponse(
        model=str(document.get("model_name", "")),
        outputs=bind(heads, view[end:], "output"),
        version=str(document.get("model_version", "")),
        id=str(document.get("id", "")),
        parameters=parameters,
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
