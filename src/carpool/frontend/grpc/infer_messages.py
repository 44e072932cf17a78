"""Infer requests as gRPC messages: taken apart, found again by their bytes if one like it came before, and
else understood. Whether they fit a model is for others to say. And the answers to them.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from carpool.errors import InvalidInput, ModelError, TooLarge
from carpool.frontend.calls.request import ModelLane
from carpool.frontend.grpc.message_fields import LENGTH, FieldBudget, Malformed, fields_of
from carpool.frontend.grpc.typed_contents import malformed, typed_tensor
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.step_times import Times
from carpool.types import RequestedOutput, Scalar, Tensor
from carpool.wire.codec import check_array, to_binary
from carpool.wire.head import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    begin_tensor,
    check_size,
    check_unique,
    parse_requested,
    read_options,
    read_shared_memory,
    shorten,
    too_many_parameters,
    write_shared_memory,
)
from carpool.wire.proto import message_class
from carpool.wire.v2 import Buffer, Placed, RequestHead, TensorHead, as_requested

ModelInferRequest = message_class("ModelInferRequest")

_ID: Final = 3 << 3 | 2
_RAW: Final = 7 << 3 | 2
_FIELDS = frozenset(number << 3 | 2 for number in range(1, 8))  # all of them are strings, bytes or messages
_INPUTS: Final = 5
_CONTENTS: Final = 5  # of an input
_LONGEST_SHIFT: Final = 28  # of a length, in five bytes
_FEW_FIELDS: Final = 256
_MOST_FIELDS: Final = 16 * MAX_TENSORS  # of a message and its inputs: some shapes have a field a dimension

LONGEST_REST: Final = 256 * 1024
"""Bytes of a message beside its tensors: names, shapes, parameters."""

_RETAINED_BYTES: Final = 4096
_RETAINED: Final = 512
_NUMBERS = ("priority", "timeout")  # some clients write them as text
_WHOLE_NUMBER = re.compile("[0-9]{1,19}")

Key = tuple[bytes, tuple[int, ...]]


# ── in parts, before it is understood ──


@dataclass(slots=True, eq=False)
class Family:
    """Describes what requests with the same `rest` and the same sizes ask for.

    The head is the same object for all of them, because that is how the link knows them again.
    """

    model: str
    version: str
    head: RequestHead
    contents: Sequence[Buffer] | None  # where they were not raw: made so
    typed: Sequence[Sequence[Buffer] | None] = ()  # until that is done: as they came, for each input
    catalog: Catalog | None = None
    lane: ModelLane = field(init=False)  # right while `catalog` is the one in force

    def tensor_bytes(self, parts: Parts) -> Sequence[Buffer]:
        return parts.contents if self.contents is None else self.contents


class Parts(NamedTuple):
    """`rest` is the message without its id and its raw contents: the same for all requests of a kind."""

    rest: bytes
    id: bytes
    contents: Sequence[Buffer]
    tail: int = 0  # where in the message the last of the contents begins
    family: Family | None = None  # if it was recognised
    typed: Sequence[Sequence[Buffer] | None] | None = None  # by input, where `rest` is without them, too

    @property
    def is_typed(self) -> bool:
        """Returns whether it is known that some of its tensors are in typed fields."""
        return self.typed is not None and any(contents is not None for contents in self.typed)


def take_apart(message: Buffer) -> Parts | None:
    """One look at the top level of the message, which is cheap however long its contents are.

    None for what takes a closer look: other fields, other wire types, lengths that cannot be, and more fields
    and bytes beside the raw contents than most requests have.
    """
    view = memoryview(message)
    rest: list[Buffer] = []
    contents: list[Buffer] = []
    request_id = b""
    position, end, tail, walked, size = 0, len(message), 0, 0, 0
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
                tail = position
            elif tag == _ID:
                request_id = bytes(view[position:stop])
            else:
                size += stop - start
                if size > _RETAINED_BYTES:
                    return None
                rest.append(view[start:stop])
            position = stop
            walked += 1
            if walked > _FEW_FIELDS:
                return None
    except IndexError:
        return None
    return Parts(b"".join(rest), request_id, contents, tail)


def take_apart_whole(message: Buffer) -> Parts:
    """Does the same for any message that is a request at all, and takes the typed contents of its inputs out
    of it: a parser would make an object of each value. In any thread."""
    view = memoryview(message)
    rest: list[Buffer] = []
    contents: list[Buffer] = []
    typed: list[Sequence[Buffer] | None] = []
    request_id = b""
    size = tail = 0
    budget = FieldBudget(_MOST_FIELDS, "the message")
    try:
        for number, kind, start, begin, end in fields_of(view, budget):
            tag = number << 3 | kind
            if tag not in _FIELDS:
                continue
            if tag == _RAW:
                contents.append(view[begin:end])
                tail = begin
                continue
            if tag == _ID:
                request_id = bytes(view[begin:end])
                continue
            piece: Buffer = view[start:end]
            if number == _INPUTS:
                piece, found = _without_contents(view[begin:end], budget)
                typed.append(found)
            size += len(piece)
            if size > LONGEST_REST:
                raise TooLarge(
                    f"the message has more than {LONGEST_REST:,} bytes beside its tensors", field="body"
                )
            rest.append(piece)
    except Malformed:
        raise malformed() from None
    return Parts(b"".join(rest), request_id, contents, tail, typed=typed)


def _without_contents(tensor: memoryview, budget: FieldBudget) -> tuple[bytes, Sequence[Buffer] | None]:
    """Returns an input as a field of its request, without what it has in typed fields; and that."""
    kept: list[Buffer] = []
    found: list[Buffer] = []
    has_contents = False
    for number, kind, start, begin, end in fields_of(tensor, budget):
        if number == _CONTENTS and kind == LENGTH:
            found.append(tensor[begin:end])
            has_contents = True
        else:
            kept.append(tensor[start:end])
    inside = b"".join(kept)
    return framing(_INPUTS << 3 | LENGTH, len(inside)) + inside, found if has_contents else None


def check_text(request_id: bytes) -> None:
    try:
        request_id.decode()
    except UnicodeDecodeError:
        raise InvalidInput("id must be UTF-8 text", field="id") from None


# ── requests that are alike ──


class Families:
    """Holds the families seen last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, Family] = OrderedDict()
        # By length: how messages begin, their `rest`, and whether contents follow.
        self._begun: dict[int, tuple[bytes, bytes, bool, Family]] = {}

    def recognise(self, message: Buffer) -> Parts | None:
        """One that is as long as another was, and like it up to its only contents, or to its end if it has
        none, has the same fields."""
        begun = self._begun.get(len(message))
        if begun is None:
            return None
        start, rest, has_contents, family = begun
        tail = len(start)
        if bytes(message[:tail]) != start:  # a view would be compared number by number
            return None
        if not has_contents:
            return Parts(rest, b"", (), 0, family)
        return Parts(rest, b"", (memoryview(message)[tail:],), tail, family)

    def remember(self, message: Buffer, parts: Parts, family: Family) -> None:
        if parts.id or family.contents is not None or len(parts.contents) > 1:
            return
        has_contents = bool(parts.contents)
        tail = parts.tail if has_contents else len(message)
        size = len(parts.contents[0]) if has_contents else 0
        if 0 < tail <= _RETAINED_BYTES and tail + size == len(message):
            if len(self._begun) >= _RETAINED:
                self._begun.clear()
            self._begun[len(message)] = bytes(message[:tail]), parts.rest, has_contents, family

    def find(self, parts: Parts) -> Family | None:
        key = _key(parts)
        family = self._known.get(key)
        if family is not None:
            self._known.move_to_end(key)
        return family

    def keep(self, parts: Parts, family: Family) -> None:
        if family.contents is None and len(parts.rest) <= _RETAINED_BYTES:
            self._known[_key(parts)] = family
            if len(self._known) > _RETAINED:
                self._known.popitem(last=False)


def _key(parts: Parts) -> Key:
    return parts.rest, tuple(map(len, parts.contents))


def parse(kind: Any, message: bytes) -> Any:
    """Returns a message of this class. Safe in any thread, as the next one."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise InvalidInput(f"the message is not a {kind.DESCRIPTOR.name}", field="body") from None


def read_request(parts: Parts) -> tuple[Any, Sequence[Sequence[Buffer] | None]]:
    """Returns the message without contents of any kind, and for each input what it has in typed fields."""
    if parts.typed is None:
        parts = take_apart_whole(parts.rest)
    assert parts.typed is not None
    return parse(ModelInferRequest, parts.rest), parts.typed


def read_family(request: Any, raw: Sequence[Buffer], typed: Sequence[Sequence[Buffer] | None]) -> Family:
    """Understand a request; whether it fits a model is for `check_head` to say. Nothing of what is in typed
    fields is read: that is for `read_typed`, when it is known to fit."""
    for entries, name in ((request.inputs, "inputs"), (request.outputs, "outputs")):
        if len(entries) > MAX_TENSORS:
            raise InvalidInput(f"'{name}' lists more than {MAX_TENSORS} tensors", field=name)
    options, _ = read_options(_parameters(request, "parameters"))
    inputs, is_typed = _inputs(request, raw, typed)
    requested = []
    for output in request.outputs:
        parameters = _parameters(output, f"output {shorten(output.name)}.parameters")
        requested.append({"name": output.name, "parameters": {**parameters, "binary_data": True}})
    tail_size = sum(tensor.size for tensor in inputs)
    head = RequestHead("", inputs, parse_requested(requested), options, True, tail_size)
    return Family(request.model_name, request.model_version, head, None, typed if is_typed else ())


def read_typed(family: Family, most: int) -> None:
    """Makes the contents of an understood request binary, where they came in typed fields, and says where
    they lie. It is called once, in any thread, before the request is passed on."""
    head, pieces, offset = family.head, [], 0
    needed = sum(math.prod(tensor.shape) * tensor.datatype.size for tensor in head.inputs)
    if needed > most:
        raise TooLarge(f"the inputs take {needed} bytes, more than the {most} allowed")
    for tensor, contents in zip(head.inputs, family.typed, strict=True):
        if tensor.shared_memory is not None:
            continue
        data = typed_tensor(tensor, math.prod(tensor.shape), contents or ())
        tensor.offset, tensor.size = offset, len(data)
        offset += len(data)
        pieces.append(data)
    head.tail_size = offset
    family.contents, family.typed = pieces, ()


def _inputs(
    request: Any, raw: Sequence[Buffer], typed: Sequence[Sequence[Buffer] | None]
) -> tuple[list[TensorHead], bool]:
    """Returns the inputs, and whether any of them is to be read from typed fields."""
    heads: list[TensorHead] = []
    remaining = list(reversed(raw))
    offset, is_typed = 0, False
    for number, tensor in enumerate(request.inputs):
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        head, elements = begin_tensor(entry, "input", offset)
        heads.append(head)
        has_contents = number < len(typed) and typed[number] is not None
        if _in_region(head, elements, tensor, request.model_name, has_contents=has_contents):
            continue
        if not raw:
            is_typed = True
            continue
        head.size = _place_raw(head, elements, remaining, request.model_name, has_contents=has_contents)
        offset += head.size
    if remaining:
        raise InvalidInput(
            f"raw_input_contents has {len(raw)} entries, {len(remaining)} more than there are inputs for",
            field="raw_input_contents",
        )
    if len(heads) > 1:
        check_unique([head.name for head in heads], "input")
    return heads, is_typed


def _in_region(head: TensorHead, elements: int, tensor: Any, model: str, *, has_contents: bool) -> bool:
    """Returns whether its data is in shared memory, and if so where."""
    owner = f"input {shorten(head.name)}"
    parameters = _parameters(tensor, f"{owner}.parameters")
    if "shared_memory_region" not in parameters:
        return False
    if has_contents:
        raise InvalidInput(f"{owner} has its data in more than one way", field=f"{owner}.contents")
    head.shared_memory = read_shared_memory(parameters, owner)
    size = head.shared_memory.byte_size
    check_size(head, size, elements, f"{owner}.parameters.shared_memory_byte_size", model)
    return True


def _place_raw(head: TensorHead, elements: int, raw: list[Buffer], model: str, *, has_contents: bool) -> int:
    """Returns the bytes that it takes, which are the next of the raw ones."""
    owner = f"input {shorten(head.name)}"
    if has_contents:
        raise InvalidInput(
            f"{owner} has contents, although raw_input_contents is used: give one of the two",
            field=f"{owner}.contents",
        )
    if not raw:
        raise InvalidInput(f"raw_input_contents has no entry for {owner}", field="raw_input_contents")
    size = len(raw.pop())
    check_size(head, size, elements, f"raw_input_contents of {owner}", model)
    return size


def _parameters(owner: Any, field: str) -> dict[str, Scalar]:
    """The values of a map of InferParameter, as the JSON of HTTP would have them."""
    found: dict[str, Scalar] = {}
    if len(owner.parameters) > MAX_PARAMETERS:
        raise too_many_parameters(field)
    for key, parameter in owner.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidInput(f"parameter {shorten(key)} has no value", field=f"{field}.{key[:80]}")
        value: Scalar = getattr(parameter, kind)
        if key in _NUMBERS and isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
            value = int(value)
        found[key] = value
    return found


# ── answers as bytes, put together by hand: heads repeat, and tensors are copied once ──

TIMES = ("carpool_decode_ms", "carpool_queue_ms", "carpool_infer_ms", "carpool_post_ms")
BATCH: Final = "carpool_batch"
FINAL: Final = "triton_final_response"

_ModelInferResponse = message_class("ModelInferResponse")
_OutputTensor = message_class("ModelInferResponse.InferOutputTensor")

# tags of ModelInferResponse
_ANSWER_ID: Final = 26
_OUTPUTS: Final = 42
_ANSWER_RAW: Final = 50
_INFER_RESPONSE: Final = 0x12  # of ModelStreamInferResponse


def framing(tag: int, size: int) -> bytes:
    """Returns what stands before a field of `size` bytes."""
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
    times: Times | None,
    more: bytes = b"",
) -> bytes:
    """A ModelInferResponse: see `answer_pieces`."""
    return b"".join(answer_pieces(entry, request_id, listed, times, more)[0])


def answer_pieces(
    entry: ModelEntry,
    request_id: bytes,
    listed: Sequence[tuple[bytes, Buffer]],
    times: Times | None,
    more: bytes = b"",
) -> tuple[list[Buffer], int]:
    """Returns a ModelInferResponse in pieces, and the bytes of the outputs; `listed` has the head and the
    bytes of each output, `more` is appended. Where the time went is not known before the end."""
    size = 0
    pieces: list[Buffer] = [_prefix(entry.name, entry.version)]
    if request_id:
        pieces += (framing(_ANSWER_ID, len(request_id)), request_id)
    if times is not None:
        decode, queue, infer, post, batch = times
        pieces += (_TIMES.pack(_C0, decode, _C1, queue, _C2, infer, _C3, post), _batch(batch))
    pieces += [head for head, _ in listed]
    for _, data in listed:
        pieces += (_before_raw(len(data)), data)
        size += len(data)
    pieces.append(more)
    return pieces, size


def encode_outputs(listed: Sequence[tuple[bytes, Buffer]]) -> bytes:
    """Encodes the part of an answer that is the same for all who ask the same."""
    pieces: list[Buffer] = [head for head, _ in listed]
    for _, data in listed:
        pieces += (framing(_ANSWER_RAW, len(data)), data)
    return b"".join(pieces)


def text_parameter(name: str, value: str) -> bytes:
    """Returns one more parameter of an answer."""
    message = _ModelInferResponse()
    message.parameters[name].string_param = value
    return bytes(message.SerializeToString())


def in_stream(response: bytes) -> bytes:
    return before_in_stream(len(response)) + response


def before_in_stream(size: int) -> bytes:
    """Returns what stands before a response of so many bytes."""
    return framing(_INFER_RESPONSE, size)


def list_outputs(
    entry: ModelEntry,
    outputs: Sequence[RequestedOutput],
    tensors: Sequence[Tensor],
    placed: Mapping[str, Placed],
) -> list[tuple[bytes, Buffer]]:
    """Lists each output that was asked for, in that order: its head and its bytes.

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
            labels = entry.published.labels.get(name, ())
            listed.append(_listed(as_requested(output, produced[name], labels, batched=batched)))
        else:
            raise ModelError(f"the model gave no output '{name}'", field=f"output '{name}'")
    return listed


def _listed(tensor: Tensor) -> tuple[bytes, Buffer]:
    check_array(tensor, "output")
    return _output_head(tensor.name, tensor.datatype.value, tensor.shape), to_binary(tensor)


@lru_cache(maxsize=256)
def _before_raw(size: int) -> bytes:
    return framing(_ANSWER_RAW, size)


@lru_cache(maxsize=256)
def _prefix(name: str, version: str) -> bytes:
    return bytes(_ModelInferResponse(model_name=name, model_version=version).SerializeToString())


@lru_cache(maxsize=1024)
def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return _framed_output(_OutputTensor(name=name, datatype=datatype, shape=shape))


def _placed_head(name: str, placed: Placed) -> bytes:
    output = _OutputTensor(name=name, datatype=placed.datatype.value, shape=placed.shape)
    for key, value in write_shared_memory(placed.place).items():
        setattr(output.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
    return _framed_output(output)


def _framed_output(output: Any) -> bytes:
    head: bytes = output.SerializeToString()
    return framing(_OUTPUTS, len(head)) + head


# ---- parameters of an answer -------------------------------------------------------------------------------


def _parameter(name: str, kind: str, value: object) -> bytes:
    response = _ModelInferResponse()
    setattr(response.parameters[name], kind, value)
    return bytes(response.SerializeToString())


# Doubles have a fixed size, so that everything around the four of them is constant.
_C0, _C1, _C2, _C3 = (
    _parameter(name, "double_param", 1.0).removesuffix(struct.pack("<d", 1.0)) for name in TIMES
)
_TIMES: Final = struct.Struct("<" + "".join(f"{len(constant)}sd" for constant in (_C0, _C1, _C2, _C3)))


@lru_cache(maxsize=4096)
def _batch(images: int) -> bytes:
    return _parameter(BATCH, "int64_param", images)


FINAL_PARAMETER = _parameter(FINAL, "bool_param", True)
"""Says in a stream that nothing more comes for a request."""
NOT_FINAL_PARAMETER = _parameter(FINAL, "bool_param", False)
