"""Pictures inside a v2 request: a BYTES tensor that becomes the model's own input, a batch in one slot.

Besides the model's outputs such a request may ask for `answer`, one JSON document per picture. A picture that
comes alone may go to the model's device as a file; several are decoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TypeVar

import numpy as np

from carpool.errors import CarpoolError, InvalidInput, Unsupported
from carpool.frontend.pictures.picture import document
from carpool.frontend.pictures.picture_decoding import weight_of
from carpool.frontend.pictures.picture_models import PictureModel
from carpool.frontend.pictures.picture_text import from_base64
from carpool.link.door import ModelEntry
from carpool.memory.slot_files import FILE_AT, write_file
from carpool.types import Array, Datatype, RequestedOutput, Signature, Tensor, TensorSpec
from carpool.vision.geometry import Geometry
from carpool.vision.heads import pixels_of_request
from carpool.vision.tasks import options_of, read_options
from carpool.wire.v2 import Buffer, RequestHead, TensorHead, bind, check_head

T = TypeVar("T")
ANSWER = "answer"
_IMAGE = "image"  # what every model's picture may be called
_MARK = b'"BYTES"'


def may_hold_pictures(json: bytes | bytearray) -> bool:
    """A quick look at a head that is not read yet."""
    return _MARK in json


def sends_pictures(entry: ModelEntry, head: RequestHead) -> bool:
    return entry.vision is not None and any(tensor.datatype is Datatype.BYTES for tensor in head.inputs)


def check_pictures(entry: ModelEntry, head: RequestHead) -> RequestHead:
    """As `check_head`, for the model that takes [batch] or [batch, 1] pictures and also gives `answer`."""
    assert entry.vision is not None
    signature = entry.signature
    given = head.inputs[0]
    name = _IMAGE if given.name == _IMAGE else str(entry.vision["input"][0])
    shape = () if signature.max_batch and len(given.shape) == 1 else (1,)
    outputs = signature.outputs
    if ANSWER not in signature.output_named:
        outputs = (*outputs, TensorSpec(ANSWER, Datatype.BYTES, shape))
    spec = TensorSpec(name, Datatype.BYTES, shape)
    seen = Signature(signature.model, (spec,), outputs, signature.max_batch)
    if given.shared_memory is not None:
        raise Unsupported(f"input '{given.name}': pictures come with the request, not in shared memory")
    wanted = head.outputs or [RequestedOutput(spec.name, head.binary_output) for spec in signature.outputs]
    whole = replace(head, outputs=wanted)  # without any it would ask for `answer`, too
    check_head(whole, seen)
    head.batch = whole.batch
    return head


class PictureBatch:
    """The pictures of one request, for a model that they were checked for."""

    def __init__(self, model: PictureModel, asked: RequestHead, tail: Buffer) -> None:
        self.asked = asked
        self._model = model
        self._given = asked.inputs[0]
        self._pictures: Sequence[bytes] = _elements(self._given, tail)
        pixels_of_request(self._pictures)
        self._geometries: list[Geometry] = []
        own = model.entry.signature.output_named
        self.wants_answer = ANSWER not in own and any(output.name == ANSWER for output in asked.outputs)
        self._options = read_options(_options_of(asked, model), model.task)
        wanted = [output for output in asked.outputs if output.name in own]
        if self.wants_answer:
            known = {output.name for output in wanted}
            wanted += [output for output in model.outputs if output.name not in known]
        self._as_file = model.seen_as_file(self._pictures[0]) if len(self._pictures) == 1 else None
        if self._as_file is None:
            self.head = model.head_of(len(self._pictures), wanted, asked.options)
            self.size = self.head.tail_size
            self.weight = sum(self._each(lambda _number, data: weight_of(data)))
        else:
            self.head = model.file_head_of(wanted, asked.options)
            self.size = FILE_AT + len(self._pictures[0])

    @property
    def is_file(self) -> bool:
        """Whether it goes to the model's device as it is: there is nothing to decode."""
        return self._as_file is not None

    def put_file(self, memory: memoryview) -> None:
        """It goes into the slot as it is."""
        assert self._as_file is not None
        write_file(memory, self._pictures[0])
        self._geometries.append(self._as_file)
        self._pictures = ()

    def prepare(self, memory: memoryview) -> float:
        """In a thread: all of them into the slot; returns the seconds. One that is bad fails the request."""
        started = monotonic()
        self._decode(memory)
        self._pictures = ()
        return monotonic() - started

    def _decode(self, memory: memoryview) -> None:
        size = self._model.bytes

        def prepare(number: int, data: bytes) -> Geometry:
            return self._model.prepare(data, memory[number * size : (number + 1) * size])

        self._geometries += self._each(prepare)

    def _each(self, work: Callable[[int, bytes], T]) -> list[T]:
        """What is made of each picture; what is wrong with one names it."""
        made: list[T] = []
        for number, data in enumerate(self._pictures):
            try:
                made.append(work(number, data))
            except CarpoolError as error:
                if len(self._pictures) > 1:
                    error.message = f"picture {number}: {error.message}"
                raise
        return made

    def with_answers(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """In a thread: the outputs, and what they mean for each picture."""
        model, shape = self._model, self._given.shape
        answers: Array = np.empty(len(self._geometries), object)
        for number, geometry in enumerate(self._geometries):
            answers[number] = document(model, outputs, number, geometry, self._options)
        return [*outputs, Tensor(ANSWER, Datatype.BYTES, shape, answers.reshape(shape))]


def _elements(given: TensorHead, tail: Buffer) -> list[bytes]:
    """Binary as it is; JSON can only carry text, so there it is base64."""
    elements: list[bytes] = bind([given], tail)[0].data.reshape(-1).tolist()
    if not elements:
        raise InvalidInput(f"input '{given.name}' holds no picture", field=f"input '{given.name}'.shape")
    if given.data is None:
        return elements
    where = f"input '{given.name}'.data"
    return [from_base64(element.decode(), where) for element in elements]


def _options_of(asked: RequestHead, model: PictureModel) -> dict[str, str]:
    """Those of the request's parameters that mean something to the task; others are for the model."""
    custom = asked.options.custom
    return {
        name: _text(custom[name]) for name in options_of(model.task) if name in custom and name != "overlay"
    }


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
