"""The models say sensible things about the pictures: the conversion, the labels and the settings all agree.

Pictures are prepared here by hand, as the README beside each model says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from carpool.demo import bundled_models

CLASSIFIERS = {"efficientnet_lite0": 224}
CATS = {"tabby", "tiger cat", "Persian cat", "Siamese cat", "Egyptian cat"}


def ask(path: Path, inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [asked] = session.get_inputs()
    return list(session.run(None, {asked.name: np.ascontiguousarray(inputs, np.float32)}))


@pytest.mark.parametrize("name", list(CLASSIFIERS))
def test_the_classifiers_know_coffee_and_a_cat(
    name: str, models: dict[str, Path], model_file: Any, photo: Any, middle: Any
) -> None:
    labels = (models[name] / "imagenet_labels.txt").read_text().splitlines()
    pixels = [middle(photo(of), CLASSIFIERS[name], Image.Resampling.BICUBIC) for of in ("coffee", "chelsea")]
    [logits] = ask(model_file(name), (np.stack(pixels).transpose(0, 3, 1, 2) - 127) / 128)
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    coffee, cat = scores
    assert labels[int(coffee.argmax())] == "espresso"
    assert coffee.max() > 0.4
    assert {labels[index] for index in cat.argsort()[-3:]} <= CATS


def test_the_pictures_are_safe(models: dict[str, Path], model_file: Any, photo: Any, middle: Any) -> None:
    names = ("astronaut", "chelsea", "coffee")
    pixels = np.stack([middle(photo(of), 224, Image.Resampling.BILINEAR) for of in names])
    [scores] = ask(model_file("open_nsfw"), pixels[..., ::-1] - np.float32([104, 117, 123]))
    assert (models["open_nsfw"] / "labels.txt").read_text().split("\n")[:2] == ["safe", "not safe"]
    assert scores.sum(axis=1) == pytest.approx(1, abs=1e-3)
    assert (scores[:, 0] > 0.9).all()


def test_the_astronaut_is_cut_out(model_file: Any, photo: Any) -> None:
    pixels = np.asarray(photo("astronaut").resize((320, 320), Image.Resampling.BILINEAR), np.float32)
    inputs = (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    [[[mask]]] = ask(model_file("u2netp"), inputs.transpose(2, 0, 1)[None])
    suit, sky = mask[150:290, 90:190], mask[:80, :60]
    assert suit.mean() > 0.9
    assert sky.mean() < 0.1


def test_the_detector_sees_a_person(photo: Any) -> None:
    folder = bundled_models() / "nanodet"
    labels = (folder / "coco_labels.txt").read_text().splitlines()
    pixels = np.asarray(photo("astronaut").resize((416, 416), Image.Resampling.BILINEAR), np.float32)[
        ..., ::-1
    ]
    inputs = (pixels - [103.53, 116.28, 123.675]) / [57.375, 57.12, 58.395]
    boxes, scores = ask(folder / "1" / "model.onnx", inputs.transpose(2, 0, 1)[None])
    anchor, kind = np.unravel_index(scores[0].argmax(), scores[0].shape)
    left, top, right, bottom = boxes[0][anchor]
    assert labels[int(kind)] == "person"
    assert left < 210 < right
    assert top < 210 < bottom
