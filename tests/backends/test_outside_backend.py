"""A backend from another package: an entry point is all that it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import outside
from carpool import backends
from carpool.config.backend_kinds import BackendKind, kind_of, kinds, module_of
from carpool.config.repository import find_models
from carpool.errors import ConfigError, Unsupported


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(outside.install(tmp_path)))
    kinds.cache_clear()
    yield tmp_path
    kinds.cache_clear()
    sys.modules.pop("toy_backend", None)


def test_its_files_are_found_and_run(installed: Path) -> None:
    [source], warnings = find_models([outside.model(installed)])
    [version] = source.versions
    assert (source.config.backend, version.file.name if version.file else "") == ("mean", "model.mean")
    assert warnings == []
    config = backends.describe(source.config, version)
    assert [tensor.dims for tensor in config.inputs] == [(3, 8, 8)]
    assert backends.devices(config) == ()
    instance = backends.load(config, version)
    found = instance.run({"pixels": np.full((2, 3, 8, 8), 3, np.float32)}, [])
    assert found["brightness"].tolist() == [[6.0], [6.0]]
    instance.close()


def test_a_backend_can_be_named_in_the_settings(installed: Path) -> None:
    [source], _ = find_models([outside.model(installed, 'backend = "mean"\n')])
    assert source.config.backend == "mean"
    assert "mean" in kinds()


def test_an_entry_point_that_is_no_backend_is_told(installed: Path) -> None:
    (installed / "toy_backend.py").write_text("KIND = 'mean'\n")
    with pytest.raises(ConfigError, match=r"the backend mean \(toy_backend:KIND\) must be a BackendKind"):
        kinds()
    (installed / "toy_backend.py").write_text("import nothing_of_this_name\n")
    sys.modules.pop("toy_backend", None)
    with pytest.raises(ConfigError, match="nothing_of_this_name"):
        kinds()


def test_what_nobody_knows_runs_nothing() -> None:
    assert kind_of("caffe") == BackendKind(name="caffe", home="")
    with pytest.raises(Unsupported, match='no backend "caffe" yet; there are fake, litert, onnx_torch'):
        module_of(kind_of("caffe"))
