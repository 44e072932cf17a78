"""Runs in the environment with sahi: its own sliced prediction of the demo's detector, question by question.

python sahi_sliced.py MODEL.onnx [--provider NAME] [--threads N]; a question is a line of JSON on standard
input, as is its answer: {"images": [paths], …} predicts them with these arguments of get_sliced_prediction,
{"boxes": [[x1, y1, x2, y2, score, class], …], "type": …} merges boxes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import cv2
import numpy as np
import onnxruntime
from sahi.models.base import DetectionModel
from sahi.postprocess.backends import set_postprocess_backend
from sahi.predict import POSTPROCESS_NAME_TO_CLASS, get_sliced_prediction
from sahi.prediction import ObjectPrediction

SIDE, PAD = 416, 114
MEAN, STD = (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)
SCORE, IOU = 0.4, 0.6
_SEEN_BY_BILINEAR = 2


class NanoDet(DetectionModel):
    """The detector, with the preprocessing and the suppression of its own model.toml, written for itself."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        super().__init__(model=session, device="cpu", confidence_threshold=SCORE)

    def check_dependencies(self, packages: list[str] | None = None) -> None:
        """Needs none."""

    def set_device(self, device: str | None = None) -> None:
        self.device = device

    def set_model(self, model: Any, **_: Any) -> None:
        self.model = model

    def perform_inference(self, image: np.ndarray) -> None:
        self._original_predictions = self._outputs([image])

    def perform_batch_inference(self, images: list[np.ndarray]) -> None:
        self._original_predictions = self._outputs(images)

    def _outputs(self, images: list[np.ndarray]) -> list[Any]:
        laid = [_laid_in(image) for image in images]
        boxes, scores = self._session.run(
            ["boxes", "scores"], {self._session.get_inputs()[0].name: np.stack([one for one, _ in laid])}
        )
        return [
            (boxes[n], scores[n], scale, image.shape)
            for n, ((_, scale), image) in enumerate(zip(laid, images, strict=True))
        ]

    def _create_object_prediction_list_from_original_predictions(
        self, shift_amount_list: Any = ((0, 0),), full_shape_list: Any = None
    ) -> None:
        given = shift_amount_list if isinstance(shift_amount_list[0], (list, tuple)) else [shift_amount_list]
        shapes = full_shape_list if full_shape_list and isinstance(full_shape_list[0], list) else None
        self._object_prediction_list_per_image = [
            [
                ObjectPrediction(
                    bbox=box,
                    category_id=number,
                    category_name=str(number),
                    score=score,
                    shift_amount=list(given[n]),
                    full_shape=shapes[n] if shapes else full_shape_list,
                )
                for box, score, number in _chosen(*one)
            ]
            for n, one in enumerate(self._original_predictions)
        ]


def _laid_in(image: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    height, width = image.shape[:2]
    scale = min(SIDE / width, SIDE / height)
    wide, high = min(max(int(width * scale + 0.5), 1), SIDE), min(max(int(height * scale + 0.5), 1), SIDE)
    shrinks = width / wide, height / high
    area = min(shrinks) >= 1 and max(shrinks) > _SEEN_BY_BILINEAR
    resized = cv2.resize(image, (wide, high), interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR)
    whole = np.full((SIDE, SIDE, 3), PAD, np.uint8)
    whole[:high, :wide] = resized
    values = (whole[..., ::-1].astype(np.float64) - MEAN) / STD
    return np.ascontiguousarray(values.astype(np.float32).transpose(2, 0, 1)), (wide / width, high / height)


def _chosen(
    boxes: np.ndarray, scores: np.ndarray, scale: tuple[float, float], shape: tuple[int, ...]
) -> list[tuple[list[float], float, int]]:
    best = scores.argmax(axis=1)
    top = scores[np.arange(len(scores)), best]
    places = np.flatnonzero(top >= SCORE)
    order = places[np.argsort(-top[places], kind="stable")]
    kept: list[int] = []
    for place in order:
        same = [other for other in kept if best[other] == best[place]]
        if all(_iou(boxes[other], boxes[place]) <= IOU for other in same):
            kept.append(int(place))
    sides = np.array([*scale, *scale])
    limits = np.array([shape[1], shape[0]] * 2)
    found = []
    for place in kept:
        box = np.clip(boxes[place] / sides, 0, limits)
        if box[2] > box[0] and box[3] > box[1]:
            found.append((box.tolist(), float(top[place]), int(best[place])))
    return found


def _iou(one: np.ndarray, other: np.ndarray) -> float:
    sides = np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2])
    inter = float(np.maximum(sides, 0).prod())
    union = float((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod()) - inter
    return inter / union if union > 0 else 0.0


def _predicted(model: NanoDet, images: list[str], **given: Any) -> dict[str, Any]:
    found, started = [], time.perf_counter()
    for image in images:
        result = get_sliced_prediction(image, model, verbose=0, **given)
        found.append([_told(one) for one in result.object_prediction_list])
    return {"found": found, "seconds": time.perf_counter() - started}


def _merged(boxes: list[list[float]], **given: Any) -> list[list[float]]:
    made = [
        ObjectPrediction(bbox=one[:4], score=one[4], category_id=int(one[5]), category_name="x")
        for one in boxes
    ]
    return [_told(one) for one in POSTPROCESS_NAME_TO_CLASS[given.pop("type")](**given)(made)]


def _told(one: ObjectPrediction) -> list[float]:
    return [*map(float, one.bbox.to_xyxy()), float(one.score.value), int(one.category.id)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--provider", default="CPUExecutionProvider")
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    set_postprocess_backend("numpy")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = given.threads
    model = NanoDet(onnxruntime.InferenceSession(given.model, options, providers=[given.provider]))
    for line in sys.stdin:
        question = json.loads(line)
        if "boxes" in question:
            answer: Any = _merged(**question)
        else:
            answer = _predicted(model, **question)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
