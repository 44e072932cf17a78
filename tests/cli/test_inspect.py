"""`carpool inspect` and `carpool init`: what is found, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

from carpool.config.presets import PRESETS
from carpool.config.toml import read_toml
from carpool.demo import pictures
from cli_run import CliResult, run_cli
from vision.classifiers import classifier
from vision.tiny_exports import ULTRALYTICS, detector


def call(verb: str, *arguments: object) -> CliResult:
    return run_cli([verb, *map(str, arguments)])


def test_an_export_that_says_what_it_is(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2, dynamic=True, **ULTRALYTICS)
    shown = call("inspect", file)
    assert shown.exit_code == 0
    words = " ".join(shown.stdout.split())
    for part in ("task detect", "format yolov8", "2: nut, bolt", "[6, 84]", 'task = "detect"'):
        assert part in words, part
    assert "names 2 of them" in words
    told = json.loads(call("inspect", file, "--json").stdout)
    assert (told["task"], told["format"], told["labels"], told["ask"]) == (
        "detect",
        "yolov8",
        ["nut", "bolt"],
        "",
    )
    assert told["outputs"][0]["tried"] == [6, 84]


def test_what_an_image_takes_of_memory(tmp_path: Path) -> None:
    file = classifier(tmp_path / "animals.onnx")
    told = json.loads(call("inspect", file, "--json").stdout)
    assert told["weights_mb"] >= 0
    assert told["image_mb"] >= 0
    assert "MB for each image that it runs" in " ".join(call("inspect", file).stdout.split())
    open_sides = detector(tmp_path / "any.onnx", 80, dynamic=True)
    assert json.loads(call("inspect", open_sides, "--json").stdout)["image_mb"] is None


def test_what_is_not_sure_is_asked_and_can_be_said(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2)
    told = json.loads(call("inspect", file, "--json").stdout)
    assert told["task"] is None
    assert 'set task = "detect" or "obb" in model.toml' in told["ask"]
    assert json.loads(call("inspect", file, "--json", "--task", "detect").stdout)["format"] == "yolov8"
    (tmp_path / "names.txt").write_text("nut\nbolt\n")
    told = json.loads(call("inspect", file, "--json", "--labels", tmp_path / "names.txt").stdout)
    assert (told["task"], told["labels"]) == ("detect", ["nut", "bolt"])
    open_sides = detector(tmp_path / "any.onnx", 80, dynamic=True)
    assert "give --size to carpool serve" in json.loads(call("inspect", open_sides, "--json").stdout)["ask"]
    assert json.loads(call("inspect", open_sides, "--json", "--size", "64").stdout)["task"] == "detect"


def test_init_writes_what_the_model_is_then_served_with(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2, dynamic=True, **ULTRALYTICS)
    done = call("init", file)
    assert done.exit_code == 0, done.stderr
    config = read_toml(tmp_path / "model.toml")
    assert (config.task, config.labels, config.file) == ("detect", "labels.txt", "parts.onnx")
    assert config.image is not None
    assert config.image.size == (64, 64)
    assert config.detect is not None
    assert config.detect.format == "yolov8"
    assert (tmp_path / "labels.txt").read_text() == "nut\nbolt\n"
    again = call("init", file)
    assert again.exit_code == 2
    assert "exists already: --force adds what it lacks" in again.stderr
    assert call("init", file, "--force").exit_code == 0
    assert json.loads(call("inspect", file, "--json").stdout)["task"] == "detect"


def test_mistakes_fit_on_one_line(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2)
    for arguments, words in (
        (("inspect", tmp_path / "gone.onnx"), "no such file or folder"),
        (("init", tmp_path / "gone.onnx"), "no such file or folder"),
        (("inspect", file, "--task", "detct"), 'task cannot be "detct"; did you mean "detect"?'),
        (("inspect", file, "--size", "big"), 'size must be like 640 or 480,640, not "big"'),
        (("inspect", file, "--labels", "gone.txt"), "there is no file gone.txt for its labels"),
        (("inspect", file, "--task", "pose"), "keypoints, anchors] of floats"),
    ):
        failed = call(*arguments)
        assert failed.exit_code != 0
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1


def test_presets_are_compared_and_the_right_one_is_written(tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx")
    photo = pictures()[0]
    shown = call("inspect", file, "--picture", photo)
    assert shown.exit_code == 0, shown.stderr
    for preset in PRESETS:
        assert preset in shown.stdout
    told = json.loads(call("inspect", file, "--picture", photo, "--json").stdout)
    assert told.keys() == PRESETS.keys()
    assert len(told["timm"]["classes"]) == 5
    assert told["timm"]["classes"] != told["keras-caffe"]["classes"]
    (tmp_path / "model.toml").write_text("# mine\nslo_ms = 70  # kept\n\n[image]\nmean = 3\nsize = 64\n")
    own = json.loads(call("inspect", file, "--picture", photo, "--json").stdout)
    assert list(own) == ["model.toml", *PRESETS], "what it would answer as it is comes first"
    assert own["timm"] == told["timm"]
    assert own["model.toml"]["classes"] != told["timm"]["classes"]
    assert "--write PRESET sets one in place of its own settings" in call(
        "inspect", file, "--picture", photo
    ).stdout.replace("\n", " ")
    assert call("inspect", file, "--write", "clip").exit_code == 0
    text = (tmp_path / "model.toml").read_text()
    assert "slo_ms = 70  # kept" in text
    config = read_toml(tmp_path / "model.toml")
    assert (config.preset, config.file) == ("clip", "m.onnx")
    assert config.image is not None
    assert config.image.size == (64, 64)
    assert "mean" not in text
    assert json.loads(call("inspect", file, "--json").stdout)["assumed"] == []
    wrong = call("inspect", file, "--write", "torch")
    assert wrong.exit_code == 2
    assert "torchvision" in wrong.stderr


def test_boxes_are_drawn_under_each_preset(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 80)
    done = call("inspect", file, "--picture", pictures()[0], "--out", tmp_path / "drawn")
    assert done.exit_code == 0, done.stderr
    assert {one.name for one in (tmp_path / "drawn").iterdir()} == {f"parts-{name}.jpg" for name in PRESETS}


def test_init_keeps_what_stands_there(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2, dynamic=True, **ULTRALYTICS)
    (tmp_path / "names.txt").write_text("nut\nbolt\n")
    before = (
        '# by hand\nslo_ms = 70  # kept\nmax_batch = 4\nlabels = "names.txt"\n\n[image]\npad = 3  # black\n'
    )
    (tmp_path / "model.toml").write_text(before)
    printed = json.loads(call("inspect", file, "--json").stdout)["toml"]
    assert call("init", file, "--force").exit_code == 0
    text = (tmp_path / "model.toml").read_text()
    assert text == printed
    for line in before.splitlines():
        assert line in text
    assert 'task = "detect"' in text
    assert not (tmp_path / "labels.txt").exists()
    config = read_toml(tmp_path / "model.toml")
    assert (config.max_batch, config.labels, config.task) == (4, "names.txt", "detect")


def test_init_with_a_preset_assumes_nothing(tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx")
    assert call("init", file, "--preset", "timm").exit_code == 0
    assert read_toml(tmp_path / "model.toml").preset == "timm"
    assert json.loads(call("inspect", file, "--json").stdout)["assumed"] == []


def test_labels_by_name(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 80)
    told = json.loads(call("inspect", file, "--labels", "coco", "--json").stdout)
    assert told["labels"][0] == "person"
