"""The demo models on OpenVINO beside onnxruntime, and in 8 bits beside FP32: times on one thread each.

All that are compared are loaded at once and run in turn, a few batches each; a ratio is taken between the
neighbours of one round, and the median of them counts. The 8-bit files are made here by onnxruntime's own
quantisation, calibrated with parts of the demo pictures; `likeness` compares their outputs for the whole
pictures with those of FP32 (1: the same direction; the worst picture counts).
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from carpool import backends
from carpool.backends import Backend
from carpool.backends.backend import Placement
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion, find_models
from carpool.demo import demo_models, pictures
from carpool.types import DATATYPES, Array, TensorSpec
from carpool.vision.decode import Decoded, decode
from carpool.vision.transforms import Transform

FIRST = "onnxruntime"
BATCHES = (1, 4)
_PARTS = 4  # of each picture, to calibrate with


@dataclass(frozen=True)
class Row:
    model: str
    engine: str
    megabytes: float
    batch: int
    ms: float  # of the batch, the median
    ratio: float  # to FP32 on onnxruntime, the median of the rounds
    likeness: float


class Pictures:
    """The demo pictures as one model takes them."""

    def __init__(self, config: ModelConfig) -> None:
        [tensor] = config.inputs
        assert config.image is not None
        spec = TensorSpec(tensor.name, DATATYPES[tensor.datatype], tensor.dims)
        self.name = tensor.name
        self._transform = Transform(config.image, spec, config.name)
        self._pixels = [decode(path.read_bytes()).pixels for path in pictures()]
        self.whole = np.concatenate([self._prepared(pixels) for pixels in self._pixels])

    def parts(self) -> Iterator[Mapping[str, Array]]:
        random = np.random.default_rng(0)
        for pixels in self._pixels:
            for _ in range(_PARTS):
                height, width = (int(side * random.uniform(0.5, 0.9)) for side in pixels.shape[:2])
                top = random.integers(pixels.shape[0] - height)
                left = random.integers(pixels.shape[1] - width)
                part = np.ascontiguousarray(pixels[top : top + height, left : left + width])
                yield {self.name: self._prepared(part)}

    def batch(self, size: int) -> Array:
        return np.concatenate([self.whole] * size)[:size]

    def _prepared(self, pixels: Array) -> Array:
        made: Array = np.empty(self._transform.shape, self._transform.dtype)
        self._transform.prepare(Decoded(pixels, pixels.shape[1], pixels.shape[0]), made)
        return made[None]


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, shown: Pictures) -> None:
        self._parts = shown.parts()

    def get_next(self) -> Mapping[str, Array] | None:
        return next(self._parts, None)


def quantised(file: Path, shown: Pictures, folder: Path) -> Path:
    """The same model with weights and activations of 8 bits."""
    plain, small = folder / "plain.onnx", folder / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(plain)  # its weights computed back to FP32, once
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    with warnings.catch_warnings(action="ignore"):  # of channels whose weights are all zero
        quantize_static(
            str(plain),
            str(small),
            Calibration(shown),
            quant_format=QuantFormat.QDQ,
            per_channel=onnx.load(plain).opset_import[0].version >= 13,  # the format has it from there on
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    return small


def load(config: ModelConfig, engine: str, file: Path) -> Backend:
    return backends.load(replace(config, backend=engine), ModelVersion(1, file), Placement(threads=1))


def likeness(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """The cosine between all outputs for each picture; the least."""
    rows = [
        np.concatenate([np.reshape(array, (len(array), -1)) for _, array in sorted(outputs.items())], axis=1)
        for outputs in (one, other)
    ]
    lengths = np.prod([np.linalg.norm(row, axis=1) for row in rows], axis=0)
    return float(np.min(np.sum(rows[0] * rows[1], axis=1) / lengths))


def measure(folder: Path, rounds: int, runs: int, scratch: Path) -> list[Row]:
    [source], _ = find_models([folder])
    file = source.versions[0].file
    assert file is not None
    config = backends.describe(source.config, source.versions[0])
    shown = Pictures(config)
    small = quantised(file, shown, scratch)
    plain = scratch / "plain.onnx"
    files = {FIRST: plain, "openvino": plain, f"{FIRST}, INT8": small, "openvino, INT8": small}
    loaded = {name: load(config, name.partition(",")[0], path) for name, path in files.items()}
    answers = {name: backend.run({shown.name: shown.whole}, []) for name, backend in loaded.items()}
    alike = {name: likeness(answers[FIRST], answer) for name, answer in answers.items()}
    rows = []
    for size in BATCHES:
        batch = {shown.name: shown.batch(size)}
        taken = in_turn(loaded, batch, rounds, runs)
        for name, times in taken.items():
            ratio = median(own / first for own, first in zip(times, taken[FIRST], strict=True))
            megabytes = files[name].stat().st_size / 1e6
            found = (megabytes, size, median(times) * 1e3, ratio, alike[name])
            rows.append(Row(folder.name, name, *(round(number, 3) for number in found)))
    for backend in loaded.values():
        backend.close()
    return rows


def in_turn(
    loaded: Mapping[str, Backend], batch: Mapping[str, Array], rounds: int, runs: int
) -> dict[str, list[float]]:
    """Seconds of a batch in each round: the fastest of a few, as what disturbs one only makes it slower."""
    taken: dict[str, list[float]] = {name: [] for name in loaded}
    for backend in loaded.values():
        backend.run(batch, [])
    for _ in range(rounds):
        for name, backend in loaded.items():
            fastest = float("inf")
            for _ in range(runs):
                start = perf_counter()
                backend.run(batch, [])
                fastest = min(fastest, perf_counter() - start)
            taken[name].append(fastest)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two models, a few rounds each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", help="one of the demo models alone")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # the quantisation's advice
    folders = [folder for folder in demo_models() if given.model in (None, folder.name)]
    folders = folders[:2] if given.quick else folders
    rounds, runs = (3, 2) if given.quick else (9, 3)
    rows = []
    for folder in folders:
        with tempfile.TemporaryDirectory() as scratch:
            rows += measure(folder, rounds, runs, Path(scratch))
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"onnxruntime {version('onnxruntime')}, OpenVINO {version('openvino')}, one thread each")
    print(f"{'model':<20} {'engine':<18} {'MB':>6} {'batch':>6} {'ms':>8} {'ratio':>6} {'likeness':>9}")
    for row in rows:
        print(
            f"{row.model:<20} {row.engine:<18} {row.megabytes:>6.1f} {row.batch:>6} {row.ms:>8.1f} "
            f"{row.ratio:>6.2f} {row.likeness:>9.4f}"
        )


if __name__ == "__main__":
    main()
