"""Files of many families: each is read as its own code reads it, or what is guessed has a name, or it is an
error that says what to set. No reading is wrong without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from carpool.config.presets import PictureChoice
from carpool.config.repository import find_models
from carpool.demo import bundled_models
from carpool.errors import ConfigError
from carpool.lab.model_report import look_at
from carpool.types import Array
from carpool.vision import tasks
from carpool.vision.geometry import Geometry
from carpool.vision.mask_regions import from_run_lengths
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import Described
from carpool.vision.vision_settings import VisionSettings
from cli_run import run_cli
from vision.classifiers import SIDE, classifier
from vision.fixed_answers import answering, by_optimum

RANDOM = np.random.default_rng(11)
IMAGENET = (0.485, 0.456, 0.406)
INSIDE = [("Sub", IMAGENET), ("Div", (0.229, 0.224, 0.225))]
VIT = {"architectures": ["ViTForImageClassification"], "id2label": {str(n): f"c{n}" for n in range(10)}}
PREPARED: dict[str, Any] = {"size": {"height": 64, "width": 64}, "do_normalize": True}
PREPARED |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "image_processor_type": "ViTImageProcessor"}
WHOLE = Geometry(128, 96, 64, 64, 0.5, 64 / 96)  # a picture of 128×96, stretched over an input of 64×64


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    """Each test draws the same numbers, whichever ran before it in its process."""
    RANDOM.bit_generator.state = np.random.default_rng(11).bit_generator.state


def said(file: Path, **choice: Any) -> Described:
    [source], _ = find_models([file])
    return look_at(source, PictureChoice(**choice))[1]


def vision(file: Path, **choice: Any) -> VisionSettings:
    found = said(file, **choice).vision
    assert found is not None
    return found


def head(folder: Path, outputs: dict[str, Array], side: int = 64, **metadata: str) -> Path:
    return answering(folder / "m.onnx", outputs, {"images": (1, 3, side, side)}, metadata)


def labels(folder: Path, count: int) -> Path:
    file = folder / "names.txt"
    file.write_text("".join(f"name {number}\n" for number in range(count)))
    return file


def detections(settings: VisionSettings, outputs: dict[str, Array], score: float = 0.3) -> list[Any]:
    floats = {name: array.astype(np.float32) for name, array in outputs.items()}
    answer = tasks.build(settings).answer(floats, WHOLE, Options(score=score))
    return [(one["class_id"], one["score"], one["box"]) for one in answer["detections"]]


# ---- pixels


def test_a_preset_does_not_normalise_what_the_layers_normalise(tmp_path: Path) -> None:
    """The preset gives size, crop and kernel; that it says other values stays named until [image] says which
    are right."""
    file = classifier(tmp_path / "m.onnx", *INSIDE)
    found = vision(file, preset="torchvision")
    assert (found.image.resize, found.image.crop, found.image.kernel) == ("crop", 0.875, "pil-bilinear")
    assert (found.image.scale, found.image.mean, found.image.std) == (1 / 255, (0.0,), (1.0,))
    assert found.assumed == ("mean", "std")
    with pytest.raises(ConfigError, match=r"Set scale, mean and std in \[image\]"):
        said(file, preset="torchvision", strict=True)
    assert run_cli(["inspect", str(file), "--write", "torchvision"]).exit_code == 0
    assert vision(file).assumed == ("mean", "std")
    (tmp_path / "model.toml").write_text(
        'file = "m.onnx"\npreset = "torchvision"\n[image]\nscale = 0.00392156862745098\nmean = 0\nstd = 1\n'
    )
    assert vision(file, strict=True).assumed == ()
    assert vision(classifier(tmp_path / "b" / "m.onnx", *INSIDE), preset="plain").assumed == ()


def test_metadata_that_the_layers_contradict_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    assert vision(classifier(tmp_path / "m.onnx")).assumed == ()
    assert vision(classifier(tmp_path / "m.onnx", *INSIDE)).assumed == ("mean", "std")


@pytest.mark.parametrize(
    ("more", "assumed"),
    [
        ({}, ()),
        ({"keep_aspect_ratio": True, "ensure_multiple_of": 16}, ("resize",)),  # Depth Anything
        ({"keep_aspect_ratio": False, "ensure_multiple_of": 16}, ()),
        ({"ensure_multiple_of": 14}, ("resize",)),
        ({"do_pad": True}, ("resize",)),  # OWLv2
        ({"do_pad": True, "image_processor_type": "DetrImageProcessor"}, ()),
        ({"do_pad": True, "image_processor_type": "Owlv2ImageProcessor"}, ("kernel",)),
        ({"do_pad": False, "image_processor_type": "Owlv2ImageProcessor"}, ("resize",)),
        ({"do_resize": False}, ("resize",)),
        ({"do_center_crop": True, "crop_size": 56}, ("resize",)),  # squeezed to 64 × 64, then cut
        ({"image_processor_type": "LevitImageProcessor"}, ("resize",)),
        ({"size": 64, "max_size": 100}, ("resize",)),
        ({"resample": 4}, ("kernel",)),
        ({"resample": [2]}, ("kernel",)),
        ({"crop_pct": 1e-320}, ()),
        ({"do_thumbnail": True, "device": "cpu"}, ("preprocessor_config.do_thumbnail",)),
        ({"do_align_long_axis": False}, ()),
    ],
)
def test_no_field_of_a_processor_is_passed_over(
    more: dict[str, object], assumed: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPARED, **more}))
    file = classifier(tmp_path / "m.onnx")
    assert vision(file).assumed == assumed
    settled = 'resize = "crop"\nscale = 1.0\nmean = [0]\nkernel = "area"\n'
    (tmp_path / "model.toml").write_text(f'file = "m.onnx"\n[image]\n{settled}')
    assert vision(file).assumed == ()


def test_owlv2_pads_to_a_square_below_and_at_the_right(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    said_by_it = {**PREPARED, "do_pad": True, "image_processor_type": "Owlv2ImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said_by_it))
    image = vision(classifier(tmp_path / "m.onnx")).image
    assert (image.resize, image.anchor, image.pad) == ("letterbox", "top_left", 0)


def test_units_and_channels_that_nothing_says(tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx")
    for image, assumed in (
        ("mean = [103.939, 116.779, 123.68]", ("channels",)),  # Caffe's, blue first
        ("mean = [123.675, 116.28, 103.53]\nstd = [58.395, 57.12, 57.375]", ()),
        ("mean = 0\nstd = 1", ("scale", "channels")),
        ('mean = 127\nstd = 128\nchannels = "bgr"', ()),
        ('scale = 1.0\nchannels = "rgb"', ()),
    ):
        (tmp_path / "model.toml").write_text(f'file = "m.onnx"\n[image]\nresize = "stretch"\n{image}\n')
        assert vision(file).assumed == assumed, image
    for image in ("mean = [0.485, 0.456, 0.406]\nstd = 58.395", "mean = 123.675\nstd = 0.229"):
        (tmp_path / "model.toml").write_text(f'file = "m.onnx"\n[image]\n{image}\n')
        with pytest.raises(ConfigError, match=r"image\.mean and image\.std mix two units"):
            said(file)


def test_a_crop_that_became_a_letterbox_stays_named(tmp_path: Path) -> None:
    outputs = {"dets": RANDOM.random((9, 4)), "labels": RANDOM.normal(0, 2, (9, 91))}
    file = head(tmp_path, outputs)
    assert vision(file, preset="torchvision").assumed == ("resize",)
    assert vision(file, preset="rfdetr").assumed == ()
    assert vision(file, preset="rfdetr").image.resize == "stretch"
    assert vision(classifier(tmp_path / "c" / "m.onnx"), preset="torchvision").assumed == ()


# ---- detectors of queries


def sigmoids(boxes: Array, logits: Array, unused: int | None) -> list[Any]:
    """RF-DETR, RT-DETR and D-FINE: the best of all pairs of a query and a class, as many as queries."""
    scores = 1 / (1 + np.exp(-logits))
    if unused is not None:
        scores[:, unused] = 0
    best = np.argsort(-scores.ravel(), kind="stable")[: len(boxes)]
    found = []
    for at in best[scores.ravel()[best] >= 0.3]:
        x, y, w, h = boxes[at // scores.shape[1]] * (128, 96, 128, 96)
        corners = np.clip([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 0, (128, 96, 128, 96))
        found.append((int(at % scores.shape[1]), scores.ravel()[at], corners.tolist()))
    return found


def same(found: list[Any], wanted: list[Any]) -> None:
    assert [one[0] for one in found] == [one[0] for one in wanted]
    assert len(found) > 3
    for (_, score, box), (_, other, around) in zip(found, wanted, strict=True):
        assert score == pytest.approx(other, abs=1e-5)
        assert box == pytest.approx(around, abs=0.02)


@pytest.mark.parametrize(("columns", "names", "unused"), [(3, 2, 2), (91, 0, None), (8, 0, 7), (4, 4, None)])
def test_rfdetr(columns: int, names: int, unused: int | None, tmp_path: Path) -> None:
    outputs = {"dets": RANDOM.uniform(0.2, 0.6, (40, 4)), "labels": RANDOM.normal(-1, 2, (40, columns))}
    found = vision(head(tmp_path, outputs), labels=labels(tmp_path, names) if names else None)
    assert (found.task, found.assumed) == ("detect", ())
    assert (found.image.resize, found.image.kernel, found.image.mean) == ("stretch", "bilinear", IMAGENET)
    same(detections(found, outputs), sigmoids(outputs["dets"], outputs["labels"], unused))


@pytest.mark.parametrize("rows", [1, 2])
def test_queries_whose_batch_the_file_leaves_open(rows: int, tmp_path: Path) -> None:
    """The input begins with 1, and its outputs have no number, as torch.onnx.export writes D-FINE. Two are no
    batch of it."""
    said = {"architectures": ["DFineForObjectDetection"], "id2label": {str(n): f"c{n}" for n in range(5)}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    boxes, logits = RANDOM.uniform(0.2, 0.6, (40, 4)), RANDOM.normal(-1, 2, (40, 5))
    outputs = {"logits": logits, "pred_boxes": boxes}
    file = head(tmp_path, outputs)
    model = onnx.load(str(file))
    for one in model.graph.output:
        one.type.tensor_type.shape.dim[0].dim_param = "n"
    for weight in model.graph.initializer:
        values = numpy_helper.to_array(weight)
        if rows == 2 and values.ndim == 3:
            weight.CopyFrom(numpy_helper.from_array(np.repeat(values, 2, axis=0), weight.name))
    onnx.save(model, str(file))
    if rows == 2:
        assert "do not match" in said_of(file)
        return
    found = vision(file)
    assert (found.task, [one.shape for one in found.outputs]) == ("detect", [(40, 4), (40, 5)])
    same(detections(found, outputs), sigmoids(boxes, logits, None))


def said_of(file: Path) -> str:
    found = said(file)
    assert found.vision is None
    return found.ask


def test_coco_labels_of_91_columns_are_at_their_numbers(tmp_path: Path) -> None:
    logits = np.full((9, 91), -9.0)
    logits[0, 90] = logits[1, 1] = logits[2, 13] = 5.0
    outputs = {"dets": RANDOM.uniform(0.2, 0.6, (9, 4)), "labels": logits}
    found = vision(head(tmp_path, outputs), labels=bundled_models() / "nanodet" / "coco_labels.txt")
    assert [found.label(number) for number in (1, 13, 90)] == ["person", "stop sign", "toothbrush"]
    assert found.label(12) == "12"


def test_one_column_more_than_labels_is_a_softmax_only_if_something_says_so(tmp_path: Path) -> None:
    outputs = {"logits": RANDOM.normal(0, 2, (40, 3)), "pred_boxes": RANDOM.uniform(0.2, 0.6, (40, 4))}
    file = head(tmp_path, outputs)
    found = vision(file, labels=labels(tmp_path, 2))
    assert "activation" in found.assumed
    with pytest.raises(ConfigError, match="Set activation in the task's table"):
        said(file, labels=labels(tmp_path, 2), preset="plain", strict=True)
    config = {"architectures": ["DetrForObjectDetection"], "id2label": {"0": "a", "1": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = vision(file)
    assert "activation" not in found.assumed
    assert (found.table.activation, found.table.background) == ("softmax", 2)  # type: ignore[union-attr]
    config["architectures"] = ["DFineForObjectDetection"]
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = vision(file)
    assert "activation" not in found.assumed
    same(detections(found, outputs), sigmoids(outputs["pred_boxes"], outputs["logits"], None))


# ---- heads of YOLO


def ultralytics(task: str, *names: str) -> dict[str, str]:
    return {"task": task, "names": repr(dict(enumerate(names))), "imgsz": "[64, 64]", "stride": "32"}


def test_yolo_says_depth(tmp_path: Path) -> None:
    depth = RANDOM.uniform(1, 9, (1, 64, 64))
    found = vision(head(tmp_path, {"output0": depth}, **ultralytics("depth", "depth")))
    assert (found.task, found.image.resize, found.assumed) == ("depth", "stretch", ())
    answer = tasks.build(found)._values({"output0": depth.astype(np.float32)}, WHOLE)[0]  # type: ignore[attr-defined]
    down, across = (np.linspace(0, 63, count) for count in (96, 128))  # the outermost pixels on each other
    rows = np.stack([np.interp(down, np.arange(64), column) for column in depth[0].T], axis=1)
    wanted = np.stack([np.interp(across, np.arange(64), row) for row in rows])
    assert np.abs(answer - wanted).max() < 0.3  # of 8: OpenCV divides pixels into 32
    assert np.abs(answer - wanted).mean() < 0.06


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float32])
def test_yolo_says_semantic(kind: type, tmp_path: Path) -> None:
    numbers = RANDOM.integers(0, 3, (8, 8)).repeat(8, axis=0).repeat(8, axis=1).astype(kind)
    found = vision(head(tmp_path, {"output0": numbers}, **ultralytics("semantic", "road", "sky", "car")))
    assert (found.task, found.table.format, found.assumed) == ("segment", "class_map", ())  # type: ignore[union-attr]
    letterboxed = Geometry(128, 96, 64, 64, 0.5, 0.5, 0, 8)
    masks = tasks.build(found).answer({"output0": numbers}, letterboxed, Options(format="rle"))["masks"]
    assert [one["label"] for one in masks] == ["road", "sky", "car"]
    inside = numbers[8:56]  # what is not padding; each pixel of the picture takes that at its corner
    wanted = inside[np.arange(96) // 2][:, np.arange(128) // 2]
    for number, mask in enumerate(masks):
        assert (from_run_lengths(mask["rle"]["counts"], 96, 128) == (wanted == number)).all()
    maps = {"output0": RANDOM.normal(0, 1, (3, 64, 64))}
    (tmp_path / "maps").mkdir()
    found = vision(head(tmp_path / "maps", maps, **ultralytics("semantic", "road", "sky", "car")))
    assert (found.table.format, found.assumed) == ("maps", ())  # type: ignore[union-attr]


def test_angles_that_nothing_bounds(tmp_path: Path) -> None:
    anchors = 84
    rows = [
        RANDOM.uniform(5, 60, (4, anchors)),
        RANDOM.random((2, anchors)),
        RANDOM.normal(0, 9, (1, anchors)),
    ]
    output = np.concatenate(rows)
    found = vision(head(tmp_path, {"output0": output}, **ultralytics("obb", "ship", "plane")))
    assert (found.task, found.assumed) == ("obb", ())
    best = output[4:6].max()
    [first, *_] = tasks.build(found).answer(
        {"output0": output.astype(np.float32)},
        Geometry(64, 64, 64, 64, 1, 1),
        Options(score=float(best) - 1e-4),
    )["detections"]
    at = int(output[4:6].max(axis=0).argmax())
    x, y, w, h, angle = output[[0, 1, 2, 3, 6], at]
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    corners = [turn @ (w / 2 * a, h / 2 * b) + (x, y) for a, b in ((1, 1), (1, -1), (-1, -1), (-1, 1))]
    assert np.allclose(first["corners"], corners, atol=0.02)


@pytest.mark.parametrize("unit", [1.0, 64.0])
def test_noise_decides_the_unit_of_dense_boxes(unit: float, tmp_path: Path) -> None:
    output = np.concatenate([RANDOM.uniform(0.2, 0.9, (4, 84)) * unit, RANDOM.random((80, 84))])
    file = head(tmp_path, {"output0": output})
    for settings in ("", '[detect]\nformat = "yolov8"\n'):
        (tmp_path / "model.toml").write_text(f'file = "m.onnx"\ntask = "detect"\n{settings}')
        found = vision(file)
        assert "normalized" not in found.assumed
        boxes = [box for _, _, box in detections(found, {"output0": output})]
        assert max(box[2] for box in boxes) > 64  # of 128


def test_yolox_without_its_decoding(tmp_path: Path) -> None:
    """xy = (xy + cell) × stride, wh = exp(wh) × stride, score = objectness × class, as its own demo does."""
    random = np.random.default_rng(12)  # of its own: boxes beside the picture are not answered
    cells = [(x, y, side) for side in (8, 16, 32) for y in range(64 // side) for x in range(64 // side)]
    grid = np.array(cells, float)
    raw = np.concatenate([random.normal(0.5, 0.5, (84, 2)), random.normal(0.3, 0.4, (84, 2))], axis=1)
    rows = np.concatenate([raw, random.random((84, 4))], axis=1)
    found = vision(head(tmp_path, {"output": rows}), preset="yolox")
    assert (found.task, found.table.format, found.assumed) == ("detect", "yolox", ())  # type: ignore[union-attr]
    image = found.image
    assert (image.channels, image.scale, image.anchor, image.pad) == ("bgr", 1.0, "top_left", 114)
    centres = (raw[:, :2] + grid[:, :2]) * grid[:, 2:]
    sizes = np.exp(raw[:, 2:]) * grid[:, 2:]
    scores = rows[:, 4:5] * rows[:, 5:]
    answer = tasks.build(found).answer(
        {"output": rows.astype(np.float32)}, Geometry(64, 64, 64, 64, 1, 1), Options(score=0.5, iou=1.0)
    )
    best = [at for at in np.argsort(-scores.max(axis=1)) if scores[at].max() >= 0.5]
    assert len(best) == len(answer["detections"]) > 3
    for at, one in zip(best, answer["detections"], strict=True):
        box = np.clip([*(centres[at] - sizes[at] / 2), *(centres[at] + sizes[at] / 2)], 0, 64)
        assert one["class_id"] == scores[at].argmax()
        assert one["score"] == pytest.approx(scores[at].max(), abs=1e-5)
        assert one["box"] == pytest.approx(box.tolist(), abs=0.02)


def test_mmdeploys_detectors(tmp_path: Path) -> None:
    """RTMDet among them: corners in the input and a score, and a class from 0."""
    corners = RANDOM.uniform(0, 30, (9, 2))
    rows = np.concatenate([corners, corners + RANDOM.uniform(1, 30, (9, 2)), RANDOM.random((9, 1))], axis=1)
    outputs = {"dets": rows, "labels": RANDOM.integers(0, 3, 9)}
    found = vision(head(tmp_path, outputs), labels=labels(tmp_path, 3), preset="rtmdet")
    assert (found.task, found.table.format, found.assumed) == ("detect", "dets_labels", ())  # type: ignore[union-attr]
    assert (found.image.channels, found.image.mean) == ("bgr", (103.53, 116.28, 123.675))
    order = [at for at in np.argsort(-rows[:, 4]) if rows[at, 4] >= 0.3]
    wanted = [
        (int(outputs["labels"][at]), rows[at, 4], (rows[at, :4] * (2, 1.5, 2, 1.5)).tolist()) for at in order
    ]
    same(detections(found, outputs), wanted)


# ---- families that no task reads


def test_an_insisted_task_is_named_or_refused(tmp_path: Path) -> None:
    """A reading by shape alone says so; a family that is known to be another is refused by its name."""
    shapes = {
        "simcc": {"simcc_x": (17, 384), "simcc_y": (17, 512)},
        "heat": {"heatmaps": (17, 64, 64)},
        "maybe": {"output": (17, 64, 64)},
        "scrfd": {
            f"{name}_{stride}": (2 * (256 // stride) ** 2, count)
            for stride in (8, 16, 32)
            for name, count in (("score", 1), ("bbox", 4), ("kps", 10))
        },
        "yolox": {"output": (1344, 85)},
        "rows": {"output": (30, 9)},
    }
    for name, task, words in (
        ("simcc", "detect", "RTMPose"),
        ("heat", "segment", "ViTPose"),
        ("maybe", "segment", None),
        ("scrfd", "detect", "SCRFD"),
        ("yolox", "detect", "YOLOX"),
        ("rows", "detect", None),
    ):
        outputs = {key: RANDOM.normal(0, 1, shape) for key, shape in shapes[name].items()}
        file = head(tmp_path, outputs, 256)
        freely = said(file)
        if name in ("simcc", "heat"):
            assert freely.vision is not None
            assert freely.vision.task == "pose"
        else:
            assert freely.vision is None
            assert words is None or words in freely.ask, freely.ask
            assert 'boxes = "corners"' not in freely.ask
        if words is None:
            assert "outputs" in vision(file, task=task).assumed, name
            assert "outputs" in vision(file, task=task, preset="plain").assumed, name
            continue
        with pytest.raises(ConfigError, match=r"RTMPose|ViTPose|RF-DETR|SCRFD|YOLOX") as error:
            said(file, task=task)
        assert words in error.value.message


def test_a_claim_that_no_task_is_keeps_shapes_from_deciding(tmp_path: Path) -> None:
    """Two labels and two maps would be masks, if the metadata did not say what they are."""
    maps = {"output0": RANDOM.normal(0, 1, (2, 64, 64))}
    file = head(tmp_path, maps, **ultralytics("flow", "x", "y"))
    assert 'its metadata says task "flow", and no task here is that' in said(file).ask
    assert "outputs" in vision(file, task="segment").assumed
    file = head(tmp_path, maps)
    config = {
        "architectures": ["SuperPointForKeypointDetection"],
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "its metadata says SuperPointForKeypointDetection" in said(file).ask
    config["architectures"] = ["DeiTForImageClassificationWithTeacher"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vision(head(tmp_path, {"logits": RANDOM.normal(0, 1, 2)})).task == "classify"


def test_which_class_the_first_label_is_of(tmp_path: Path) -> None:
    """torchvision's detectors count from 1; others with the same outputs count from 0."""
    outputs = {
        "boxes": RANDOM.uniform(1, 60, (5, 4)),
        "labels": RANDOM.integers(1, 3, 5),
        "scores": RANDOM.random(5),
    }
    file = head(tmp_path, outputs)
    names = tmp_path / "names.txt"
    for lines, assumed in (("cat\ndog\n", True), ("__background__\ncat\ndog\n", False)):
        names.write_text(lines)
        assert ("labels" in vision(file, labels=names).assumed) == assumed
    names.write_text("cat\ndog\n")
    (tmp_path / "model.toml").write_text(
        'file = "m.onnx"\nlabels = "names.txt"\n[detect]\nformat = "boxes_labels_scores"\n'
    )
    assert "labels" not in vision(file).assumed


def test_a_format_in_the_settings_is_no_guess(tmp_path: Path) -> None:
    file = head(tmp_path, {"output": RANDOM.random((30, 9))}, 256)
    (tmp_path / "model.toml").write_text(
        'file = "m.onnx"\npreset = "plain"\n[detect]\nformat = "rtdetr"\nnormalized = true\n'
    )
    assert vision(file).assumed == ()


# ---- inputs


@pytest.mark.parametrize("symbol", ["num_channels", "c"])
def test_exports_of_optimum_are_recognised(symbol: str, tmp_path: Path) -> None:
    file = by_optimum(tmp_path / "model.onnx", 10, symbol=symbol)
    assert "takes images of any size" in said(file).ask
    (tmp_path / "config.json").write_text(json.dumps({**VIT, "image_size": 64}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    found = vision(file)
    assert (found.task, found.assumed, found.image.size) == ("classify", (), (64, 64))
    assert found.input.shape == (3, -1, -1)


def test_what_takes_no_picture_says_why(tmp_path: Path) -> None:
    output = {"y": RANDOM.random(10)}
    for inputs, words in (
        ({"a": (1, 3, 64, 64), "b": (1, 3, 64, 64)}, "2 inputs, and an image route fills one"),
        ({"a": (1, 3, 64, 64), "sizes": (1, 2)}, "set [inputs.sizes] in model.toml"),
        ({"a": (8, 3, 64, 64)}, "a fixed batch of 8"),
        ({"a": (1, 16, 3, 64, 64)}, "those of a video or a volume"),
        ({"a": (1, 4, 64, 64)}, "4 channels, and images have 1 or 3"),
        ({"a": ("n", "c", "h", "w")}, 'set layout = "nchw" or "nhwc" in [image]'),
    ):
        found = said(answering(tmp_path / "m.onnx", output, inputs, {}))
        assert found.vision is None
        assert words in found.ask
        assert "Send tensors to POST /v2/models/NAME/infer" in found.ask
    assert said(answering(tmp_path / "m.onnx", output, {"a": (1, 20)}, {})).ask == ""


def test_a_size_that_the_input_does_not_have_is_an_error(tmp_path: Path) -> None:
    classifier(tmp_path / "m.onnx")
    (tmp_path / "model.toml").write_text('file = "m.onnx"\n[image]\nsize = 300\n')
    shown = run_cli(["inspect", str(tmp_path / "m.onnx")])
    assert shown.exit_code != 0
    assert "size [300, 300]" in shown.stderr
    assert str(SIDE) in shown.stderr


def test_settings_of_another_file_are_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        classifier(tmp_path / f"{name}.onnx")
    text = 'file = "b.onnx"\npreset = "timm"\n'
    (tmp_path / "model.toml").write_text(text)
    for command in (("inspect", "--write", "clip"), ("init", "--force")):
        done = run_cli([command[0], str(tmp_path / "a.onnx"), *command[1:]])
        assert done.exit_code != 0
        assert 'is for file = "b.onnx", not for a.onnx' in done.stderr
    assert (tmp_path / "model.toml").read_text() == text
