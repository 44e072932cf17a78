"""What the names and shapes of a file's tensors say of pixels, where nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from carpool.config.file_metadata import FileMetadata
from carpool.config.presets import PRESETS, PictureChoice
from carpool.config.repository import find_models
from carpool.lab.model_report import look_at
from carpool.types import Array
from carpool.vision.claims import read_claims
from carpool.vision.family_pixels import family_pixels
from carpool.vision.plans.settings import Described
from vision.classifiers import SIDE, classifier
from vision.fixed_answers import answering

RANDOM = np.random.default_rng(23)
LEVELS = {
    f"{kind}{side}": (2 * (64 // side) ** 2, width)
    for kind, width in (("s", 1), ("b", 4))
    for side in (8, 16, 32)
}
QUERIES = {"dets": (1, 9, 4), "labels": (1, 9, 3)}
FINAL = {"labels": (-1, 9), "boxes": (-1, 9, 4), "scores": (-1, 9)}


@pytest.mark.parametrize(
    ("inputs", "outputs", "preset", "doubts"),
    [
        ((), QUERIES, "rfdetr", ()),
        ((), {**QUERIES, "masks": (1, 9, 8, 8)}, "rfdetr", ()),
        ((), {**QUERIES, "features": (1, 9, 8)}, "", ()),
        ((), {"dets": (1, 9, 4), "labels": (1, 8, 3)}, "", ()),
        (("orig_target_sizes",), FINAL, "rtdetr", ("mean", "std")),
        ((), FINAL, "", ()),
        ((), {"dets": (1, 9, 5), "labels": (1, 9)}, "rtmdet", ("resize", "mean", "std", "channels")),
        ((), {"simcc_x": (1, 17, 96), "simcc_y": (1, 17, 128)}, "rtmpose", ("resize",)),
        ((), {"pred_score": (1,), "anomaly_map": (1, 1, 8, 8)}, "anomalib", ()),
        ((), LEVELS, "scrfd", ("mean", "std")),
        ((), {name: shape for name, shape in LEVELS.items() if "8" not in name}, "", ()),
        ((), {}, "", ()),
    ],
)
def test_families_by_their_tensors(
    inputs: tuple[str, ...], outputs: dict[str, tuple[int, ...]], preset: str, doubts: tuple[str, ...]
) -> None:
    found = family_pixels(dict.fromkeys(inputs, (1, 2)), outputs)
    said = ("", ()) if found is None else (found.preset, found.doubts)
    assert said == (preset, doubts)
    assert (found is None) is (preset == "")


def described(file: Path, **choice: str) -> Described:
    [source], _ = find_models([file])
    return look_at(source, PictureChoice(**choice))[1]  # type: ignore[arg-type]


def rtmdet(folder: Path, **outputs: Array) -> Path:
    rows = np.concatenate((np.tile([[1, 2, 30, 40]], (9, 1)), RANDOM.random((9, 1))), axis=1)
    found = {"dets": rows, "labels": RANDOM.integers(0, 3, 9), **outputs}
    return answering(folder / "m.onnx", found, {"input": (1, 3, 64, 64)}, {})


def test_doubts_are_announced_until_a_setting_says_it(tmp_path: Path) -> None:
    file = rtmdet(tmp_path)
    vision = described(file).vision
    assert vision is not None
    assert vision.assumed == ("resize", "mean", "std", "channels")
    image = {name: getattr(vision.image, name) for name in PRESETS["rtmdet"]}
    assert image == PRESETS["rtmdet"]
    other = described(file, preset="rtdetr").vision
    assert other is not None
    assert (other.assumed, other.image.channels, other.image.resize) == ((), "rgb", "stretch")


def test_what_lies_beside_the_file_counts_before_its_names(tmp_path: Path) -> None:
    said = {
        "image_processor_type": "RTDetrImageProcessor",
        "size": {"height": 64, "width": 64},
        "resample": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["RTDetrForObjectDetection"]}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**said, "do_normalize": False}))
    outputs = {"dets": RANDOM.uniform(0.2, 0.6, (9, 4)), "labels": RANDOM.normal(0, 2, (9, 4))}
    file = answering(tmp_path / "m.onnx", outputs, {"images": (1, 3, 64, 64)}, {})
    vision = described(file).vision
    assert vision is not None
    assert (vision.image.mean, vision.image.kernel, vision.assumed) == ((0.0,), "pil-bilinear", ())


def test_an_image_tower_of_open_clip(tmp_path: Path) -> None:
    said = {
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.3],
        "interpolation": "bicubic",
        "resize_mode": "squash",
    }
    config = {"preprocess_cfg": said, "model_cfg": {"vision_cfg": {"image_size": SIDE}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    vision = described(classifier(tmp_path / "m.onnx", output="output")).vision
    assert vision is not None
    assert (vision.task, vision.assumed) == ("embed", ())
    image = vision.image
    assert (image.resize, image.kernel, image.mean) == ("stretch", "pil-bicubic", (0.5, 0.4, 0.3))


@pytest.mark.parametrize("name", ["ch_ppocr_mobile_v2.0_cls_mobile", "PP-OCRv6_cls", "text_cls", "ppocr_b"])
def test_the_direction_of_text(name: str) -> None:
    claims = read_claims(FileMetadata(name=name))
    known = name in ("ch_ppocr_mobile_v2.0_cls_mobile", "PP-OCRv6_cls")
    assert (claims.task, claims.labels, claims.size) == (
        ("classify", ("0", "180"), (48, 192)) if known else (None, (), None)
    )
