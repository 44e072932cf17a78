"""Which backend runs a model, and how instances share the cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backends.cases import settings
from carpool import backends
from carpool.config.repository import ModelVersion
from carpool.errors import NotFound, Unsupported


@pytest.mark.parametrize("name", ["caffe", None])
def test_a_backend_that_is_not_there_is_named(name: str | None) -> None:
    with pytest.raises(Unsupported, match=rf'no backend "{name}" yet; there are fake, litert, onnx_torch'):
        backends.load(settings(str(name), None), ModelVersion(1, None))


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    with pytest.raises(NotFound, match=r"model\.onnx is gone"):
        backends.read_signature(settings("onnxruntime", file), ModelVersion(1, file))


@pytest.mark.parametrize(
    ("instances", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (9, 8, 1), (1, 1, 1)]
)
def test_instances_share_the_cores(instances: int, cores: int, threads: int) -> None:
    assert backends.default_threads(instances, cores) == threads


def test_runtimes_are_imported_when_they_are_needed() -> None:
    code = "import sys, carpool.backends; print('onnxruntime' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_missing_runtime_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    file = tmp_path / "model.onnx"
    file.touch()
    with pytest.raises(Unsupported, match="pip install onnxruntime"):
        backends.load(settings("onnxruntime", file), ModelVersion(1, file))
