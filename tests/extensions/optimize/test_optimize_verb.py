"""The whole verb on a network of two layers: what is written, what is kept, and what goes on after an end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper
from PIL import Image

from backends import onnx_models
from carpool.config.repository import find_models
from carpool.engine.profile.layouts import Layout
from carpool.errors import CarpoolError
from carpool.extensions.optimize import capacity_trial, optimizing
from carpool.extensions.optimize.capacity_trial import Form, LayoutCurve, Speed
from carpool.extensions.optimize.optimizing import next_version, write_version
from carpool.lab.machine_share import Machine
from cli_run import CliResult, run_cli
from frontend.whole_server import whole_server

GAINS = {"openvino fp32": 1.2, "onnxruntime int8": 2.0, "openvino int8": 1.6}
"""By form, what a quiet machine would say; others are no faster."""


@pytest.fixture(name="model")
def colours(tmp_path: Path) -> Path:
    """A network that says which of three colours a picture has."""
    folder = tmp_path / "models" / "colours"
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["planes"], name="conv", kernel_shape=[1, 1]),
        helper.make_node("Relu", ["planes"], ["light"], name="relu"),
        helper.make_node("GlobalAveragePool", ["light"], ["means"], name="pool"),
        helper.make_node("Flatten", ["means"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "weights"], ["y"], name="gemm"),
    ]
    tensors = {
        "kernel": np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1),
        "weights": 20 * np.eye(3, dtype=np.float32),
    }
    onnx_models.write(
        folder / "1" / "model.onnx",
        nodes,
        [("x", "FP32", ("batch", 3, 16, 16))],
        [("y", "FP32", ("batch", 3))],
        tensors,
    )
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    (folder / "model.toml").write_text(
        'task = "classify"\nslo_ms = 250\nmax_batch = 4\nlabels = "labels.txt"\n'
        '[image]\nsize = 16\nresize = "stretch"\nchannels = "rgb"\nlayout = "nchw"\nscale = 0.00392156862\n'
        '[classify]\nactivation = "softmax"\n'
    )
    return folder


def photos(folder: Path, count: int, bright: float = 1.0, seed: int = 1) -> Path:
    draw = np.random.default_rng(seed)
    folder.mkdir()
    lines = ["file,label"]
    for number in range(count):
        colour = draw.integers(0, 90, 3)
        right = number % 3
        colour[right] += 120
        pixels = np.clip((colour + draw.integers(-20, 20, (16, 16, 3))) * bright, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
        lines.append(f"{number:03}.png,{('red', 'green', 'blue')[right]}")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    gains = dict(GAINS)

    def measured(base: Form, other: Form, *, turns: int, **_: Any) -> tuple[Speed, Speed]:
        def speed(gain: float) -> Speed:
            row = LayoutCurve(1, 2, ((1, 10.0 / gain), (4, 30.0 / gain)), 100 * gain)
            return Speed((row,), 0, 100 * gain, 80 * gain, gain, (gain,) * turns)

        return speed(1.0), speed(gains.get(other.name, 1.0))

    monkeypatch.setattr(optimizing, "measured_beside", measured)
    return gains


def optimize(model: Path, pictures: Path, *more: str) -> CliResult:
    return run_cli(
        ["optimize", str(model), "--pictures", str(pictures), "--work", str(model / ".work"), *more]
    )


def test_the_best_form_is_the_next_version(model: Path, tmp_path: Path) -> None:
    done = optimize(model, photos(tmp_path / "p", 200), "--engine", "onnxruntime")
    assert done.exit_code == 0, done.stderr
    assert "sustains 2.00 times as much" in " ".join(done.stdout.split())
    files = {path.name for path in (model / "2").iterdir()}
    assert files == {"model.onnx", "optimize.json", "optimize.md", "optimize.html"}
    found = json.loads((model / "2" / "optimize.json").read_text("utf-8"))
    assert (found["decision"], found["written"], found["winner"]) == ("write", 2, "onnxruntime int8")
    assert found["inputs"]["held"] == 150
    assert found["tools"].keys() >= {"onnx", "onnxruntime"}
    [form] = found["forms"]
    assert form["loss"]["sure"] > 100
    assert form["loss"]["sure_changed"] == 0
    assert form["speed"]["layouts"][0]["curve"] == [[1, 5.0], [4, 15.0]]
    page = (model / "2" / "optimize.html").read_text("utf-8")
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert not (model / ".work" / "inputs.bin").exists()
    [source], _ = find_models([model])
    assert [version.number for version in source.versions] == [2]


def test_a_form_for_another_engine_is_a_version_too(
    model: Path, tmp_path: Path, a_quiet_machine: dict[str, float]
) -> None:
    a_quiet_machine["openvino int8"] = 3.0
    done = optimize(model, photos(tmp_path / "p", 120), "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["winner"].startswith("openvino")
    [source], _ = find_models([model])
    assert (source.config.backend, source.config.file) == ("openvino", "model.xml")


def test_where_nothing_is_cheaper_it_says_keep(
    model: Path, tmp_path: Path, a_quiet_machine: dict[str, float]
) -> None:
    a_quiet_machine.clear()
    done = optimize(model, photos(tmp_path / "p", 120), "--engine", "onnxruntime", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["decision"], found["winner"], found["written"]) == ("keep", "", None)
    assert "onnxruntime int8: its capacity is 1.00 times" in found["why"]
    assert not (model / "2").exists()
    assert "keep" in (model / ".work" / "optimize.html").read_text("utf-8")


def test_a_bad_calibration_is_caught(model: Path, tmp_path: Path) -> None:
    dark = photos(tmp_path / "dark", 40, bright=0.02)
    pictures = photos(tmp_path / "p", 120)
    done = optimize(model, pictures, "--engine", "onnxruntime", "--calibration", str(dark), "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert all("points (sure answers that changed), and 0.5" in form["why_not"] for form in found["forms"])
    assert any("unlike the held ones" in note for note in found["notes"])
    assert not (model / "2").exists()


def test_pictures_of_noise_prove_nothing(model: Path, tmp_path: Path) -> None:
    dark = photos(tmp_path / "dark", 120, bright=0.02)
    done = optimize(model, dark, "--engine", "onnxruntime", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["why"].startswith("the model is sure of 0 answers")


def test_labels_decide(model: Path, tmp_path: Path) -> None:
    pictures = photos(tmp_path / "p", 120)
    labels = str(pictures / "labels.csv")
    done = optimize(model, pictures, "--engine", "onnxruntime", "--labels", labels, "--json")
    assert done.exit_code == 0, done.stderr
    [form] = json.loads(done.stdout)["forms"]
    assert (form["loss"]["by"], form["loss"]["points"]) == ("labels: top1", 0.0)


def test_an_interrupted_run_goes_on_where_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = photos(tmp_path / "p", 120)

    def interrupted(*_: object, **__: object) -> None:
        raise CarpoolError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(optimizing, "measured_beside", interrupted)
        assert optimize(model, pictures, "--engine", "onnxruntime").exit_code != 0
    monkeypatch.setattr(optimizing.OnnxQuantizer, "calibrated", interrupted)
    done = optimize(model, pictures, "--engine", "onnxruntime")
    assert done.exit_code == 0, done.stderr
    assert (model / "2" / "model.onnx").is_file()
    again = optimize(model, photos(tmp_path / "other", 120, seed=2), "--engine", "onnxruntime", "--json")
    [form] = json.loads(again.stdout)["forms"]
    assert form["why_not"] == "interrupted"  # what was kept is of other pictures


def test_the_written_version_answers_in_a_server(model: Path, tmp_path: Path) -> None:
    pictures = photos(tmp_path / "p", 120)
    assert optimize(model, pictures, "--engine", "onnxruntime").exit_code == 0
    with whole_server(model) as server, server.connect() as client:
        response = client.post("/classify", (pictures / "001.png").read_bytes())
        assert response.status == 200
        answer = json.loads(response.body)
        assert (answer["version"], answer["classes"][0]["label"]) == ("2", "green")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "give --pictures, or --recording"),
        (("--pictures", "nowhere"), "there is no folder nowhere"),
        (("--pictures", ".", "--recording", "x.npz"), "give --pictures, or --recording"),
        (("--recording", "x.npz", "--labels", "x.csv"), "go with --pictures"),
        (("--pictures", ".", "--serve", "http://x", "--dry-run"), "give one of them"),
        (("--pictures", ".", "--loss", "-1"), "--loss must be"),
    ],
)
def test_mistakes(model: Path, more: tuple[str, ...], said: str) -> None:
    done = run_cli(["optimize", str(model), *more])
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_model_without_numbered_versions_is_not_overwritten(tmp_path: Path) -> None:
    onnx_models.arithmetic(tmp_path / "model.onnx")
    with pytest.raises(CarpoolError, match="has no folder for each version"):
        next_version(tmp_path)


def test_a_version_is_written_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    assert next_version(model) == 2
    form = tmp_path / "form" / "model.onnx"
    form.parent.mkdir()
    form.write_bytes(b"x")
    (model / ".optimize-2").mkdir()  # of one that was killed
    assert write_version(model, 2, form, {"optimize.json": b"{}"}) == model / "2"
    assert next_version(model) == 3
    with pytest.raises(CarpoolError, match="cannot be written"):
        write_version(model, 2, form, {})
    assert not (model / ".optimize-2").exists()


def test_capacities_are_those_of_the_best_layout_in_the_median_of_turns(model: Path) -> None:
    [source], _ = find_models([model])
    config = replace(source.config, max_batch=2, backend="onnxruntime")
    base, other = (Form(name, config, source.versions[0]) for name in ("base", "other"))
    layouts = [Layout(1, 2), Layout(2, 1)]

    def turns(*seconds: float) -> list[Mapping[int, float]]:
        return [{1: one, 2: 2 * one} for one in seconds]

    both = {
        "base": capacity_trial._Measured(
            {layouts[0]: turns(0.01, 0.01, 0.05), layouts[1]: turns(0.1, 0.1, 0.5)}
        ),
        "other": capacity_trial._Measured(
            {layouts[0]: turns(0.1, 0.1, 0.5), layouts[1]: turns(0.01, 0.01, 0.05)}
        ),
    }
    first, second = capacity_trial._speeds(base, other, both, layouts, 0.25, Machine(2, decode=0.005), "")
    assert (first.best, second.best) == (0, 1)
    assert (first.capacity, second.capacity) == (100.0, 200.0)
    assert (second.gain, second.gains) == (2.0, (2.0, 2.0, 2.0))
    assert second.images < second.capacity
    assert second.layouts[1].curve == ((1, 10.0), (2, 20.0))


def test_what_slows_a_turn_down_costs_neither_form_its_slo(model: Path) -> None:
    [source], _ = find_models([model])
    config = replace(source.config, max_batch=1, backend="onnxruntime")
    base, other = (Form(name, config, source.versions[0]) for name in ("base", "other"))
    layout = Layout(1, 2)
    both = {
        "base": capacity_trial._Measured({layout: [{1: 0.06}, {1: 0.3}, {1: 0.18}]}),
        "other": capacity_trial._Measured({layout: [{1: 0.03}, {1: 0.15}, {1: 0.09}]}),
    }
    first, second = capacity_trial._speeds(base, other, both, [layout], 0.125, Machine(2), "others ran")
    assert (round(first.capacity, 2), round(second.capacity, 2), second.gain) == (16.67, 33.33, 2.0)
    assert second.disturbed == "others ran"
