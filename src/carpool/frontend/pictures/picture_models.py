"""A model as pictures see it: how they become its input, and what its outputs mean. Made once per entry."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.errors import InvalidInput
from carpool.link.door import Catalog, ModelEntry
from carpool.memory.layout import FILE_AT
from carpool.types import Array, Datatype, RequestedOutput, RequestOptions, Tensor
from carpool.vision import settings
from carpool.vision.picture_plan import PicturePlan
from carpool.wire.v2 import RequestHead, TensorHead

NO_OPTIONS = RequestOptions()


class PictureModel(PicturePlan):
    """A picture's plan, and what goes through the door for it."""

    def __init__(self, entry: ModelEntry) -> None:
        assert entry.vision is not None
        super().__init__(settings.read(entry.vision), entry.name)
        self.entry = entry
        self.outputs = tuple(RequestedOutput(spec.name, binary=True) for spec in self.settings.outputs)
        self._batched = entry.signature.max_batch > 0
        spec = entry.signature.input_named[self.settings.input.name]
        self._leading = self._batched or len(spec.shape) > len(self.transform.shape)
        self.head = self.head_of(1, self.outputs)  # always this object: by that the link knows it again
        self.file_head = self.file_head_of(self.outputs)  # this one, too

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
            why = f"; for pictures: {entry.ask}" if entry.ask else ""
            raise InvalidInput(
                f"model '{entry.name}' takes tensors, not pictures: use /v2/models/{entry.name}/infer{why}",
                reason="no-task",
                field="model",
            )
        return PictureModel(entry)


def task_of(entry: ModelEntry) -> str | None:
    return None if entry.vision is None else str(entry.vision["task"])
