"""A package from outside with a backend and a task, as pip would have installed it."""

from __future__ import annotations

from pathlib import Path

_CODE = '''
from __future__ import annotations

import numpy as np

from carpool.backends.backend import check_wanted
from carpool.config.backend_kinds import BackendKind
from carpool.config.model import ModelSignature, TensorSignature

KIND = BackendKind(name="mean", home="toy_backend", suffixes=(".mean",), at_home=(".mean",))
SIGNATURE = ModelSignature(
    (TensorSignature("pixels", "FP32", (-1, 3, 8, 8)),), (TensorSignature("brightness", "FP32", (-1, 1)),)
)


class Mean:
    """The mean of all values, times the number in the model's file."""

    signature = SIGNATURE
    alive = True

    def __init__(self, config, factor):
        self._name, self._factor = config.name, factor

    def run(self, inputs, wanted):
        check_wanted(self._name, wanted, ["brightness"])
        means = inputs["pixels"].mean(axis=(1, 2, 3), keepdims=True)[:, 0, 0]
        return {"brightness": (means * self._factor).astype(np.float32)}

    def abort(self):
        self.alive = False

    close = abort


def load(config, version, placement):
    return Mean(config, float(version.file.read_text()))


def read_signature(config, version):
    return SIGNATURE
'''


def install(folder: Path, *, tasks: str = "") -> Path:
    """The folder to put on sys.path or PYTHONPATH; `tasks` is the code of a module toy_task with a TASK."""
    (folder / "toy_backend.py").write_text(_CODE)
    points = "[carpool.backends]\nmean = toy_backend:KIND\n"
    if tasks:
        (folder / "toy_task.py").write_text(tasks)
        points += "[carpool.tasks]\nbrightness = toy_task:TASK\n"
    info = folder / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    return folder


def model(folder: Path, settings: str = "") -> Path:
    """A model for that backend: a folder with its file and settings."""
    made = folder / "bright"
    (made / "1").mkdir(parents=True)
    (made / "1" / "model.mean").write_text("2")
    (made / "model.toml").write_text(f"max_batch = 4\n{settings}")
    return made
