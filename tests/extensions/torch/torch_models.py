"""Tiny PyTorch models for tests: written to files in every form, and loaded as the server would."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion, read_model
from carpool.extensions.torch.torch_backend import TorchBackend
from carpool.extensions.torch.torch_device import Device, Program, Run

SIDE = 6


class Net(torch.nn.Module):
    """Pictures [n, 3, 6, 6] to {"scores": [n, 4], "features": [n, 2]}; every row for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = torch.nn.Conv2d(3, 2, 3)
        self.line = torch.nn.Linear(2, 4)

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.conv(pixels).mean((2, 3))
        return {"scores": self.line(features), "features": features}


CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 2, 3)
        self.line = torch.nn.Linear(2, 4)

    def forward(self, pixels):
        features = self.conv(pixels).mean((2, 3))
        return {"scores": self.line(features), "features": features}

def build():
    return Net()
"""


def net() -> Net:
    return Net().eval()


_REFERENCE = net()  # made here, and not by whichever threads ask first: the seed is everybody's


def pictures(count: int, seed: int = 0, channels_last: bool = False) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 3, SIDE, SIDE), np.uint8)
    return np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)) if channels_last else pixels


def floats(count: int, seed: int = 0) -> np.ndarray:
    return (pictures(count, seed) / 255).astype(np.float32)


def answers(values: np.ndarray) -> dict[str, np.ndarray]:
    """What the net says to floats, image by image. From any thread."""
    with torch.inference_mode():
        parts = [_REFERENCE(torch.from_numpy(value[None])) for value in values]
    return {name: np.concatenate([part[name].numpy() for part in parts]) for name in parts[0]}


def quiet(work: Callable[[], Any]) -> Any:
    """PyTorch warns of the ways in which these files are made, which are others' to choose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()


def write_script(file: Path, module: torch.nn.Module | None = None) -> None:
    quiet(lambda: torch.jit.save(torch.jit.script(module or net()), file))


def write_exported(
    file: Path, module: torch.nn.Module | None = None, dtype: torch.dtype = torch.float32
) -> None:
    example = torch.zeros((2, 3, SIDE, SIDE), dtype=dtype)
    shapes = {"pixels": {0: torch.export.Dim("n", min=1, max=64)}}

    def export() -> None:
        program = torch.export.export(module or net(), (example,), dynamic_shapes=shapes)
        torch.export.save(program, file)

    quiet(export)


def write_weights(file: Path) -> None:
    torch.save(net().state_dict(), file)


INPUT = f'[[input]]\nname = "pixels"\ndatatype = "FP32"\nshape = [3, {SIDE}, {SIDE}]\n'
OUTPUTS = (
    '[[output]]\nname = "scores"\ndatatype = "FP32"\nshape = [4]\n'
    '[[output]]\nname = "features"\ndatatype = "FP32"\nshape = [2]\n'
)
IMAGE = f"[image]\nsize = {SIDE}\nscale = 0.017\nmean = [1.2, 2.0, 1.5]\nstd = [0.9, 1.1, 1.0]\n"


def folder(
    home: Path, settings: str, files: Mapping[str, Callable[[Path], None] | str], name: str = "m"
) -> Path:
    version = home / name / "1"
    version.mkdir(parents=True)
    (home / name / "model.toml").write_text(settings)
    for file, content in files.items():
        if isinstance(content, str):
            (version / file).write_text(content)
        else:
            content(version / file)
    return home / name


def described(place: Path, gpus: int = 0) -> tuple[ModelConfig, ModelVersion]:
    source, _ = read_model(place, gpus=gpus)
    return backends.describe(source.config, source.versions[0]), source.versions[0]


def load(place: Path, device: Device | None = None, **placement: Any) -> TorchBackend:
    config, version = described(place)
    assert version.file is not None
    return TorchBackend(config, version.file, device or Device(1), Placement(**placement))


class PretendedDevice(Device):
    """The CPU as a GPU with little memory: buffers count, and each run takes so many bytes for every row."""

    bounded = True

    def __init__(self, size: int, per_row: int = 0, name: str = "pretended:0") -> None:
        super().__init__(1)
        self.name = name
        self.size = size
        self.per_row = per_row
        self.held = 0  # by static buffers
        self.cached = 0  # by what ran last, until it is released
        self.most = size
        self.released = 0
        self.tensors: list[int] = []

    def zeros(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made = super().zeros(shape, dtype)
        self._take(made.nbytes)
        self.held += made.nbytes
        return made

    def warm(self, run: Run) -> int:
        return len(next(iter(self._run(run).values()))) * self.per_row

    def capture(self, run: Run) -> Program:
        return self.call(run)

    def call(self, run: Run) -> Program:
        return super().call(lambda: self._run(run))

    def _run(self, run: Run) -> Mapping[str, torch.Tensor]:
        outputs = run()
        rows = len(next(iter(outputs.values())))
        needed = rows * self.per_row
        self._take(needed - self.cached if needed > self.cached else 0)
        self.cached = max(self.cached, needed)
        return outputs

    def _take(self, more: int) -> None:
        if self.allocated() + more > min(self.size, self.most):
            raise torch.cuda.OutOfMemoryError(f"pretended: out of memory, tried to allocate {more} bytes")

    def allocated(self) -> int:
        return self.held + self.cached

    def free(self) -> int:
        return self.size - self.allocated()

    def limit(self, most: int) -> None:
        self.most = most

    def release(self) -> None:
        self.cached = 0
        self.released += 1
