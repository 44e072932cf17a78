"""Requests that are alike: understood and checked once, and found again by their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from carpool.errors import InvalidInput
from carpool.frontend.grpc.contents import to_bytes
from carpool.frontend.grpc.parts import ModelInferRequest, Parts
from carpool.frontend.http.packing import is_plain
from carpool.link.door import Catalog, ModelEntry
from carpool.observe.counters import Row
from carpool.types import Scalar
from carpool.wire.head import (
    MAX_TENSORS,
    begin_tensor,
    check_size,
    check_unique,
    parse_requested,
    read_options,
    read_shared_memory,
    shorten,
)
from carpool.wire.v2 import Buffer, RequestHead, TensorHead

_CACHED_BYTES = 4096
_CACHED = 512
_NUMBERS = ("priority", "timeout")  # some clients write them as text

Key = tuple[bytes, tuple[int, ...]]


class Family:
    """What requests with the same `rest` and the same sizes ask for.

    The head is the same object for all of them, because that is how the link knows them again.
    """

    __slots__ = ("catalog", "contents", "entry", "head", "is_plain", "model", "row", "version")

    entry: ModelEntry  # with the row, right while `catalog` is the one in force
    row: Row

    def __init__(
        self, model: str, version: str, head: RequestHead, contents: Sequence[Buffer] | None
    ) -> None:
        self.model = model
        self.version = version
        self.head = head
        self.contents = contents  # where they were not raw: made so
        self.is_plain = is_plain(head)
        self.catalog: Catalog | None = None


class Families:
    """Those seen last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, Family] = OrderedDict()

    def find(self, parts: Parts) -> Family | None:
        key = _key(parts)
        family = self._known.get(key)
        if family is not None:
            self._known.move_to_end(key)
        return family

    def keep(self, parts: Parts, family: Family) -> None:
        if family.contents is None and len(parts.rest) <= _CACHED_BYTES:
            self._known[_key(parts)] = family
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)


def _key(parts: Parts) -> Key:
    return parts.rest, tuple(map(len, parts.contents))


def parse_rest(parts: Parts) -> Any:
    """A ModelInferRequest without its raw contents. Safe in any thread, as the next one."""
    try:
        return ModelInferRequest.FromString(parts.rest)
    except DecodeError:
        raise InvalidInput("the message is not a ModelInferRequest", field="body") from None


def read_family(request: Any, raw: Sequence[Buffer]) -> Family:
    """Understand a request; whether it fits a model is for `check_head` to say."""
    if len(request.inputs) > MAX_TENSORS:
        raise InvalidInput(f"'inputs' lists more than {MAX_TENSORS} tensors", field="inputs")
    options, _ = read_options(_parameters(request, "parameters"))
    inputs, contents = _inputs(request, raw)
    outputs = parse_requested([_requested(output) for output in request.outputs]) or ()
    tail_size = sum(tensor.size for tensor in inputs)
    head = RequestHead("", inputs, outputs, options, True, tail_size)
    return Family(request.model_name, request.model_version, head, contents)


def _inputs(request: Any, raw: Sequence[Buffer]) -> tuple[list[TensorHead], list[Buffer] | None]:
    """The inputs, and their bytes if they came in typed fields."""
    heads: list[TensorHead] = []
    typed: list[Buffer] = []
    remaining = list(reversed(raw))
    offset = 0
    for tensor in request.inputs:
        entry = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        head, elements = begin_tensor(entry, "input", offset)
        heads.append(head)
        if not _in_region(head, elements, tensor, request.model_name):
            taken = remaining if raw else None
            head.size = _place(head, elements, tensor, taken, typed, request.model_name)
            offset += head.size
    if remaining:
        raise InvalidInput(
            f"raw_input_contents has {len(raw)} entries, {len(remaining)} more than there are inputs for",
            field="raw_input_contents",
        )
    if len(heads) > 1:
        check_unique([head.name for head in heads], "input")
    return heads, typed or None


def _in_region(head: TensorHead, elements: int, tensor: Any, model: str) -> bool:
    """Whether its data is in shared memory, and if so where."""
    owner = f"input {shorten(head.name)}"
    parameters = _parameters(tensor, f"{owner}.parameters")
    if "shared_memory_region" not in parameters:
        return False
    if tensor.HasField("contents"):
        raise InvalidInput(f"{owner} carries its data in more than one way", field=f"{owner}.contents")
    head.shared_memory = read_shared_memory(parameters, owner)
    size = head.shared_memory.byte_size
    check_size(head, size, elements, f"{owner}.parameters.shared_memory_byte_size", model)
    return True


def _place(
    head: TensorHead, elements: int, tensor: Any, raw: list[Buffer] | None, typed: list[Buffer], model: str
) -> int:
    """The bytes it takes: the next of the raw ones, or what its typed fields come to."""
    owner = f"input {shorten(head.name)}"
    if raw is None:
        data = to_bytes(head, elements, tensor.contents)
        typed.append(data)
        return len(data)
    if tensor.HasField("contents"):
        raise InvalidInput(
            f"{owner} has contents, although raw_input_contents is used: give one of the two",
            field=f"{owner}.contents",
        )
    if not raw:
        raise InvalidInput(f"raw_input_contents has no entry for {owner}", field="raw_input_contents")
    size = len(raw.pop())
    check_size(head, size, elements, f"raw_input_contents of {owner}", model)
    return size


def _requested(output: Any) -> dict[str, Any]:
    parameters = _parameters(output, f"output {shorten(output.name)}.parameters")
    return {"name": output.name, "parameters": {**parameters, "binary_data": True}}


def _parameters(owner: Any, field: str) -> dict[str, Scalar]:
    """The values of a map of InferParameter, as the JSON of HTTP would have them."""
    found: dict[str, Scalar] = {}
    for key, parameter in owner.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidInput(f"parameter {shorten(key)} has no value", field=f"{field}.{key[:80]}")
        value: Scalar = getattr(parameter, kind)
        found[key] = int(value) if key in _NUMBERS and _is_number(value) else value
    return found


def _is_number(value: Scalar) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20


def input_bytes(family: Family, parts: Parts) -> Sequence[Buffer]:
    return parts.contents if family.contents is None else family.contents
