"""An infer request in its parts, before it is understood: what clients repeat, and what is new each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from carpool.errors import InvalidInput
from carpool.frontend.grpc.schema import message_class
from carpool.wire.v2 import Buffer

ModelInferRequest = message_class("ModelInferRequest")

_ID = 3 << 3 | 2
_RAW = 7 << 3 | 2
_FIELDS = frozenset(number << 3 | 2 for number in range(1, 8))  # all of them are strings, bytes or messages
_LONGEST_SHIFT = 28  # of a length, in five bytes


class Parts(NamedTuple):
    """`rest` is the message without its id and its raw contents: the same for all requests of a kind."""

    rest: bytes
    id: bytes
    contents: Sequence[Buffer]


def take_apart(message: bytes) -> Parts | None:
    """One look at the top level of the message, which is cheap however long its contents are.

    None for what only a real parser can judge: other fields, other wire types, lengths that cannot be.
    """
    view = memoryview(message)
    rest: list[bytes] = []
    contents: list[Buffer] = []
    request_id = b""
    position, end = 0, len(message)
    try:
        while position < end:
            start = position
            tag, length = message[position], message[position + 1]
            position += 2
            shift = 7
            while length >> shift and shift <= _LONGEST_SHIFT:  # the highest bit says that more follows
                length += (message[position] - 1) << shift
                position += 1
                shift += 7
            stop = position + length
            if stop > end or tag not in _FIELDS:
                return None
            if tag == _RAW:
                contents.append(view[position:stop])
            elif tag == _ID:
                request_id = message[position:stop]
            else:
                rest.append(message[start:stop])
            position = stop
    except IndexError:
        return None
    return Parts(b"".join(rest), request_id, contents)


def parse_whole(message: bytes) -> Parts:
    """The same for any message that is a request at all."""
    try:
        request = ModelInferRequest.FromString(message)
    except DecodeError:
        raise InvalidInput("the message is not a ModelInferRequest", field="body") from None
    contents = list(request.raw_input_contents)
    request_id: str = request.id
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    request.DiscardUnknownFields()
    return Parts(request.SerializeToString(deterministic=True), request_id.encode(), contents)


def check_text(request_id: bytes) -> None:
    try:
        request_id.decode()
    except UnicodeDecodeError:
        raise InvalidInput("id must be UTF-8 text", field="id") from None
