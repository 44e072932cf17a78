"""How long the demo models take for one picture in onnxruntime: what a promise has to be larger than.

The fastest run says what the model needs, the median what it got while the machine did other things too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import onnxruntime

from carpool.demo import demo_models


@dataclass(frozen=True)
class Row:
    model: str
    megabytes: float
    fastest_ms: float
    median_ms: float
    two_threads_ms: float  # the fastest


def measure(folder: Path, runs: int) -> Row:
    file = folder / "1" / "model.onnx"
    one, two = (run(file, threads, runs) for threads in (1, 2))
    found = (file.stat().st_size / 1e6, min(one), median(one), min(two))
    return Row(folder.name, *(round(number, 1) for number in found))


def run(file: Path, threads: int, runs: int) -> list[float]:
    """Milliseconds of each run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    [asked] = session.get_inputs()
    shape = [size if isinstance(size, int) else 1 for size in asked.shape]
    inputs = {asked.name: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    session.run(None, inputs)
    taken = []
    for _ in range(runs):
        start = perf_counter()
        session.run(None, inputs)
        taken.append((perf_counter() - start) * 1e3)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few runs each")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [measure(folder, 3 if given.quick else 30) for folder in demo_models()]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{'model':<20} {'MB':>6} {'ms, fastest':>12} {'median':>8} {'2 threads, fastest':>19}")
    for row in rows:
        name, size, *taken = asdict(row).values()
        print(f"{name:<20} {size:>6} {taken[0]:>12} {taken[1]:>8} {taken[2]:>19}")


if __name__ == "__main__":
    main()
