"""Finder and reader asked by hand: onnxruntime and the plan of each model, without any server."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from carpool.config.repository import find_models
from carpool.demo import bundled_models
from carpool.engine.loading.trial import examine, trial_shape
from carpool.types import Array
from carpool.vision.decode import Decoded
from carpool.vision.picture_answers import DEFAULT, Options
from carpool.vision.plans.picture_plan import PicturePlan
from carpool.vision.plans.settings import describe
from carpool.vision.rectify import rectify
from carpool.vision.text_lines import as_lines
from carpool.vision.transforms import Transform

CROP = tomllib.loads((bundled_models().parent / "ocr/ocr/pipeline.toml").read_text())["step"][1]["crop"]
WIDTHS, STRETCH = tuple(CROP["widths"]), CROP["stretch"]
_FILE = Path(__file__).parents[2] / "tools" / "render_lines.py"
_spec = spec_from_file_location("render_lines", _FILE)
assert _spec is not None
assert _spec.loader is not None
render = sys.modules["render_lines"] = module_from_spec(_spec)
_spec.loader.exec_module(render)


class ByHand:
    """One model, from its folder or its file, understood as a server would."""

    def __init__(self, path: Path) -> None:
        [source] = find_models([path])[0]
        version = source.versions[0]
        found = examine(source.config, version)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(version.file), options, providers=["CPUExecutionProvider"]
        )
        self._input = self._session.get_inputs()[0].name
        shape, seen = trial_shape(found), found.seen
        if shape is not None:
            noise = np.random.default_rng(1).random(shape, np.float32)
            seen = seen._replace(samples=self.run(noise))
        vision = describe(found.config, found.signature, found.labels, seen).vision
        assert vision is not None
        self.plan = PicturePlan(vision, source.config.name)
        self._transforms: dict[tuple[int, int] | None, Transform] = {None: self.plan.transform}

    def run(self, tensor: Array) -> dict[str, Array]:
        names = [output.name for output in self._session.get_outputs()]
        return {
            name: array[0]
            for name, array in zip(names, self._session.run(names, {self._input: tensor[None]}), strict=True)
        }

    def ask(
        self, pixels: Array, size: tuple[int, int] | None = None, options: Options = DEFAULT
    ) -> dict[str, Any]:
        """`size`: another than the model's own, height and width."""
        if size not in self._transforms:
            settings = self.plan.settings
            self._transforms[size] = Transform(replace(settings.image, size=size), settings.input, "m")
        transform = self._transforms[size]
        tensor: Array = np.empty(transform.shape, transform.dtype)
        height, width = pixels.shape[:2]
        geometry = transform.prepare(Decoded(pixels, width, height), tensor)
        return self.plan.answer(self.run(tensor), geometry, options)

    def read(self, line: Array, widths: Sequence[int] = WIDTHS) -> dict[str, Any]:
        """A picture of one line, in the smallest width that holds it."""
        height = (self.plan.settings.image.size or (0, 0))[0]
        wide = round(line.shape[1] * height / line.shape[0])
        return self.ask(line, (height, bucket(wide, widths)))


def read_page(
    finder: ByHand,
    reader: ByHand,
    pixels: Array,
    widths: Sequence[int] = WIDTHS,
    stretch: float = STRETCH,
) -> dict[str, Any]:
    height = (reader.plan.settings.image.size or (0, 0))[0]
    regions = finder.ask(pixels)["regions"]
    lines = [rectify(pixels, region["polygon"], height, widths[-1], stretch) for region in regions]
    read = [reader.ask(line, (height, bucket(line.shape[1], widths))) for line in lines]
    return as_lines(regions, read)


def bucket(width: int, widths: Sequence[int]) -> int:
    """The smallest that holds it; else the largest."""
    return next((one for one in widths if width <= one), widths[-1])


def unspaced(text: str) -> str:
    return "".join(text.split())
