"""What keeping sequences costs: requests per second of a model with the oldest strategy, beside the same
model without sequences, in turns in one process. Each client sends one request after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic

import numpy as np
import onnx
import uvloop
from onnx import TensorProto, helper

from carpool.engine.engine import Engine

WIDTH = 16
LENGTH = 10  # requests of a sequence
SETTINGS = {
    "alone": "max_batch = 16\n[batching]\n",
    "sequences": "max_batch = 16\n[batching]\n[sequences]\nmax_candidates = 1024\n",
}


def write_models(folder: Path) -> Path:
    shape = ["n", WIDTH]
    given, wanted = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [given], [wanted])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for name, settings in SETTINGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "model.toml").write_text(settings)
        onnx.save(made, str(folder / name / "1" / "model.onnx"))
    return folder


async def load(engine: Engine, model: str, clients: int, seconds: float) -> float:
    """Requests per second. A sequence that is begun is ended."""
    inputs = {"x": np.ones((1, WIDTH), np.float32)}
    began = monotonic()
    until = began + seconds
    counts = [0] * clients

    async def client(number: int) -> None:
        step = 0
        while monotonic() < until or step:
            start, end = step == 0, step == LENGTH - 1
            if model == "sequences":
                said = {"sequence_id": number + 1, "sequence_start": start, "sequence_end": end}
                await engine.infer(model, inputs, **said)  # type: ignore[arg-type]
            else:
                await engine.infer(model, inputs)
            counts[number] += 1
            step = 0 if end else step + 1

    await asyncio.gather(*map(client, range(clients)))
    return sum(counts) / (monotonic() - began)


async def measure(clients: Sequence[int], rounds: int, seconds: float) -> list[dict[str, float]]:
    rows = []
    with TemporaryDirectory(prefix="carpool-sequences-") as folder:
        async with Engine(write_models(Path(folder))) as engine:
            for count in clients:
                found: dict[str, list[float]] = {name: [] for name in SETTINGS}
                for turn in range(rounds):
                    for name in sorted(SETTINGS, reverse=bool(turn % 2)):
                        found[name].append(await load(engine, name, count, seconds))
                pairs = zip(found["sequences"], found["alone"], strict=True)
                ratio = median(kept / alone for kept, alone in pairs)
                rows.append(
                    {"clients": count, **{n: round(median(f)) for n, f in found.items()}, "ratio": ratio}
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = uvloop.run(measure(arguments.clients, arguments.rounds, arguments.seconds))
    if arguments.json:
        print(json.dumps({"machine": platform.processor(), "rows": rows}))
        return
    print("clients  without sequences  oldest strategy  ratio")
    for row in rows:
        print(f"{row['clients']:7}  {row['alone']:17}  {row['sequences']:15}  {row['ratio']:.2f}")


if __name__ == "__main__":
    main()
