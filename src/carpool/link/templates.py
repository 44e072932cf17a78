"""Templates: what requests have in common is said once, then only its number. Both ends of it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import count
from mmap import mmap
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import orjson

from carpool.core.front_load import Outside
from carpool.errors import CarpoolError
from carpool.link.catalog import ModelEntry
from carpool.link.records import MAX_TEMPLATE_BYTES, MAX_TEMPLATES, RESET, TEMPLATE, ProtocolError, to_engine
from carpool.memory.client_files import PLACE, OpenRegion, RegionReads, find_regions
from carpool.memory.layout import CUTS, ENCODED, FILE_AT, TensorPlace, bind_file, declared_places, end_of
from carpool.memory.picture_leases import KEPT_FILE, crops_in
from carpool.types import DATATYPES, Array, Datatype, RequestedOutput, RequestOptions, Signature, Tensor
from carpool.wire.v2 import RequestHead, TensorHead, bind_packed, check_head

_CHECKED = (Datatype.BYTES, Datatype.BOOL)  # not every sequence of bytes is one of these

_identities = count(1)


class RequestForm(NamedTuple):
    """Describes how a request's inputs lie, and which outputs it is answered with. Requests that look alike
    share it."""

    wanted: Sequence[str] = ()  # none: all outputs
    encoded: bool = False  # the one input is a picture's file, for the model's device to decode
    packed: bool = False  # its inputs of BYTES are to be unpacked by the thread that makes the batch
    may_omit: bool = False  # outputs that its model leaves out are no mistake: a step of an ensemble


PLAIN_FORM = RequestForm()


class ServedTemplate:
    """Holds what the requests of one family have in common. `entry` is None when its model is not served
    now."""

    def __init__(self, document: Mapping[str, Any], entry: ModelEntry | None, payload: bytes) -> None:
        self.key: int = document["key"]
        self.identity = next(_identities)
        self.payload = payload  # what it was read from, for a process that has to know it too
        self.entry = entry
        self.heads = [_read_tensor(listed) for listed in document["inputs"]]
        self.extent = max((head.offset + head.size for head in self.heads), default=0)
        self.packed = any(head.datatype is Datatype.BYTES for head in self.heads)
        self.plain = not any(head.datatype in _CHECKED for head in self.heads)
        self.sizes = [(head.name, head.size) for head in self.heads]
        self.arrays = [(head.name, head.shape, head.datatype.dtype, head.offset) for head in self.heads]
        self.wanted: tuple[str, ...] = tuple(document["wanted"])
        self.encoded: bool = document["encoded"]
        self.form = RequestForm(self.wanted, self.encoded, self.packed)
        self.keeps = self.cuts = False  # the file's pixels, for later steps; out of pixels that were kept
        self.images = 1
        self.shape: Hashable = None
        self.outputs: list[str] = []
        self.places: list[TensorPlace] | None = None
        if entry is not None:
            self._fit(entry.signature)

    def _fit(self, signature: Signature) -> None:
        """The same check that the front end has made: a batch is no place to find out that it was not."""
        if self.encoded:
            self._fit_file(signature)
            return
        if len({head.name for head in self.heads}) != len(self.heads):
            raise ValueError("an input twice")
        requested = [RequestedOutput(name, binary=True) for name in self.wanted]
        head = RequestHead("", self.heads, requested, RequestOptions(), True, self.extent)
        self.images = check_head(head, signature).batch
        self.shape = _batch_shape(self.heads, signature)
        self.outputs = list(self.wanted) or [spec.name for spec in signature.outputs]
        self.places = declared_places(signature, self.wanted, self.images)

    def _fit_file(self, signature: Signature) -> None:
        vision = self.entry.vision if self.entry is not None else None
        if vision is None or not vision["encoded"]:
            raise ValueError("the model takes no files")
        there = [(head.name, head.offset) for head in self.heads]
        if there != [(vision["input"]["name"], 0)]:
            raise ValueError("inputs of a file")
        size = self.heads[0].size
        self.shape, self.keeps = ENCODED, size == KEPT_FILE
        if size not in (FILE_AT, KEPT_FILE):
            self.shape, self.cuts, self.images = CUTS, True, crops_in(size)
            if not 1 <= self.images <= max(1, signature.max_batch):
                raise ValueError("crops")
        self.outputs = list(self.wanted) or [spec.name for spec in signature.outputs]
        self.places = declared_places(signature, self.wanted, self.images)

    def bind(self, memory: mmap, offset: int) -> dict[str, Array]:
        """Returns the inputs where they lie; BYTES are still packed. Raises `InvalidInput` for bytes that are
        no tensor of that type."""
        if self.encoded:
            if self.keeps or self.cuts:
                raise ProtocolError("images are stored only for models with their own process")
            try:
                return {self.heads[0].name: bind_file(memory, offset)}
            except ValueError as error:
                raise ProtocolError(str(error)) from None
        if self.plain:
            inputs: dict[str, Array] = {}
            for name, shape, dtype, start in self.arrays:
                inputs[name] = np.ndarray(shape, dtype, memory, offset + start)
            return inputs
        return bind_packed(self.heads, memoryview(memory)[offset : offset + self.extent])

    def reads(self, payload: bytes, regions: Mapping[int, OpenRegion]) -> tuple[RegionReads, bytes]:
        """Returns the inputs that are in clients' memory, for the code that makes their batch; and what the
        payload says beyond that. Raises `InvalidInput` for a region that is gone."""
        if self.entry is None or not self.entry.traits.fetches or not self.plain:
            raise ProtocolError("inputs in the memory of clients, which is not read there")
        size = PLACE.size * len(self.heads)
        try:
            return find_regions(payload[:size], self.sizes, regions), payload[size:]
        except (ValueError, struct.error) as error:
            raise ProtocolError(f"inputs in clients' memory: {error}") from None


def read_template(payload: bytes, entry_of: Callable[[int], ModelEntry | None]) -> ServedTemplate:
    """Believes nothing: whatever is wrong with it is a `ProtocolError`."""
    try:
        if len(payload) > MAX_TEMPLATE_BYTES:
            raise ValueError("it is too long")
        document = orjson.loads(payload)
        _check_options(document)
        return ServedTemplate(document, entry_of(document["key"]), payload)
    except (KeyError, TypeError, ValueError, OverflowError, CarpoolError) as error:
        raise ProtocolError(f"a template that cannot be right: {error}") from error


def _check_options(document: Mapping[str, Any]) -> None:
    if type(document["key"]) is not int:
        raise ValueError("key")
    if not all(type(name) is str for name in document["wanted"]):
        raise ValueError("wanted")
    if type(document["encoded"]) is not bool:
        raise ValueError("encoded")


def _read_tensor(listed: Sequence[Any]) -> TensorHead:
    name, datatype, shape, offset, size, framed = listed
    if any(type(number) is not int or number < 0 for number in (*shape, offset, size)):
        raise ValueError(f"shape, offset or size of {name!r}")
    head = TensorHead(name, DATATYPES[datatype], tuple(shape), offset, size, framed=bool(framed))
    if head.datatype is not Datatype.BYTES and size != math.prod(shape) * head.datatype.size:
        raise ValueError(f"size of {name!r}")
    if not framed and head.datatype is Datatype.BYTES and math.prod(shape) != 1:
        raise ValueError(f"shape of {name!r}")
    return head


def _batch_shape(heads: Sequence[TensorHead], signature: Signature) -> Hashable:
    """Returns what must be equal to share a batch; None for a model whose requests are all alike."""
    if not any(spec.optional or -1 in spec.shape for spec in signature.inputs):
        return None
    return tuple(sorted((head.name, head.shape[1:] if signature.max_batch else head.shape) for head in heads))


_UNKNOWN_OUTPUT_BYTES = 4096  # for a first answer whose size is not known

Key: TypeAlias = tuple[int, int, int, bool]
KnownTemplate: TypeAlias = tuple["Template", object, object]
"""With the objects it was found by: while they are kept, their ids are theirs."""


class Template:
    """Describes one family of requests: how many input bytes they have, and where their outputs will lie."""

    __slots__ = ("capacity", "entry", "extent", "number", "outside", "places", "said")

    def __init__(
        self,
        number: int,
        entry: ModelEntry,
        heads: Sequence[TensorHead],
        head: RequestHead,
        outside: Outside,
    ) -> None:
        self.number = number
        self.entry = entry
        self.outside = outside  # what clients of its model wait beyond the engine's account
        self.extent = max((tensor.offset + tensor.size for tensor in heads), default=0)
        wanted = [output.name for output in head.outputs]
        self.places: list[TensorPlace] | None = declared_places(entry.signature, wanted, head.batch)
        self.capacity = _UNKNOWN_OUTPUT_BYTES if self.places is None else end_of(self.places)
        self.said: tuple[RequestHead, Sequence[bytes]] | None = None  # see `DeclaredOutputs`


class DeclaredOutputs(Sequence[Tensor]):
    """Outputs that lie in a slot as their template says. Most answers are their bytes, with the same words
    before them each time: tensors are made of them only for who looks at one, before the slot is released.
    """

    __slots__ = ("_memory", "_start", "_tensors", "template")

    def __init__(self, template: Template, memory: memoryview, start: int) -> None:
        self.template = template
        self._memory = memory
        self._start = start
        self._tensors: list[Tensor] | None = None

    def known(self, head: RequestHead) -> Sequence[bytes] | None:
        """What was said to `head`, this very one, by an answer that else was only the outputs' bytes."""
        said = self.template.said
        return said[1] if said is not None and said[0] is head else None

    def pieces(self) -> list[memoryview]:
        """Returns the bytes of each."""
        memory, start, found = self._memory, self._start, []
        for _, _, _, at, size in self.template.places or ():
            found.append(memory[start + at : start + at + size])
        return found

    def __len__(self) -> int:
        return len(self.template.places or ())

    def __iter__(self) -> Iterator[Tensor]:
        tensors = self._tensors
        if tensors is None:
            tensors = []
            memory, start = self._memory, self._start
            for name, datatype, shape, at, _ in self.template.places or ():
                data = np.ndarray(shape, datatype.dtype, memory, start + at)
                tensors.append(Tensor(name, datatype, shape, data))
            self._tensors = tensors  # when it is whole: threads look at outputs, too
        return iter(tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return [*self][index]


class Templates:
    """Holds the templates that the engine at the other end of one link knows. `send` takes records for it."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._next = 1
        self._by_identity: dict[Key, KnownTemplate] = {}
        self._by_value: dict[object, Template] = {}
        self._outside: dict[int, Outside] = {}  # by the model's key: no more than there are templates

    def find(self, entry: ModelEntry, head: RequestHead) -> Template | None:
        """Finds a template on the hot path: nothing for a head that was not learnt, or with an entry of
        another engine."""
        key = (id(head.inputs), id(head.outputs), entry.key, head.encoded)
        found = self._by_identity.get(key)
        return found[0] if found is not None and found[0].entry is entry else None

    def learn(self, entry: ModelEntry, head: RequestHead) -> Template:
        """Learns a head whose tensors are all in the tail: it is found by its objects from now on."""
        template = self.match(entry, head, head.inputs)
        if len(self._by_identity) >= MAX_TEMPLATES:
            self._by_identity.clear()
        key = (id(head.inputs), id(head.outputs), entry.key, head.encoded)
        self._by_identity[key] = (template, head.inputs, head.outputs)
        return template

    def match(self, entry: ModelEntry, head: RequestHead, heads: Sequence[TensorHead]) -> Template:
        """Returns the template with these values; the engine is notified when there was none."""
        value = (
            entry.key,
            tuple((t.name, t.datatype, t.shape, t.offset, t.size, t.framed) for t in heads),
            tuple(output.name for output in head.outputs),
            head.encoded,
        )
        template = self._by_value.get(value)
        if template is not None and template.entry is entry:
            return template
        if len(self._by_value) >= MAX_TEMPLATES:
            self._by_identity.clear()
            self._by_value.clear()
            self._outside.clear()
            self._send(to_engine(RESET, 0))
        outside = self._outside.setdefault(entry.key, Outside())
        template = Template(self._next, entry, heads, head, outside)
        self._next += 1
        self._by_value[value] = template
        self._send(to_engine(TEMPLATE, template.number, _describe(entry, head, heads)))
        return template


def _describe(entry: ModelEntry, head: RequestHead, heads: Sequence[TensorHead]) -> bytes:
    document = {
        "key": entry.key,
        "inputs": [(t.name, t.datatype.value, t.shape, t.offset, t.size, t.framed) for t in heads],
        "wanted": [output.name for output in head.outputs],
        "encoded": head.encoded,
    }
    return orjson.dumps(document)
