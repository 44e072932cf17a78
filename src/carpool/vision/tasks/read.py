"""Reads the text of a row of character values, from left to right over a picture of one line (CTC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import DYNAMIC, ReadSettings, Task
from carpool.errors import ConfigError, ModelError
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import MOST_TOKENS, OVERLAY, Option, Options, ReadText
from carpool.vision.tasks.task import SCORE_DIGITS, VisionTask, read_floats, size
from carpool.vision.vision_settings import VisionSettings

MOST_VALUES = 1 << 26  # of one line: a thousand steps, each with all of Unicode's planes in use


class Read(VisionTask):
    name = Task.READ
    route, summary = Task.READ.route, "Read the text in an image"
    form, title = ReadText, "Text of a line or a page"
    example: ClassVar[Mapping[str, Any]] = {"text": "Invoice 2041", "score": 0.987104}
    options: ClassVar[Mapping[str, Option]] = {"overlay": OVERLAY, "max_tokens": MOST_TOKENS}
    table = ReadSettings
    needs = "an output [steps, characters] of floats"

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, ReadSettings)
        self._output = settings.outputs[0]
        self._softmax = settings.table.activation == "softmax"
        self._characters = characters_of(settings)
        classes = self._output.shape[-1] if self._output.shape else DYNAMIC
        if classes not in (DYNAMIC, len(self._characters)):
            raise ConfigError(
                f'task = "read": the output "{self._output.name}" has {classes} values for each step, and '
                f"{len(self._characters)} characters are known, with the blank: give labels, a character a "
                "line, or alphabet in [read]"
            )
        self._blank = 0 if settings.table.blank == "first" else len(self._characters) - 1

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        text, score = self._read(outputs)
        return dict(ReadText(image=size(geometry), text=text, score=score))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        text, score = self._read(outputs)
        box = [0.0, 0.0, float(geometry.width), float(geometry.height)]
        corners = [[0.0, 0.0], [box[2], 0.0], [box[2], box[3]], [0.0, box[3]]]
        line = {"text": text, "score": score, "polygon": corners, "box": box}
        return draw.text(pixels, [line], (geometry.width, geometry.height))

    def _read(self, outputs: Mapping[str, Array]) -> tuple[str, float]:
        """Takes of each step the likeliest; of equal ones in a row the first; without the blank."""
        values = read_floats(outputs, self._output)
        if values.ndim != 2 or values.shape[1] != len(self._characters) or values.size > MOST_VALUES:
            raise ModelError(
                f'the output "{self._output.name}" is {list(values.shape)}, and with the blank '
                f"{len(self._characters)} characters are known"
            )
        if not len(values):
            return "", 0.0
        if not np.isfinite(values).all():
            values = np.nan_to_num(values, nan=-1e30, posinf=1e30, neginf=-1e30)
        best = values.argmax(axis=1)
        kept = best != self._blank
        kept[1:] &= best[1:] != best[:-1]
        chosen = best[kept]
        if not len(chosen):
            return "", 0.0
        most = values[kept, chosen].astype(np.float64)
        if self._softmax:
            most = 1.0 / np.exp(values[kept].astype(np.float64) - most[:, None]).sum(axis=1)
        score = float(np.clip(most, 0.0, 1.0).mean())
        text = " ".join("".join(self._characters[number] for number in chosen.tolist()).split())
        return text, round(score, SCORE_DIGITS)


def characters_of(settings: VisionSettings) -> tuple[str, ...]:
    """Returns those of each class; the blank's is never used. As many classes as characters: one of them is
    the blank. One more: the blank is beside them. Two more: so is the space, at the end, as PP-OCR has it."""
    assert isinstance(settings.table, ReadSettings)
    known = tuple(settings.table.alphabet) if settings.table.alphabet else settings.labels
    classes = settings.outputs[0].shape[-1]
    left = classes - len(known)
    first = settings.table.blank == "first"
    if left == 2:
        known = (*known, " ")
    if left in (1, 2):
        return ("", *known) if first else (*known, "")
    return known
