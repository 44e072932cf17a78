"""ONNX files on the GPU without onnxruntime's CUDA: are answers right, and is a network as fast as its own?

Exports of zoo.py run as PyTorch networks in fp16; their answers are held against onnxruntime's on the CPU.
ResNet-50 runs compiled, once as torchvision's network and once as an ONNX file made of it, in turns.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.repository import find_models
from carpool.engine.loading.loading import Loading
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.errors import CarpoolError
from chip.repository import write_model
from zoo_exports import Export, exports

CLOSE = 0.02  # of the largest value of an output: fp16, through some tens of layers
SCORE = 4  # the column of it in boxes that were chosen: whose order hangs on the last bits of equals
TURNS = 3
EFFORT = Effort(seconds=1.0, warm_up=0.3)


@dataclass(frozen=True)
class Compared:
    export: str
    axes: str
    error: float | None = None  # the largest, over the largest value
    why: str = ""  # it does not run
    own: float = 0.0  # the error of the network itself in that precision, looked at where it is far off

    @property
    def right(self) -> bool:
        return self.error is not None and self.error <= max(CLOSE, 2 * self.own)


@contextlib.contextmanager
def opened(folder: Path, device: str, precision: str) -> Iterator[Any]:
    settings = f'[pytorch]\ndevice = "{device}"\nprecision = "{precision}"\n'
    (folder / "model.toml").write_text(f'backend = "onnx_torch"\nfile = "net.onnx"\n{settings}')
    (source,), _ = find_models([folder], gpus=0 if device == "cpu" else 1)
    version = source.versions[0]
    config = backends.describe(source.config, version)
    backend = backends.load(config, version, Placement(threads=1, gpu=None if device == "cpu" else 0))
    try:
        yield backend
    finally:
        backend.close()


def compare(export: Export, device: str) -> Compared:
    precision = "fp32" if device == "cpu" else "fp16"
    with tempfile.TemporaryDirectory(prefix="onnx-") as place:
        folder = Path(place) / "m"
        folder.mkdir()
        file = export.write(folder)
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        x = np.random.default_rng(3).random((1, 3, *export.side), np.float32)
        right = dict(
            zip([one.name for one in session.get_outputs()], session.run(None, {"images": x}), strict=True)
        )
        try:
            with opened(folder, device, precision) as backend:
                found = {name: np.array(value) for name, value in backend.run({"images": x}, ()).items()}
        except CarpoolError as error:
            return Compared(export.name, export.axes, why=error.message.replace(str(folder), "…"))
    chosen = "end to end" in export.name
    error = max(_error(found[name], right[name], chosen) for name in right)
    own = _own_error(export, x, list(right.values()), device) if error > CLOSE else 0.0
    return Compared(export.name, export.axes, error, own=own)


def _own_error(export: Export, x: np.ndarray, right: Sequence[np.ndarray], device: str) -> float:
    """Random weights may make numbers that half precision cannot hold, whoever computes with them."""
    torch.manual_seed(7)
    network = export.network().eval().to(device).half()
    try:
        with torch.inference_mode():
            made = network(torch.from_numpy(x).to(device).half())
    except (RuntimeError, TypeError):  # it mixes devices, or precisions
        return 0.0
    answers = made if isinstance(made, tuple) else (made,)
    pairs = zip(answers, right, strict=True)
    return max(_error(one.cpu().numpy(), other, chosen=False) for one, other in pairs)


def _error(found: np.ndarray, right: np.ndarray, chosen: bool) -> float:
    if chosen and right.ndim == 3:
        found, right = found[..., SCORE], right[..., SCORE]
    if found.shape != right.shape:
        return float("inf")
    largest = float(np.max(np.abs(right), initial=0.0)) or 1.0
    return round(float(np.max(np.abs(found.astype(np.float32) - right), initial=0.0)) / largest, 5)


def comparable(device: str, seconds: float) -> list[Compared]:
    """As many as that time allows, every kind of head first."""
    made, _ = exports(quick=False)
    kept = [one for one in made if not one.script and one.make is None]
    found: list[Compared] = []
    end = time.monotonic() + seconds
    for export in sorted(kept, key=lambda one: not one.quick):
        if time.monotonic() > end:
            break
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(sys.stderr):
            found.append(compare(export, device))
    return found


def write_onnx(folder: Path, buckets: list[int], device: str) -> Path:
    """The same network as an ONNX file, with the same settings."""
    import torchvision

    repository = write_model(
        folder, "resnet50", slo_ms=100, device=device, buckets=buckets, instances=2, compiled=device != "cpu"
    )
    model = repository / "resnet50"
    settings = (model / "model.toml").read_text().replace('backend = "pytorch"', 'backend = "onnx_torch"')
    (model / "model.toml").write_text(settings.replace('module = "model.py:build"\n', ""))
    (model / "1" / "model.py").unlink()
    torch.manual_seed(1)
    network = torchvision.models.resnet50(weights=None).eval()
    torch.onnx.export(
        network,
        (torch.rand(1, 3, 224, 224),),
        str(model / "1" / "model.onnx"),
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "n"}, "logits": {0: "n"}},
        dynamo=False,
    )
    return model


def rates(device: str, batch: int) -> dict[str, float]:
    """Tensors per second of two instances, the best of some turns."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with tempfile.TemporaryDirectory(prefix="onnx-") as place, warnings.catch_warnings(action="ignore"):
        folders = {
            "native": write_model(
                Path(place) / "own",
                "resnet50",
                slo_ms=100,
                device=device,
                buckets=[1, batch],
                instances=2,
                compiled=device != "cpu",
            )
            / "resnet50",
            "onnx": write_onnx(Path(place) / "onnx", [1, batch], device),
        }
        ready = {}
        for name, folder in folders.items():
            (source,), _ = find_models([folder], gpus=0 if device == "cpu" else 1)
            ready[name] = Loading(source.config, source.versions[0]).prepare(lambda _: None)
            print(name, *ready[name].choices[-2:], file=sys.stderr)
        best = dict.fromkeys(ready, 0.0)
        for _ in range(TURNS):
            for name, one in ready.items():
                best[name] = max(best[name], Measuring(one.backends, one.signature, EFFORT).rate(batch))
        for one in ready.values():
            one.close()
    return {name: round(rate) for name, rate in best.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="for comparing answers")
    parser.add_argument("--batch", type=int, default=128)
    given = parser.parse_args(arguments)
    compared = comparable(given.device, given.seconds)
    found = {"compared": [asdict(one) for one in compared], "right": sum(one.right for one in compared)}
    if given.batch:
        found["rates"] = rates(given.device, given.batch)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
