"""The zygote is started with the engine where a model will need it, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends import onnx_models
from carpool.cli.serve_command import _find, _started_first
from carpool.config.server import ServerSettings
from extensions.torch import torch_models as tm


def write_onnx(file: Path) -> None:
    onnx_models.identity(file)


@pytest.mark.parametrize(
    ("form", "settings", "needed"),
    [
        ("torch", ServerSettings(), True),
        ("torch", ServerSettings(on_demand=True), False),
        ("onnx", ServerSettings(), False),
    ],
)
def test_it_is_begun_for_models_that_run_in_the_runner(
    form: str, settings: ServerSettings, needed: bool, tmp_path: Path
) -> None:
    if form == "torch":
        tm.folder(tmp_path, f"[image]\nsize = {tm.SIDE}\n", {"model.pt": tm.write_script})
    else:
        tm.folder(tmp_path, "", {"model.onnx": write_onnx})
    sources, _ = _find([tmp_path], settings)
    assert bool(_started_first(sources, settings)) is needed
