"""A model as pictures see it: how they become its input, and what its outputs mean. Made once per entry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from carpool.config.model import Task
from carpool.errors import InvalidInput
from carpool.link.door import Catalog, ModelEntry
from carpool.memory.layout import FILE_AT
from carpool.types import Array, Datatype, RequestedOutput, RequestOptions, Tensor
from carpool.vision import settings, tasks
from carpool.vision.decode import decode
from carpool.vision.formats import Buffer
from carpool.vision.geometry import Geometry
from carpool.vision.plain_jpeg import plain_size
from carpool.vision.transforms import Transform
from carpool.wire.v2 import RequestHead, TensorHead

NO_OPTIONS = RequestOptions()
_MOST_SIZES = 1024  # whose geometries are kept
_FEW_NUMBERS = (
    2048  # of all outputs: an answer is made of so many in less time than a thread takes to wake up
)


_QUICK_TASKS = (Task.CLASSIFY, Task.DETECT, Task.EMBED)


class PictureModel:
    """Holds nothing of any request: one object serves every thread."""

    def __init__(self, entry: ModelEntry) -> None:
        assert entry.vision is not None
        self.entry = entry
        self.settings = settings.read(entry.vision)
        self.task: Task = self.settings.task
        self.answers = tasks.build(self.settings)
        self.transform = Transform(self.settings.image, self.settings.input, entry.name)
        self.bytes = math.prod(self.transform.shape) * self.transform.dtype.itemsize
        self.outputs = tuple(RequestedOutput(spec.name, binary=True) for spec in self.settings.outputs)
        self._batched = entry.signature.max_batch > 0
        spec = entry.signature.input_named[self.settings.input.name]
        self._leading = self._batched or len(spec.shape) > len(self.transform.shape)
        self.head = self.head_of(1, self.outputs)  # always this object: by that the link knows it again
        self.encoded = self.settings.encoded
        self.file_head = self.file_head_of(self.outputs)  # this one, too
        self.quick = self._is_quick()
        self._geometries: dict[tuple[int, int], Geometry] = {}

    def _is_quick(self) -> bool:
        """Whether an answer need not be made in a thread."""
        numbers = [math.prod(spec.shape) for spec in self.settings.outputs]
        return self.task in _QUICK_TASKS and min(numbers) >= 0 and sum(numbers) <= _FEW_NUMBERS

    def head_of(
        self, batch: int, outputs: Sequence[RequestedOutput], options: RequestOptions = NO_OPTIONS
    ) -> RequestHead:
        """What goes through the door for so many pictures, whose inputs lie one behind the other."""
        spec = self.settings.input
        shape = (batch, *self.transform.shape) if self._leading else self.transform.shape
        size = batch * self.bytes
        tensor = TensorHead(spec.name, spec.datatype, shape, 0, size)
        return RequestHead("", (tensor,), outputs, options, True, size, batch)

    def file_head_of(
        self, outputs: Sequence[RequestedOutput], options: RequestOptions = NO_OPTIONS
    ) -> RequestHead:
        """What goes through the door for a file that lies in a slot, whatever its length."""
        tensor = TensorHead(self.settings.input.name, Datatype.UINT8, (FILE_AT,), 0, FILE_AT)
        return RequestHead("", (tensor,), outputs, options, True, FILE_AT, 1, encoded=True)

    def seen_as_file(self, data: Buffer) -> Geometry | None:
        """How the model's device will see this picture, if it can be sent there as it is."""
        size = plain_size(data) if self.encoded else None
        if size is None:
            return None
        found = self._geometries.get(size)
        if found is None:
            if len(self._geometries) >= _MOST_SIZES:
                self._geometries.clear()
            found = self._geometries[size] = self.transform.geometry(*size)
        return found

    def prepare(self, data: Buffer, memory: memoryview) -> Geometry:
        """Decode a picture, and write it as the model's input. In a thread; a bad picture raises."""
        transform = self.transform
        decoded = decode(data, reduction=transform.reduction)
        into: Array = np.ndarray(transform.shape, transform.dtype, memory)
        return transform.prepare(decoded, into)

    def of_one(self, outputs: Sequence[Tensor], number: int) -> dict[str, Array]:
        """The outputs for one picture of a batch, without the batch."""
        return {tensor.name: tensor.data[number] if self._batched else tensor.data for tensor in outputs}


class PictureModels:
    """Those of the catalogue, each made when it first appears."""

    def __init__(self) -> None:
        self._made: dict[int, PictureModel] = {}  # by the entry's key

    def renew(self, catalog: Catalog) -> None:
        """Make what is new and forget what is gone."""
        entries = (*catalog.entries.values(), *catalog.leaving)
        self._made = {entry.key: self.find(entry) for entry in entries if entry.vision is not None}

    def find(self, entry: ModelEntry) -> PictureModel:
        made = self._made.get(entry.key)
        if made is not None and made.entry is entry:
            return made
        if entry.vision is None:
            raise InvalidInput(
                f"model '{entry.name}' takes tensors, not pictures: use /v2/models/{entry.name}/infer",
                reason="no-task",
                field="model",
            )
        return PictureModel(entry)


def task_of(entry: ModelEntry) -> Task | None:
    return None if entry.vision is None else Task(entry.vision["task"])
