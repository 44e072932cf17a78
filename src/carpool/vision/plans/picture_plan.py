"""Describes what happens to a picture before and after a model, as one object without sockets, slots or
threads.

geometry = plan.prepare(jpeg, memory)                 # `plan.bytes` of them; any thread
…                                                     # the model runs
answer = plan.answer(outputs, geometry, Options())
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carpool.types import Array
from carpool.vision import draw, tasks
from carpool.vision.decode import Decoded, decode, plain_size
from carpool.vision.geometry import Geometry
from carpool.vision.heads import Buffer, PictureHead
from carpool.vision.picture_answers import DEFAULT, Options
from carpool.vision.transforms import Transform
from carpool.vision.vision_settings import VisionSettings

_FEW_NUMBERS = 2048  # of all outputs: to answer with so many takes less time than to wake a thread


class PicturePlan:
    """Holds what is done with the pictures of one model, called `name` in errors. Holds nothing of any
    request: one object serves every thread."""

    def __init__(self, settings: VisionSettings, name: str) -> None:
        self.settings = settings
        self.task = settings.task
        self.answers = tasks.build(settings)
        self.transform = Transform(settings.image, settings.input, name)
        self.bytes = math.prod(self.transform.shape) * self.transform.dtype.itemsize
        self.encoded = settings.encoded
        self.assumed: dict[str, list[str]] = {}  # a part of every answer
        self.assumes(settings.assumed)
        numbers = [math.prod(spec.shape) for spec in settings.outputs]
        self.quick = self.answers.quick and min(numbers) >= 0 and sum(numbers) <= _FEW_NUMBERS
        """Whether an answer need not be made in a thread."""

    def assumes(self, names: Sequence[str]) -> None:
        """Notes the settings that nothing says."""
        self.assumed = {"assumed": list(names)} if names else {}

    def read_options(self, given: Mapping[str, object]) -> Options:
        """By name, as a query has them or as plain values."""
        return tasks.read_options({name: str(value) for name, value in given.items()}, self.task)

    def seen_as_file(self, data: Buffer) -> Geometry | None:
        """Returns how the model's device will see this picture, if it can be sent there as it is."""
        size = plain_size(data) if self.encoded else None
        return None if size is None else self.transform.geometry(*size)

    def prepare(
        self,
        data: Buffer,
        memory: memoryview | bytearray,
        keep: list[Decoded] | None = None,
        head: PictureHead | None = None,
    ) -> Geometry:
        """Decode a picture, no larger than the input needs, and write it as the model's input. A bad picture
        raises. The first that is decoded is also put into `keep`. `head` is its own, where that is known."""
        transform = self.transform
        decoded = decode(data, reduction=transform.reduction, head=head)
        if keep is not None and not keep:
            keep.append(decoded)
        into: Array = np.ndarray(transform.shape, transform.dtype, memory)
        return transform.prepare(decoded, into)

    def answer(
        self, outputs: Mapping[str, Array], geometry: Geometry, options: Options = DEFAULT
    ) -> dict[str, Any]:
        """Returns the answer from the model's outputs for this picture, without the batch dimension."""
        return self.answers.answer(outputs, geometry, options)

    def drawn(
        self,
        data: Buffer,
        outputs: Mapping[str, Array],
        geometry: Geometry,
        options: Options = DEFAULT,
        format: str = "jpeg",  # noqa: A002
    ) -> bytes:
        """Returns the picture's file with the answer drawn in, in one of draw.FORMATS."""
        return draw.encode(self.answers.draw(decode(data).pixels, outputs, geometry, options), format)
