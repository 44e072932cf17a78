"""Represents a model as pictures see it, and the pictures of one call: how they come into its slot, and what
is made of the model's outputs.

Over v2 they are a BYTES tensor in the place of the model's own input, and a client may ask for `answer`, one
JSON document per picture, besides the model's outputs. On a picture route there is one, and its answer is the
document or a drawing. A picture that comes alone may go to the model's device as a file.
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from time import monotonic
from typing import Protocol, TypeVar, cast

import numpy as np
import orjson

from carpool.errors import CarpoolError, InvalidInput, ModelError, Unsupported
from carpool.frontend.pictures.image_tensors import sends_pictures
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.contents import Content, Places
from carpool.link.engine_client import Answer, EngineClient
from carpool.memory.arena import Slot
from carpool.memory.layout import FILE_AT, bind_file, write_file
from carpool.types import (
    Array,
    Datatype,
    RequestedOutput,
    RequestOptions,
    Signature,
    Tensor,
    TensorSpec,
)
from carpool.vision.decode import Decoded
from carpool.vision.geometry import Geometry
from carpool.vision.heads import Buffer, PictureHead, heads_of_request, read_head, sniff
from carpool.vision.picture_answers import Option, Options
from carpool.vision.plans import settings
from carpool.vision.plans.picture_plan import PicturePlan
from carpool.vision.tasks import options_of
from carpool.vision.tasks.written import written, written_as
from carpool.wire.head import DEFAULT_OPTIONS
from carpool.wire.long_json import decode_base64
from carpool.wire.v2 import (
    RequestHead,
    TensorHead,
    bind,
    check_head,
    check_tail,
    parse_head,
    read_header_length,
)

T = TypeVar("T")
MOST_WRITTEN = 1 << 20
"""Characters of one answer."""
ANSWER = "answer"
_IMAGE = "image"  # what every model's picture may be called
ASKED_ON_A_ROUTE = RequestHead("", (), (), DEFAULT_OPTIONS, True, 0)

_SAME_FOR_ALL = 65536
_A_BYTE = 2
_USUAL = 4
"""Weights are pixels: what resizing and the rest take, whatever the size of a picture; how many of them
reading a byte takes; and how many there are for a byte of a usual picture, before its head is known."""

_LONG = 1 << 20  # to look through the head of a longer file could hold up the loop


def weight_of_size(size: int) -> float:
    """Returns how much work there is to decode so many bytes, of which nothing else is known yet."""
    return float(_SAME_FOR_ALL + (_A_BYTE + _USUAL) * size)


def weight_of(data: Buffer, head: PictureHead | None) -> float:
    """Returns how much work there is to decode a picture with this head. Without one it will not be decoded:
    raises `InvalidInput` that says why."""
    if head is None:
        if len(data) > _LONG:
            sniff(data)
            return weight_of_size(len(data))
        head = read_head(data)
    return float(_SAME_FOR_ALL + _A_BYTE * len(data) + head.width * head.height)


class Noted(Protocol):
    """Represents what an extension has noted of a request with pictures."""

    @property
    def decoded(self) -> list[Decoded]:
        """Returns the list to which the pixels are added that are decoded for the model."""


class PlacesPictures(Places, Protocol):
    def place_pictures(self, pictures: SentPictures) -> None: ...


class PictureModel(PicturePlan):
    """Holds a picture's plan, and what goes to the engine for it. Made once per entry."""

    keeps_pixels = False  # of a picture, for what comes after its first step
    patient = False
    """Whether its pictures have more time than the SLO of their version, which only the engine can judge."""
    room_behind = 0  # bytes that a slot must have behind a file that goes to the device

    def __init__(self, entry: ModelEntry) -> None:
        assert entry.vision is not None
        super().__init__(settings.read(entry.vision), entry.name)
        self.entry = entry
        self.options: Mapping[str, Option] = options_of(self.task)
        self.outputs = tuple(RequestedOutput(spec.name, binary=True) for spec in self.settings.outputs)
        self._batched = entry.signature.max_batch > 0
        spec = entry.signature.input_named[self.settings.input.name]
        self._leading = self._batched or len(spec.shape) > len(self.transform.shape)
        self.head = self.head_of(1, self.outputs)  # always this object: by that the link knows it again
        self.file_head = self.file_head_of(self.outputs)  # this one, too

    def head_of(
        self,
        batch: int,
        outputs: Sequence[RequestedOutput],
        options: RequestOptions = DEFAULT_OPTIONS,
        shape: tuple[int, ...] = (),
    ) -> RequestHead:
        """Returns what goes to the engine for so many pictures, whose inputs lie one behind the other.
        `shape` is that of one, where its transform is not the usual one."""
        spec = self.settings.input
        one = shape or self.transform.shape
        size = batch * math.prod(one) * self.transform.dtype.itemsize
        shape = (batch, *one) if self._leading else one
        tensor = TensorHead(spec.name, spec.datatype, shape, 0, size)
        return RequestHead("", (tensor,), outputs, options, True, size, batch)

    def file_head_of(
        self,
        outputs: Sequence[RequestedOutput],
        options: RequestOptions = DEFAULT_OPTIONS,
        size: int = FILE_AT,
        images: int = 1,
    ) -> RequestHead:
        """Returns what goes to the engine for a file that lies in a slot, whatever its length. Its
        `size` distinguishes it from other things that the device makes an input of: see `picture_leases`."""
        tensor = TensorHead(self.settings.input.name, Datatype.UINT8, (size,), 0, size)
        return RequestHead("", (tensor,), outputs, options, True, size, images, encoded=True)

    def is_current(self, _catalog: Catalog) -> bool:
        """Returns whether it can be used as long as its entry stays the same; one that is made of other
        models cannot when one of them was replaced."""
        return True

    def sees_as(self, other: PictureModel) -> bool:
        """Returns whether what was made of a picture for one of them is the other's input, too."""
        mine, its = self.settings, other.settings
        return (mine.image, mine.input, mine.encoded) == (its.image, its.input, its.encoded)

    def document(self, outputs: Sequence[Tensor], number: int, geometry: Geometry, options: Options) -> bytes:
        """Returns the answer to one picture of a batch."""
        answer, entry = self.answers.answer(self.of_one(outputs, number), geometry, options), self.entry
        return orjson.dumps({"model": entry.name, "version": entry.version, **self.assumed, **answer})

    def of_one(self, outputs: Sequence[Tensor], number: int) -> dict[str, Array]:
        """Returns the outputs for one picture of a batch, without the batch."""
        found: dict[str, Array] = {}
        for tensor in outputs:
            found[tensor.name] = tensor.data[number] if self._batched else tensor.data
        return found


class SentPictures(Content):
    """Represents the content of a request. `asked` is what the client says, `head` what goes to the engine
    for it, with `size` bytes.

    `prepare` and `compose` are called in threads, one after the other; the rest in the loop's.
    """

    __slots__ = (
        *("_geometries", "model", "_pictures", "asked", "head", "is_file", "noted", "options"),
        *("size", "weight", "whole"),
    )

    quick = False  # the answer is made in less time than a thread takes to wake up
    composes = True  # something is made of the outputs
    is_pictures = True
    on_route = False  # of a picture route, where it was judged at its head already
    drawn: str | None = None  # the format of a drawing that is wanted instead of JSON

    head: RequestHead
    size: int

    def __init__(
        self,
        model: PictureModel,
        asked: RequestHead,
        pictures: Sequence[Buffer],
        options: Options,
        as_file: Geometry | None,
    ) -> None:
        self.asked = asked
        self.model = model
        self.options = options
        self._pictures = pictures
        self.whole: list[Decoded] = []  # the pixels, where they are needed for longer
        self.noted: Noted | None = None  # by an extension, which also wants the pixels of the first
        self.is_file = as_file is not None  # for the model's device: there is nothing to decode here
        self._geometries = [] if as_file is None else [as_file]
        self.weight = 0.0

    def add(self, answer: Answer) -> str:
        """Returns the text of one piece of an answer."""
        return answer.text

    def conclude(self) -> None:
        """Notes that no other piece of the answer follows."""

    @property
    def geometry(self) -> Geometry:
        """Returns how the first lies in the model's input."""
        return self._geometries[0]

    @property
    def files(self) -> Sequence[Buffer]:
        """Returns the files as they came, for as long as they are needed."""
        return self._pictures

    def for_model(self, model: PictureModel) -> SentPictures:
        """Returns the same pictures for another version of their model; what this one holds is the
        other's."""
        if model is self.model:
            return self
        other = copy(self)
        self.slot = self.held = None
        other.model = model
        other._fit()
        return other

    def _fit(self) -> None:
        """Sets what goes to the engine for this model."""
        raise NotImplementedError

    # ── as a content ──

    def bytes_of(self, _head: RequestHead) -> Sequence[Buffer]:
        """Returns the files; the one of a route may lie in a slot."""
        return self._pictures if self.slot is None else [memoryview(bind_file(self.slot.view, 0).data)]

    def offer(self, call: Places, _head: RequestHead) -> None:
        cast(PlacesPictures, call).place_pictures(self)

    def can_be_again(self, model: PictureModel) -> bool:
        """Returns whether they can be sent once more for this version of their model: as what was made of
        them, or as the files."""
        fits = self.held is not None and self.model.sees_as(model)
        return fits or (bool(self._pictures) and not self.is_file)

    def again(self, model: PictureModel) -> SentPictures:
        """Returns the same for another version of their model, when one is done with them."""
        if not self.model.sees_as(model):
            self.drop()
        other = self.for_model(model)
        other.sent = other.gone = False
        other.offered_as = other.head
        return other

    def slot_of_file(self, engine: EngineClient) -> Slot:
        """Returns a slot with the one file in it, for the model's device; the caller's from here on."""
        if self.slot is not None:
            return self.take()
        slot = engine.slot(self.size)
        write_file(slot.view, self._pictures[0])
        if self.drawn is None and not self.kept:
            self._pictures = ()
        return slot

    # ── in threads ──

    def prepare(self, memory: memoryview) -> float:
        """All of them into the slot, one behind the other; returns the seconds. One that is bad fails all."""
        started = monotonic()
        model, size = self.model, self.model.bytes
        noted = None if self.noted is None else self.noted.decoded
        keep = self.whole if self.model.keeps_pixels else noted
        self._geometries = self._each(
            lambda number, data: model.prepare(data, memory[number * size : (number + 1) * size], keep)
        )
        if not self.kept:
            self._pictures = ()
        return monotonic() - started

    def compose(self, outputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], float]:
        """Returns what is to be answered, and the seconds that took."""
        raise NotImplementedError

    def first_document(self, outputs: Sequence[Tensor]) -> bytes:
        """The answer to the first picture, from what was composed; empty if none was."""
        return b""

    def _each(self, work: Callable[[int, Buffer], T]) -> list[T]:
        """Returns what is made of each picture; what is wrong with one names it."""
        made: list[T] = []
        for number, data in enumerate(self._pictures):
            try:
                made.append(work(number, data))
            except CarpoolError as error:
                if len(self._pictures) > 1:
                    error.message = f"image {number}: {error.message}"
                raise
        return made


class RoutePicture(SentPictures):
    """The one picture of a call on a picture route; `body` is its answer. Of a model that writes, `text` is
    what came so far, and `document` what `body` says."""

    __slots__ = ("_finish", "_seen", "body", "document", "drawn", "quick", "text")

    on_route = True

    def __init__(
        self,
        model: PictureModel,
        data: Buffer,
        options: Options,
        drawn: str | None,
        head: PictureHead | None = None,
        as_file: Geometry | None = None,
    ) -> None:
        """Takes the `head` of its file, if that was read. With `as_file`, it lies in a slot already."""
        if as_file is None and model.encoded:
            as_file = model.seen_as_file(data)
        super().__init__(model, ASKED_ON_A_ROUTE, (data,), options, as_file)
        self._seen = head
        self.drawn = drawn
        self.body = b""
        self.text = self._finish = ""
        self.document: Mapping[str, object] | None = None
        self._fit()
        if as_file is None:
            self.weight = weight_of(data, head)
        else:
            self.size = FILE_AT + len(data) + model.room_behind

    def _fit(self) -> None:
        model = self.model
        self.quick = model.quick and self.drawn is None
        if self.is_file:
            self.head = model.file_head
        else:
            self.head, self.size = model.head, model.bytes
        if self.options.extra and model.entry.traits.decoupled:
            options = {
                name: value
                for name, value in self.options.extra.items()
                if isinstance(value, int | float | str)
            }
            self.head = replace(self.head, options=RequestOptions(custom=options))

    def add(self, answer: Answer) -> str:
        """Returns the text of one piece of what the model writes."""
        text, finish = written({tensor.name: tensor.data for tensor in answer.outputs})
        self._finish = answer.finish or finish or self._finish
        self.text += text
        if len(self.text) > MOST_WRITTEN:
            raise ModelError(f"the model wrote more than {MOST_WRITTEN} characters")
        return text

    def conclude(self) -> None:
        """Nothing more is written."""
        model = self.model
        outputs = written_as(self.text, self._finish)
        answer = model.answers.answer(outputs, self._geometries[0], self.options)
        named = {"model": model.entry.name, "version": model.entry.version, **model.assumed}
        self.document = {**named, **answer}
        self.body = orjson.dumps(self.document)

    def prepare(self, memory: memoryview) -> float:
        started = monotonic()
        noted = None if self.noted is None else self.noted.decoded
        keep = self.whole if self.model.keeps_pixels else noted
        self._geometries = [self.model.prepare(self._pictures[0], memory, keep, self._seen)]
        if self.drawn is None and not self.kept:
            self._pictures = ()
        return monotonic() - started

    def compose(self, outputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], float]:
        started = monotonic()
        if self.drawn is None:
            self.body = self.model.document(outputs, 0, self._geometries[0], self.options)
        else:  # decoded again, in full: to keep the pixels while the model runs could take any memory
            model, data = self.model, self._pictures[0]
            given = model.of_one(outputs, 0), self._geometries[0], self.options
            self.body = model.drawn(data, *given, self.drawn)
        return outputs, monotonic() - started

    def first_document(self, outputs: Sequence[Tensor]) -> bytes:
        return self.body if self.drawn is None else b""


class TensorPictures(SentPictures):
    """Represents the pictures of a v2 request, for a model that they were checked for."""

    __slots__ = ("_shape", "composes")

    def __init__(self, model: PictureModel, asked: RequestHead, tail: Buffer) -> None:
        given = asked.inputs[0]
        pictures = _elements(given, tail)
        heads, _ = heads_of_request(pictures)
        options = model.read_options(_options_of(asked, model))
        as_file = model.seen_as_file(pictures[0]) if len(pictures) == 1 else None
        super().__init__(model, asked, pictures, options, as_file)
        self._shape = given.shape
        own = model.entry.signature.output_named
        self.composes = ANSWER not in own and any(output.name == ANSWER for output in asked.outputs)
        wanted = [output for output in asked.outputs if output.name in own]
        if self.composes:
            known = {output.name for output in wanted}
            wanted += [output for output in model.outputs if output.name not in known]
        if self.is_file:
            self.head = model.file_head_of(wanted, asked.options)
            self.size = FILE_AT + len(pictures[0]) + model.room_behind
        else:
            self.head = model.head_of(len(pictures), wanted, asked.options)
            self.size = self.head.tail_size
            self.weight = sum(self._each(lambda number, data: weight_of(data, heads[number])))

    def _fit(self) -> None:
        model, head = self.model, self.head
        if self.is_file:
            self.head = model.file_head_of(head.outputs, head.options)
        else:
            self.head = model.head_of(head.batch, head.outputs, head.options)
            self.size = self.head.tail_size

    def compose(self, outputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], float]:
        started = monotonic()
        answers: Array = np.empty(len(self._geometries), object)
        for number in range(len(answers)):
            given = number, self._geometries[number], self.options
            answers[number] = self.model.document(outputs, *given)
        named = Tensor(ANSWER, Datatype.BYTES, self._shape, answers.reshape(self._shape))
        return [*outputs, named], monotonic() - started

    def first_document(self, outputs: Sequence[Tensor]) -> bytes:
        found = outputs[-1].data.reshape(-1)[0] if self.composes else b""
        return found if isinstance(found, bytes) else b""


# ── pictures in v2 requests ──


def check_pictures(entry: ModelEntry, head: RequestHead) -> RequestHead:
    """Does the same as `check_head`, for the model that takes [batch] or [batch, 1] pictures and also gives
    `answer`."""
    assert entry.vision is not None
    signature = entry.signature
    given = head.inputs[0]
    name = _IMAGE if given.name == _IMAGE else str(entry.vision["input"]["name"])
    shape = () if signature.max_batch and len(given.shape) == 1 else (1,)
    outputs = signature.outputs
    if ANSWER not in signature.output_named:
        outputs = (*outputs, TensorSpec(ANSWER, Datatype.BYTES, shape))
    spec = TensorSpec(name, Datatype.BYTES, shape)
    seen = Signature(signature.model, (spec,), outputs, signature.max_batch, classes=signature.classes)
    if given.shared_memory is not None:
        raise Unsupported(f"input '{given.name}': images come with the request, not in shared memory")
    wanted = head.outputs or [RequestedOutput(spec.name, head.binary_output) for spec in signature.outputs]
    whole = replace(head, outputs=wanted)  # without any it would ask for `answer`, too
    check_head(whole, seen)
    head.batch = whole.batch
    return head


def read_tensor_pictures(
    body: bytes | bytearray, header_length: int | None, model: PictureModel
) -> TensorPictures | None:
    """Returns the pictures in the body of a v2 request; None if it has none. Safe in any thread."""
    view = memoryview(body)
    end = len(view) if header_length is None else header_length
    read_header_length(str(end), len(view))
    head = parse_head(view[:end], model.entry.name)
    if not sends_pictures(model.entry, head):
        return None
    check_pictures(model.entry, head)
    check_tail(head, len(view) - end, model.entry.name)
    return TensorPictures(model, head, view[end:])


def _elements(given: TensorHead, tail: Buffer) -> list[bytes]:
    """Binary as it is; JSON can only carry text, so there it is base64."""
    elements: list[bytes] = bind([given], tail)[0].data.reshape(-1).tolist()
    if not elements:
        raise InvalidInput(f"input '{given.name}' holds no image", field=f"input '{given.name}'.shape")
    if given.data is None:
        return elements
    where = f"input '{given.name}'.data"
    return [from_base64(element.decode(), where) for element in elements]


def _options_of(asked: RequestHead, model: PictureModel) -> dict[str, str]:
    """Those of the request's parameters that mean something to the task; others are for the model."""
    custom = asked.options.custom
    return {name: _text(custom[name]) for name in model.options if name in custom and name != "overlay"}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_LONG_TEXT = 64 * 1024  # which is decoded in slices


def from_base64(text: str, where: str) -> bytes:
    """Returns a picture as text, with or without the head of a data: URL. `where` names the field in the
    error."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidInput(f"{where} is a data: URL that is not in base64", field=where)
    try:
        if len(text) > _LONG_TEXT:
            return decode_base64(text)
        data = text.encode("ascii").translate(None, b"\r\n \t")  # some encoders break their lines
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # of strings that are not ASCII, too
        raise InvalidInput(f"{where} is not valid base64", field=where) from None
