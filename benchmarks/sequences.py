"""What keeping sequences costs: requests per second of a model with the oldest and with the direct strategy,
beside the same model without sequences, in turns in one process; and the processor time of a request, which
says more where the machine is shared. Each client sends one request after the other.
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
from time import monotonic, process_time

import numpy as np
import onnx
import uvloop
from onnx import TensorProto, helper

from carpool.engine.engine import Engine

WIDTH = 16
LENGTH = 10  # requests of a sequence
ROWS = 32  # of a batch, and so the sequences that the direct strategy has at a time
ALONE, OLDEST, DIRECT = "alone", "oldest", "direct"
SETTINGS = {
    ALONE: f"max_batch = {ROWS}\n[batching]\n",
    OLDEST: f"max_batch = {ROWS}\n[batching]\n[sequences]\nmax_candidates = 1024\n",
    DIRECT: f'max_batch = {ROWS}\n[batching]\n[sequences]\nstrategy = "direct"\n',
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


async def load(engine: Engine, model: str, clients: int, seconds: float) -> tuple[float, float]:
    """Requests per second, and microseconds of the processors for each. A sequence that is begun is ended."""
    inputs = {"x": np.ones((1, WIDTH), np.float32)}
    began, computed = monotonic(), process_time()
    until = began + seconds
    counts = [0] * clients

    async def client(number: int) -> None:
        step = 0
        while monotonic() < until or step:
            start, end = step == 0, step == LENGTH - 1
            if model != ALONE:
                said = {"sequence_id": number + 1, "sequence_start": start, "sequence_end": end}
                await engine.infer(model, inputs, **said)  # type: ignore[arg-type]
            else:
                await engine.infer(model, inputs)
            counts[number] += 1
            step = 0 if end else step + 1

    await asyncio.gather(*map(client, range(clients)))
    total = sum(counts)
    return total / (monotonic() - began), (process_time() - computed) / total * 1e6


async def measure(clients: Sequence[int], rounds: int, seconds: float) -> list[dict[str, float]]:
    rows = []
    with TemporaryDirectory(prefix="carpool-sequences-") as folder:
        async with Engine(write_models(Path(folder))) as engine:
            for count in clients:
                names = [name for name in SETTINGS if name != DIRECT or count <= ROWS]
                found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
                for turn in range(rounds):
                    for name in sorted(names, reverse=bool(turn % 2)):
                        found[name].append(await load(engine, name, count, seconds))
                row: dict[str, float] = {"clients": count}
                for name, turns in found.items():
                    pairs = list(zip(turns, found[ALONE], strict=True))
                    row[name] = round(median(rate for rate, _ in turns))
                    row[f"{name}_us"] = median(spent for _, spent in turns)
                    row[f"{name}_ratio"] = median(kept[0] / alone[0] for kept, alone in pairs)
                rows.append(row)
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
    print(
        "clients  without sequences      µs  oldest strategy      µs  ratio  direct strategy      µs  ratio"
    )
    for row in rows:
        shown = [f"{row['clients']:7}  {row[ALONE]:17}  {row[f'{ALONE}_us']:6.1f}"]
        shown += [
            f"{row[name]:15}  {row[f'{name}_us']:6.1f}  {row[f'{name}_ratio']:5.2f}"
            for name in (OLDEST, DIRECT)
            if name in row
        ]
        print("  ".join(shown))


if __name__ == "__main__":
    main()
