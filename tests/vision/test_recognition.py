"""What a model is recognised as, and what is asked where nothing is sure."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from carpool.config.file_metadata import FileMetadata, read_metadata
from carpool.config.model import ImageSettings
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.claims import literal, read_claims
from carpool.vision.head_rules import readings
from carpool.vision.output_facts import Claims, Facts, OutputFact
from carpool.vision.recognition import Verdict, recognise

SIDE, ANCHORS = 640, 8400
RANDOM = np.random.default_rng(5)
Outputs = dict[str, tuple[int, ...] | Array]


def judge(outputs: Outputs, labels: int = 0, claims: Claims | None = None, size: int = SIDE) -> Verdict:
    facts = []
    for name, given in outputs.items():
        sample = given if isinstance(given, np.ndarray) else None
        shape = given.shape if isinstance(given, np.ndarray) else given
        kind = Datatype.INT64 if sample is not None and sample.dtype.kind == "i" else Datatype.FP32
        facts.append(OutputFact(TensorSpec(name, kind, shape), sample))
    names = tuple(f"label {number}" for number in range(labels))
    known = Facts(size, size, True, tuple(facts), names, claims or Claims())
    return recognise(known, readings(known))


def dense(classes: int, *more: Array) -> Array:
    """[fields, anchors]: boxes in pixels, scores from 0 to 1, and more rows."""
    rows = [RANDOM.uniform(0, SIDE, (4, ANCHORS)), RANDOM.uniform(0, 1, (classes, ANCHORS)), *more]
    return np.concatenate(rows)


def between(low: float, high: float, *shape: int) -> Array:
    return RANDOM.uniform(low, high, shape)


KEYPOINTS = np.concatenate(
    [part for _ in range(17) for part in (between(0, SIDE, 2, ANCHORS), between(0, 1, 1, ANCHORS))]
)

SOFTMAX: Outputs = {"boxes": np.tile((0.1, 0.2, 0.5, 0.6), (9, 1)), "scores": RANDOM.dirichlet((1, 1), 9)}


def found_nothing(boxes: str) -> Outputs:
    return {boxes: np.zeros((0, 4)), "labels": np.zeros(0, int), "scores": np.zeros(0)}


@pytest.mark.parametrize(
    ("outputs", "labels", "task", "form"),
    [
        ({"y": (84, ANCHORS)}, 0, "detect", "yolov8"),
        ({"y": dense(80)}, 0, "detect", "yolov8"),
        ({"y": dense(3)}, 3, "detect", "yolov8"),
        ({"y": (25200, 85)}, 0, "detect", "yolov5"),
        ({"y": dense(1, KEYPOINTS)}, 0, "pose", "yolov8"),
        ({"y": dense(2, between(-0.7, 2.3, 1, ANCHORS))}, 0, "obb", "yolov8"),
        ({"y": (116, ANCHORS), "p": (32, 160, 160)}, 0, "segment", "yolov8"),
        ({"y": (25200, 117), "p": (32, 160, 160)}, 80, "segment", "yolov5"),
        ({"logits": (300, 80), "pred_boxes": (300, 4)}, 0, "detect", "detr"),
        ({"logits": (100, 92), "pred_boxes": (100, 4)}, 0, "detect", "detr"),
        ({"a": between(-5, 5, 300, 7), "b": between(0, 1, 300, 4)}, 7, "detect", "detr"),
        (found_nothing("boxes"), 0, "detect", "boxes_labels_scores"),
        ({"y": (21, SIDE, SIDE)}, 0, "segment", "maps"),
        ({"out": (21, SIDE, SIDE), "aux": (21, SIDE, SIDE)}, 0, "segment", "maps"),
        ({"logits": (150, 160, 160)}, 0, "segment", "maps"),
        ({"y": (7, 160, 160)}, 7, "segment", "maps"),
        ({"mask": (1, SIDE, SIDE)}, 0, "segment", "maps"),
        ({"predicted_depth": (SIDE, SIDE)}, 0, "depth", None),
        ({"y": (1000,)}, 0, "classify", None),
        ({"y": (1000, 1, 1)}, 0, "classify", None),
        ({"y": (2,)}, 2, "classify", None),
        ({"logits": (10,)}, 0, "classify", None),
        ({"y": RANDOM.dirichlet(np.ones(10))}, 0, "classify", None),
        ({"image_embeds": (512,), "last_hidden_state": (50, 768)}, 0, "embed", None),
    ],
)  # fmt: skip
def test_one_reading_is_sure(outputs: Outputs, labels: int, task: str, form: str | None) -> None:
    verdict = judge(outputs, labels)
    assert verdict.reading is not None, verdict.ask
    assert (verdict.reading.task, getattr(verdict.reading.table, "format", None)) == (task, form)
    assert verdict.evidence


@pytest.mark.parametrize(
    ("outputs", "labels", "words"),
    [
        ({"y": (84, -1)}, 80, 'could be anything: set task = "…" in model.toml'),  # -1 matches nothing
        ({"y": (-1, SIDE, SIDE)}, 0, "could be anything"),
        ({"y": (20, ANCHORS)}, 0, 'set task = "'),
        ({"y": dense(3)}, 0, 'set task = "detect"'),
        ({"y": dense(3)}, 5, "there are 5 labels"),
        ({"y": dense(2, between(0.7, 0.8, 1, ANCHORS))}, 0, "detect"),  # or an angle, of a model untrained
        ({"y": (300, 6)}, 0, "could be anything"),
        ({"y": (8400, 85)}, 0, "could be anything"),
        ({"logits": (300, 5), "pred_boxes": (300, 4)}, 0, 'set activation = "softmax" or "sigmoid"'),
        ({"a": between(-5, 5, 300, 4), "b": between(0, 1, 300, 4)}, 4, "could be anything"),
        (SOFTMAX, 0, "set background in [detect] of model.toml"),
        (found_nothing("bboxes"), 0, "set normalized"),
        ({"y": (1, SIDE, SIDE)}, 0, "could be depth"),
        ({"y": (17, 160, 160)}, 0, "could be pose"),
        ({"y": (3, SIDE, SIDE)}, 0, "could be segment"),
        ({"y": (64, 40, 40)}, 0, "could be anything"),
        ({"y": (10,)}, 0, "could be classify"),
        ({"y": (512,)}, 2, "could be"),
        ({"y": (197, 768)}, 0, "could be anything"),
        ({}, 0, "its outputs are none"),
    ],
)  # fmt: skip
def test_what_is_not_sure_is_asked(outputs: Outputs, labels: int, words: str) -> None:
    verdict = judge(outputs, labels)
    assert verdict.reading is None
    assert words in verdict.ask


def test_values_tell_scores_from_logits() -> None:
    for sample, activation in (
        (RANDOM.dirichlet(np.ones(1000)), "none"),
        (between(-4, 4, 1000), "softmax"),
        (between(0.1, 0.9, 1000), "none"),
    ):
        reading = judge({"y": sample}).reading
        assert reading is not None
        assert reading.table.activation == activation  # type: ignore[union-attr]


def test_a_claim_that_the_outputs_do_not_fit_is_not_believed() -> None:
    verdict = judge({"y": (1000,)}, 0, Claims("Ultralytics", "pose"))
    assert verdict.reading is None
    assert "its metadata says pose, but its outputs" in verdict.ask
    verdict = judge({"y": (24, ANCHORS)}, 15, Claims("Ultralytics", "obb"))
    assert verdict.reading is None  # 19 classes, and 15 names


# ---- metadata ---------------------------------------------------------------------------------------------


def onnx_file(path: Path, **metadata: str) -> Path:
    graph = helper.make_graph([], "g", [], [])
    model = helper.make_model(graph)
    helper.set_model_props(model, metadata)
    onnx.save(model, str(path))
    return path


def test_metadata_of_ultralytics_in_onnx_and_torchscript(tmp_path: Path) -> None:
    said = {
        "task": "pose",
        "names": "{0: 'person'}",
        "imgsz": "[480, 640]",
        "kpt_shape": "[17, 3]",
        "stride": "32",
    }
    script = tmp_path / "m.pt"
    with zipfile.ZipFile(script, "w") as archive:
        archive.writestr(
            "m/extra/config.txt", json.dumps({**said, "names": {"0": "person"}, "imgsz": [480, 640]})
        )
    for file in (onnx_file(tmp_path / "m.onnx", **said), script):
        claims = read_claims(read_metadata(file))
        assert (claims.task, claims.labels, claims.size) == ("pose", ("person",), (480, 640))
        assert claims.keypoints == (17, 3)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[" * 50 + "]" * 50,
            "{" + "0:" * 9,
            "__import__('os')",
            "1" * 5000,
            "a" * (1 << 21),
            "[1,",
            "f'{1}'",
        ),
        "-" * 9999 + "1",
    ],
)
def test_hostile_literals_say_nothing(text: str) -> None:
    assert literal(text) is None
    claims = read_claims(FileMetadata({"task": "detect", "names": text, "imgsz": text, "stride": "32"}))
    assert (claims.labels, claims.size) == ((), None)


@pytest.mark.parametrize(
    "names", ["{1: 'a', 2: 'b'}", "{0: 'a', 99999999: 'b'}", "'text'", "{'a': 'b'}", "5"]
)
def test_names_that_number_no_classes_are_none(names: str) -> None:
    assert read_claims(FileMetadata({"task": "detect", "names": names, "stride": "32"})).labels == ()


def test_broken_files_say_nothing(tmp_path: Path) -> None:
    broken = {"a.onnx": b"\xff" * 99, "b.onnx": b"\x72\xff\xff\xff\xff\x0f", "c.pt": b"PK", "d.onnx": b""}
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        assert read_metadata(tmp_path / name).entries == {}
    assert read_metadata(tmp_path / "gone.onnx").entries == {}
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert read_metadata(tmp_path / "a.onnx").config == {}


def test_settings_of_transformers_and_timm() -> None:
    config = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "a", "1": "b"}}
    config["problem_type"] = "multi_label_classification"
    shown = {"size": {"shortest_edge": 256}, "crop_size": 224, "do_center_crop": True, "resample": 3}
    shown |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2], "rescale_factor": 1 / 255}
    shown["do_normalize"] = True
    claims = read_claims(FileMetadata({}, config, shown))
    assert (claims.task, claims.labels, claims.activation) == ("classify", ("a", "b"), "sigmoid")
    image = ImageSettings(size=claims.size, **claims.image)
    assert (image.size, image.resize, image.crop, image.kernel) == ((224, 224), "crop", 0.875, "pil-bicubic")
    assert (image.mean, image.std, image.scale) == ((0.5,) * 3, (0.2,) * 3, 1 / 255)
    cfg = {"input_size": [3, 288, 288], "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "crop_pct": 0.9}
    claims = read_claims(FileMetadata({}, {"architecture": "r", "num_classes": 0, "pretrained_cfg": cfg}))
    assert (claims.task, claims.size, claims.image["mean"]) == ("embed", (288, 288), (0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": []},
        {"architectures": [5], "id2label": 7},
        {"architecture": "x", "pretrained_cfg": [1], "num_classes": "many"},
        {
            "architecture": "x",
            "pretrained_cfg": {"input_size": [3, -1, 1 << 40], "mean": ["a"], "crop_pct": 9.5},
        },
    ],
)
def test_odd_settings_claim_nothing_odd(config: dict[str, object]) -> None:
    shown = {"size": [1], "image_mean": "x", "image_std": [0, 0, 0], "rescale_factor": "y", "crop_size": None}
    claims = read_claims(FileMetadata({}, config, shown))
    assert claims.size is None
    assert not {"mean", "std", "scale"} & claims.image.keys()
