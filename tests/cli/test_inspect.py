"""`carpool inspect` and `carpool init`: what is found, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from carpool.cli.main import app
from carpool.config.toml import read_toml
from vision.tiny_exports import ULTRALYTICS, detector


def call(verb: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [verb, *map(str, arguments)])


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


def test_what_is_not_sure_is_asked_and_can_be_said(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2)
    told = json.loads(call("inspect", file, "--json").stdout)
    assert told["task"] is None
    assert "give --task detect to carpool serve" in told["ask"]
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
    assert "is there already: --force writes over it" in again.stderr
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
