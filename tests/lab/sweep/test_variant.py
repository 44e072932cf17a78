from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from carpool.config.repository import find_models, read_model
from carpool.config.toml import read_toml
from carpool.core.objectives import FixedBatching
from carpool.demo import bundled_models
from carpool.errors import InvalidInput
from carpool.lab.sweep.conduct import check_place, make_variant, toml_with_fixed
from carpool.lab.sweep.sweep_runs import FIXED, Setting

SETTING = Setting(FIXED, None, 5.0, 4)
PBTXT = """
name: "triton" backend: "onnxruntime" max_batch_size: 16
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
parameters { key: "a \\"quoted\\" \\303\\244" value: { string_value: "b\\\\c" } }
"""


def test_the_demo_detector_keeps_everything_but_its_promise(tmp_path: Path) -> None:
    (source,), _ = find_models([bundled_models() / "nanodet"])
    folder = make_variant(source, source.config.path, SETTING, tmp_path / "1")
    changed, _ = read_model(folder)
    assert changed.config.policy == FixedBatching(4, max_delay=0.005)
    assert changed.config.max_batch == 4
    assert changed.versions[0].file is not None
    for name in ("name", "task", "image", "detect", "labels", "backend"):
        assert getattr(changed.config, name) == getattr(source.config, name)
    assert "slo_ms = 500" in (source.config.path / "model.toml").read_text(), "the model itself is as it was"


def test_a_file_without_settings_gets_some(tmp_path: Path) -> None:
    home = tmp_path / "models"
    home.mkdir()
    (home / "net.onnx").write_bytes(b"")
    (home / "other.onnx").write_bytes(b"")
    (source,), _ = find_models([home / "net.onnx"])
    setting = Setting(FIXED, None, 0.0)
    changed, _ = read_model(make_variant(source, home / "net.onnx", setting, tmp_path / "1"))
    assert (changed.config.name, changed.config.file) == ("net", "net.onnx")
    assert isinstance(changed.config.policy, FixedBatching)
    assert changed.config.max_batch is None, "as the file says"


def test_a_triton_model_keeps_everything_but_its_batching(tmp_path: Path) -> None:
    home = tmp_path / "triton"
    (home / "1").mkdir(parents=True)
    (home / "1" / "model.onnx").write_bytes(b"")
    (home / "config.pbtxt").write_text(PBTXT)
    before, _ = read_model(home)
    changed, _ = read_model(make_variant(before, home, SETTING, tmp_path / "variants"))
    assert changed.config.policy == FixedBatching(4, max_delay=0.005)
    for name in ("inputs", "outputs", "parameters", "backend"):
        assert getattr(changed.config, name) == getattr(before.config, name)
    whole, _ = read_model(make_variant(before, home, Setting(FIXED, None, 1.0), tmp_path / "more"))
    assert whole.config.max_batch == 16


def test_settings_survive_the_rewriting(tmp_path: Path) -> None:
    settings = {
        "slo_ms": 5,
        "labels": 'a "b" \\ ä \x7f',
        "response_cache": True,
        "batching": {"preferred": [1]},
        "input": [{"name": "x", "datatype": "FP32", "shape": [1, -1]}],
        "parameters": {"a key": "v", "n": 1.5},
    }
    again = tomllib.loads(toml_with_fixed(settings, SETTING))
    expected = {key: value for key, value in settings.items() if key not in ("slo_ms", "batching")}
    assert again == expected | {"batching": {"max_delay_ms": 5.0}, "max_batch": 4}
    plain = {"task": "raw", "parameters": {"k": "v"}}
    (tmp_path / "model.toml").write_text(toml_with_fixed(plain, SETTING))
    assert read_toml(tmp_path / "model.toml").parameters == {"k": "v"}


def test_one_version_of_several_is_not_taken_for_the_model(tmp_path: Path) -> None:
    file = tmp_path / "m" / "3" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    with pytest.raises(InvalidInput, match="give the model's folder"):
        check_place(file)
    check_place(tmp_path / "m")
