"""ONNX files that run as PyTorch networks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from onnx import helper

from backends import onnx_models
from backends.cases import settings
from carpool import backends
from carpool.backends.backend import Placement
from carpool.backends.torch.torch_onnx import open_onnx
from carpool.config.backend_kinds import installed, kind_of
from carpool.config.repository import ModelVersion, find_models
from carpool.errors import Unsupported

X, Y = ("x", "FP32", ("batch", 4)), ("y", "FP32", ("batch", 4))


def write(path: Path, operator: str = "Add") -> Path:
    nodes = [
        helper.make_node("Cast", ["half"], ["value"], to=1),  # as weights that are stored in fewer bits
        helper.make_node(operator, ["x", "value"] if operator == "Add" else ["x"], ["y"]),
    ]
    return onnx_models.write(path, nodes, [X], [Y], {"half": np.array([2.5], np.float16)})


def test_it_is_taken_only_where_the_settings_say_so(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write(tmp_path / "m" / "model.onnx")
    (found,), _ = find_models([tmp_path])
    assert found.config.backend == "onnxruntime"
    (tmp_path / "m" / "model.toml").write_text('backend = "onnx_torch"\n')
    (found,), _ = find_models([tmp_path])
    assert found.config.backend == "onnx_torch"


def test_what_is_missing_is_named() -> None:
    missing = kind_of("onnx_torch").missing()
    assert installed("onnx2torch") == (not missing)
    if missing:
        assert "pip install 'carpool[onnx-torch]'" in missing


def test_the_answers_are_those_of_onnxruntime(tmp_path: Path) -> None:
    pytest.importorskip("onnx2torch")
    file = write(tmp_path / "model.onnx")
    version = ModelVersion(1, file)
    config = backends.describe(settings("onnx_torch", file), version)
    assert [tensor.name for tensor in config.inputs] == ["x"]
    assert [tensor.name for tensor in config.outputs] == ["y"]
    backend = backends.load(config, version, Placement(threads=1))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert backend.run({"x": x}, ["y"])["y"].tolist() == (x + 2.5).tolist()
    backend.close()


def test_answers_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = SimpleNamespace(convert=lambda _graph: Wrong())
    monkeypatch.setitem(sys.modules, "onnx2torch", converter)
    with pytest.raises(Unsupported, match="would not be what onnxruntime answers"):
        open_onnx(settings("onnx_torch", None), write(tmp_path / "model.onnx"))
    converter.convert = lambda _graph: Wrong(2.5)
    network = open_onnx(settings("onnx_torch", None), write(tmp_path / "model.onnx"))
    assert network(torch.zeros(1, 4))["y"].tolist() == [[2.5] * 4]


class Wrong(torch.nn.Module):
    def __init__(self, more: float = 3.0) -> None:
        super().__init__()
        self._more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._more


def test_an_operator_without_a_counterpart_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnx2torch")
    file = write(tmp_path / "model.onnx", "Hardmax")
    version = ModelVersion(1, file)
    config = replace(settings("onnx_torch", file), backend="onnx_torch")
    with pytest.raises(Unsupported, match="Hardmax"):
        backends.load(backends.describe(config, version), version, Placement(threads=1))
