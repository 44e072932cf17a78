"""Scores how unusual an image is, and where: one score, and a map of it over the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from carpool.config.model import AnomalySettings, Task
from carpool.errors import ModelError
from carpool.types import Array
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import OVERLAY, Anomalies, Anomaly, Option, Options
from carpool.vision.tasks.depth import read_map, written_range
from carpool.vision.tasks.task import SCORE_DIGITS, VisionTask, read, read_floats, size
from carpool.vision.vision_settings import VisionSettings

_INSIDE = 0.5  # of a mask of 0 and 1 that is laid over the image


class FindAnomaly(VisionTask):
    name = Task.ANOMALY
    route, summary = Task.ANOMALY.route, "Score how unusual an image is, and where"
    form, title = Anomalies, "A score of the image, and where it comes from"
    example: ClassVar[Mapping[str, Any]] = {
        "anomaly": {
            "score": 0.83,
            "anomalous": True,
            "map": {"low": 0.1, "high": 0.97, "png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAAAAABi"},
        }
    }
    options: ClassVar[Mapping[str, Option]] = {"overlay": OVERLAY}
    table = AnomalySettings
    needs = "outputs called pred_score and anomaly_map, as anomalib's are"

    def __init__(self, settings: VisionSettings) -> None:
        assert isinstance(settings.table, AnomalySettings)
        self._threshold = settings.table.threshold
        self._outputs = {spec.name: spec for spec in settings.outputs}

    def answer(self, outputs: Mapping[str, Array], geometry: Geometry, options: Options) -> dict[str, Any]:
        from carpool.vision.mask_regions import png_text, whole_picture

        score = self._number(outputs, "pred_score")
        if not np.isfinite(score):
            raise ModelError("the model returned a score that is not finite")
        label = self._number(outputs, "pred_label") if "pred_label" in self._outputs else None
        values, low, high = read_map(outputs, self._outputs["anomaly_map"], geometry)
        anomaly = Anomaly(
            score=round(score, SCORE_DIGITS),
            anomalous=score >= self._threshold if label is None else label > 0,
            map=written_range(values, low, high),
        )
        if "pred_mask" in self._outputs:
            mask = np.squeeze(read(outputs, self._outputs["pred_mask"])).astype(np.float32)
            if mask.ndim != 2:
                raise ModelError(f'the output "pred_mask" is no mask in its shape {list(mask.shape)}')
            anomaly["mask"] = png_text(whole_picture(mask, geometry, 0.0) >= _INSIDE)
        return dict(Anomalies(image=size(geometry), anomaly=anomaly))

    def draw(
        self, pixels: Array, outputs: Mapping[str, Array], geometry: Geometry, options: Options
    ) -> Array:
        from carpool.vision import draw  # brings OpenCV along, which the engine never needs

        values, low, high = read_map(outputs, self._outputs["anomaly_map"], geometry)
        return draw.heat(pixels, (values - low) / (high - low or 1.0))

    def _number(self, outputs: Mapping[str, Array], name: str) -> float:
        spec = self._outputs[name]
        found = read(outputs, spec) if spec.datatype.dtype.kind in "biu" else read_floats(outputs, spec)
        if found.size != 1:
            raise ModelError(f'the output "{name}" has {found.size} numbers instead of one')
        return float(found.reshape(-1)[0])
