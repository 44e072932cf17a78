"""Checks requests whose tensors are not simply binary, and makes them so, before the engine gets them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from carpool.frontend.calls.client_memory import Fetch
from carpool.types import Datatype, InferRequest, Signature
from carpool.wire.strings import Between, go_on
from carpool.wire.v2 import (
    Buffer,
    RequestHead,
    TensorHead,
    bind,
    check_binary,
    check_tail,
    encode_request,
    raw_head,
    read_head,
    read_header_length,
)

AT_ONCE = 64 * 1024
"""Bytes of JSON or strings to read in the loop: 150,000 numbers take 25 ms, and other clients wait."""

_BYTES = Datatype.BYTES
_BOOL = Datatype.BOOL
_FEW_STRINGS = 4096
_PUT_AT_ONCE = 4 << 20  # bytes: to copy them takes a millisecond, and 60 MB many
_COPIED = 1 << 20


def is_in_place(head: RequestHead) -> bool:
    """Returns whether the tensors can stay where they are, after a look at them that does not take long."""
    if any(tensor.data is not None or tensor.shared_memory is not None for tensor in head.inputs):
        return False
    return sum(math.prod(tensor.shape) for tensor in head.inputs if tensor.datatype is _BYTES) <= _FEW_STRINGS


def takes_long(size: int, header_length: int | None, signature: Signature) -> bool:
    """Returns whether a body is better not read in the loop."""
    if size <= AT_ONCE:
        return False
    json = header_length is None or header_length > AT_ONCE
    return json or any(spec.datatype is _BYTES for spec in signature.inputs)


def check(head: RequestHead, tail: Buffer, model: str, between: Between = go_on) -> None:
    """BYTES lengths must add up and BOOL bytes be 0 or 1; those in regions are looked at later."""
    looked_at = [one for one in _with_it(head) if one.data is None and one.datatype in (_BYTES, _BOOL)]
    if looked_at:
        check_binary(looked_at, tail, model, between)


def prepare(
    body: bytes | bytearray, header_length: int | None, signature: Signature, between: Between = go_on
) -> tuple[RequestHead, list[Buffer]]:
    """Returns a whole body as a head and the bytes of its tensors, all of them binary. Safe in any thread.

    Inputs in a client's memory stay there, and in the head.
    """
    view = memoryview(body)
    size = len(view)
    end = size
    if header_length is not None:
        end = header_length
        read_header_length(str(end), size)  # what a chunked or compressed body holds is known only now
    head = raw_head(signature, size) if header_length == 0 else read_head(view[:end], signature)
    check_tail(head, size - end, signature.model)
    tail = view[end:]
    check(head, tail, signature.model, between)
    return packed(head, tail, signature.model)


def packed(head: RequestHead, tail: Buffer, model: str) -> tuple[RequestHead, list[Buffer]]:
    """Returns the same with all tensors in binary, in pieces."""
    has_json_data = any(tensor.data is not None for tensor in head.inputs)
    return _pack(head, tail, model) if has_json_data else (head, [tail])


def _with_it(head: RequestHead) -> list[TensorHead]:
    return [tensor for tensor in head.inputs if tensor.shared_memory is None]


def _pack(head: RequestHead, tail: Buffer, model: str) -> tuple[RequestHead, list[Buffer]]:
    tensors = bind(_with_it(head), tail)
    pieces = encode_request(InferRequest(model, tensors)).buffers[1:]
    inputs = [tensor for tensor in head.inputs if tensor.shared_memory is not None]
    offset = 0
    for tensor, piece in zip(tensors, pieces, strict=True):
        inputs.append(TensorHead(tensor.name, tensor.datatype, tensor.shape, offset, len(piece)))
        offset += len(piece)
    binary = RequestHead(head.id, inputs, head.outputs, head.options, head.binary_output, offset, head.batch)
    return binary, pieces


def begin_filling(
    head: RequestHead, pieces: Sequence[Buffer], fetch: Fetch | None, view: memoryview, unchecked: str
) -> tuple[bool, Callable[[Between], None]] | None:
    """Puts what is not much into a slot: the pieces, or what is in the client's memory. Returns the work that
    is left, and before it whether that takes long: the rest of the copies, and the checks of tensors that are
    unchecked yet, for the model of this name. None: nothing is left."""
    if head.tail_size <= _PUT_AT_ONCE or (fetch is not None and fetch.by_engine):
        put_pieces(pieces, view)
        if (fetch is None and (head.plain or not unchecked)) or (fetch is not None and fetch.by_engine):
            return None
        pieces = ()
    long = bool(pieces) or (fetch is not None and fetch.takes_long)
    long = long or (bool(unchecked) and head.tail_size > AT_ONCE and not is_in_place(head))

    def fill(between: Between) -> None:
        put_pieces(pieces, view, between)
        if unchecked:
            check(head, view[: head.tail_size], unchecked, between)
        if fetch is not None:
            fetch.into(view, between)

    return long, fill


def put_pieces(pieces: Sequence[Buffer], view: memoryview, between: Between = go_on) -> None:
    """One behind the other, a part at a time: a thread that copies holds the interpreter."""
    position = 0
    for piece in pieces:
        source = memoryview(piece)
        for start in range(0, len(source), _COPIED):
            part = source[start : start + _COPIED]
            between()
            view[position : position + len(part)] = part
            position += len(part)
