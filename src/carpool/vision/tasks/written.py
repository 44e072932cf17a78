"""Passes on text that a model writes itself, piece by piece, about a picture: a caption, or what a line
says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import Task
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import MOST_TOKENS, CaptionText, Option, Options, ReadText
from carpool.vision.recognition import WRITTEN, WRITTEN_END
from carpool.vision.tasks.task import VisionTask, size
from carpool.vision.vision_settings import VisionSettings

TEXT_TASKS = (Task.READ, Task.CAPTION)
"""Their answers are text, which a model may write piece by piece."""


def written(outputs: Mapping[str, Array]) -> tuple[str, str]:
    """The text in the outputs of one answer, and why it ends there: empty where it goes on."""
    return _text(outputs.get(WRITTEN)), _text(outputs.get(WRITTEN_END))


def written_as(text: str, finish: str) -> dict[str, Array]:
    """Returns the same as outputs, of a text that is complete."""
    said = {WRITTEN: text, WRITTEN_END: finish}
    return {name: np.array([value.encode()], object) for name, value in said.items()}


def _text(output: Array | None) -> str:
    """Whatever a model calls text: what is no UTF-8 is shown as such."""
    if output is None or not output.size:
        return ""
    said = output.reshape(-1)[0]
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)


class Caption(VisionTask):
    name = Task.CAPTION
    route, summary = Task.CAPTION.route, "Describe an image"
    form, title = CaptionText, "Text that a model writes about an image"
    example: ClassVar[Mapping[str, Any]] = {"text": "a dog on a beach", "finish_reason": "stop"}
    options: ClassVar[Mapping[str, Option]] = {"max_tokens": MOST_TOKENS}
    needs = f"an output {WRITTEN} of BYTES"

    def __init__(self, _settings: VisionSettings) -> None:
        pass

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        text, finish = written(outputs)
        return dict(CaptionText(image=size(geometry), text=text, finish_reason=finish or "stop"))


class WrittenLine(VisionTask):
    """Implements `read` for a model that generates text: its answers have no score."""

    name = Task.READ

    def __init__(self, _settings: VisionSettings) -> None:
        pass

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        text, finish = written(outputs)
        return dict(ReadText(image=size(geometry), text=text, finish_reason=finish or "stop"))
