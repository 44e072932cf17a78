"""One promise for two steps, through real sockets: an ensemble on pretended devices, beside the simulator.

Two models that only take time (40 ms + 10 ms per image, then 30 ms + 8 ms), each with a device of its own,
asked within a second at 0.9, 1.3 and 3 times what they can promise together, by independent clients:

    promise     an ensemble with `slo_ms`
    knobs       the same ensemble without, its models with Triton's knobs and a delay of 5 ms
    by hand     clients that call the two models themselves, each with a promise, the second with what is left

With `--fan-out` it is a `pipeline.toml` instead: a detector that finds 0 to 20 things (4.2 on average) in
pictures that say how many, then 30 ms + 2.2 ms for each of them; by hand, a client asks about all that were
found at once.

With `--cpu` it is what one more step costs all processes of the server, by the kernel's count: of ensembles
with one to four steps, and of pipelines with one and two, whose models take next to no time.

Counted is what is answered in time, over the most that is possible; the first seconds are left out. Devices
this slow leave the cores idle, so that a busy machine hardly shows.

    python benchmarks/pipeline.py            # about five minutes
    python benchmarks/pipeline.py --quick    # one load, shorter
    python benchmarks/pipeline.py --fan-out
    python benchmarks/pipeline.py --cpu      # about a minute
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
from PIL import Image

import carpool
from carpool.core.objectives import FixedBatching, Promise
from carpool.errors import CarpoolError
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Scenario, measure
from carpool.sim.step_simulation import FanOut, StepPlan, bound, capacity, read_steps
from load.carpool_server import carpool_server
from load.open_loop import Shower, in_time, pour
from load.processes import spent, tree_cpu
from load.program import run_program

CURVES, SLO, MAX_BATCH, DELAY = ("40+10", "30+8"), 1.0, 32, 0.005
FAN_OUT_CURVES = ("40+10", "30+2.2@4.2")
LOADS = (0.9, 1.3, 3.0)
WARM_UP_S = 3.0
MODES = ("promise", "knobs", "by hand")
STEPS, QUICK, CLIENTS = 4, "0.3+0.01", 8
_TENSOR = 'datatype = "FP32"\nshape = [4]\n'
_STEP = (
    'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{x}" }} '
    'output_map {{ key: "y" value: "{y}" }} }}'
)


@dataclass(frozen=True)
class Row:
    mode: str
    load: float
    offered_rps: float
    in_time_rps: float
    of_the_bound: float
    simulated: float | None  # the same, under the virtual clock


def write(folder: Path, mode: str) -> Path:
    """A repository of two models and the ensemble `both`."""
    head = {"promise": "", "knobs": "", "by hand": f"slo_ms = {SLO * 1e3:g}"}[mode]
    tail = f"[batching]\nmax_delay_ms = {DELAY * 1e3:g}\n" if mode == "knobs" else ""
    for name, curve in zip(("first", "second"), CURVES, strict=True):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.toml").write_text(
            f'backend = "fake"\nmax_batch = {MAX_BATCH}\n{head}\n[fake]\ncurve = "{curve}"\n'
            f'[[input]]\nname = "x"\n{_TENSOR}[[output]]\nname = "y"\n{_TENSOR}{tail}'
        )
    if mode != "by hand":
        promise = f'parameters {{ key: "slo_ms" value {{ string_value: "{SLO * 1e3:g}" }} }}'
        (folder / "both" / "1").mkdir(parents=True)
        (folder / "both" / "config.pbtxt").write_text(
            f'platform: "ensemble" max_batch_size: {MAX_BATCH}\n{promise if mode == "promise" else ""}\n'
            'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }\n'
            'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }\n'
            f"ensemble_scheduling {{ {_STEP.format(model='first', x='x', y='mid')} "
            f"{_STEP.format(model='second', x='mid', y='y')} }}\n"
        )
    return folder


async def by_hand(url: str, rate: float, seconds: float, seed: int) -> tuple[int, int]:
    """How many came after the warm-up, and how many of them were answered in time."""
    good = 0

    async def ask(at: float, client: carpool.AsyncClient) -> None:
        nonlocal good
        x = np.zeros((1, 4), np.float32)
        began = time.monotonic()
        try:
            answer = await client.infer("first", {"x": x}, deadline_ms=SLO * 1e3)
            left = SLO - (time.monotonic() - began)
            if left > 0:
                await client.infer("second", {"x": answer["y"]}, deadline_ms=left * 1e3)
        except CarpoolError:
            return
        good += at >= WARM_UP_S and time.monotonic() - began <= SLO

    async with carpool.AsyncClient(url, patience_s=0.0, connections=512) as client:
        start = time.monotonic()
        asked = []
        arrivals = poisson(rate, seconds, Random(seed))
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
            asked.append(asyncio.ensure_future(ask(arrival.at, client)))
        await asyncio.gather(*asked)
    return sum(arrival.at >= WARM_UP_S for arrival in arrivals), good


_FINDER = """
# As many boxes as the picture is bright, after 40 ms and 10 ms for each picture.
import time
import numpy as np

INPUTS = {"images": ("FP32", [3, 32, 32])}
OUTPUTS = {"boxes": ("FP32", [20, 4]), "scores": ("FP32", [20, 1])}
MAX_BATCH = 32

class Model:
    def predict(self, images):
        end = time.monotonic() + 0.040 + 0.010 * len(images)
        boxes = np.zeros((len(images), 20, 4), np.float32)
        boxes[:, :, 0] = boxes[:, :, 1] = np.arange(20)
        boxes[:, :, 2:] = boxes[:, :, :2] + 12
        counts = np.round(images.mean(axis=(1, 2, 3)) * 20)
        scores = (np.arange(20)[None, :, None] < counts[:, None, None]).astype(np.float32)
        time.sleep(max(0.0, end - time.monotonic()))
        return {"boxes": boxes, "scores": scores}
"""
_FINDER_TOML = """task = "detect"
{head}
[detect]
format = "boxes_scores"
score = 0.5
iou = 1.0
{tail}"""
_NAMER_TOML = """backend = "fake"
task = "classify"
max_batch = 32
{head}
[fake]
curve = "{curve}"
[[input]]
name = "images"
datatype = "FP32"
shape = [3, 32, 32]
[[output]]
name = "logits"
datatype = "FP32"
shape = [3]
{tail}"""
_STREET = """{head}
[[step]]
name = "find"
model = "first"
[[step]]
name = "kind"
model = "second"
each = "find.boxes"
"""


def write_fan_out(folder: Path, mode: str) -> Path:
    """A repository of a detector, a classifier and the pipeline `both`."""
    promise = f"slo_ms = {SLO * 1e3:g}"
    head = promise if mode == "by hand" else ""
    tail = f"[batching]\nmax_delay_ms = {DELAY * 1e3:g}\n" if mode == "knobs" else ""
    for name in ("first", "second", *(("both",) if mode != "by hand" else ())):
        (folder / name).mkdir(parents=True)
    (folder / "first" / "model.py").write_text(_FINDER)
    (folder / "first" / "model.toml").write_text(_FINDER_TOML.format(head=head, tail=tail))
    second = _NAMER_TOML.format(head=head, tail=tail, curve=FAN_OUT_CURVES[1].partition("@")[0])
    (folder / "second" / "model.toml").write_text(second)
    if mode != "by hand":
        street = _STREET.format(head=promise if mode == "promise" else "")
        (folder / "both" / "pipeline.toml").write_text(street)
    return folder


def pictures_of() -> list[bytes]:
    """By how many things are found in them."""
    found = []
    for count in range(21):
        file = io.BytesIO()
        Image.new("RGB", (32, 32), (round(255 * count / 20),) * 3).save(file, "PNG")
        found.append(file.getvalue())
    return found


async def ask_fan_out(url: str, mode: str, rate: float, seconds: float, seed: int) -> tuple[int, int, float]:
    """As `by_hand`, for pictures; or the pipeline, which does it itself. And the crops of each that came."""
    # Never from one generator, or two of one seed: those who come after a gap would bring the most crops.
    good, fan_out, pictures = 0, FanOut(4.2), pictures_of()
    arrivals, random = poisson(rate, seconds, Random(seed)), Random(f"crops of {seed}")
    counts = [fan_out.draw(random) for _ in arrivals]

    async def ask(at: float, count: int, client: carpool.AsyncClient) -> None:
        nonlocal good
        began = time.monotonic()
        try:
            if mode != "by hand":
                await client.detect(pictures[count], model="both")
            else:
                found = await client.detect(pictures[count], model="first", deadline_ms=SLO * 1e3)
                left = SLO - (time.monotonic() - began)
                if left > 0 and len(found.boxes):
                    crops = np.zeros((len(found.boxes), 3, 32, 32), np.float32)
                    await client.infer("second", {"images": crops}, deadline_ms=left * 1e3)
        except CarpoolError:
            return
        good += at >= WARM_UP_S and time.monotonic() - began <= SLO

    async with carpool.AsyncClient(url, patience_s=0.0, connections=512) as client:
        start = time.monotonic()
        asked = []
        for arrival, count in zip(arrivals, counts, strict=True):
            await asyncio.sleep(max(0.0, start + arrival.at - time.monotonic()))
            asked.append(asyncio.ensure_future(ask(arrival.at, count, client)))
        await asyncio.gather(*asked)
    counted = [count for arrival, count in zip(arrivals, counts, strict=True) if arrival.at >= WARM_UP_S]
    return len(counted), good, sum(counted) / len(counted)


def measured(mode: str, load: float, seconds: float, steps: Sequence[StepPlan], fan_out: bool) -> Row:
    rate, lucky = load * capacity(steps, SLO), tuple(steps)
    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as name:
        models = (write_fan_out if fan_out else write)(Path(name) / "models", mode)
        with carpool_server(models) as server:
            if fan_out:
                came, good, crops = asyncio.run(ask_fan_out(server.url, mode, rate, seconds, 1))
                lucky = (steps[0], replace(steps[1], images=crops))
            elif mode == "by hand":
                came, good = asyncio.run(by_hand(server.url, rate, seconds, 1))
            else:
                shower = Shower(server.url, ((rate, seconds),), SLO, timeout=4 * SLO, model="both")
                (fallen,) = pour([shower])
                counted = fallen.between(WARM_UP_S, seconds)
                came, good = len(counted), in_time(counted, SLO)
    offered, found = came / (seconds - WARM_UP_S), good / (seconds - WARM_UP_S)
    most = bound(lucky, SLO, offered)  # with the arrivals and the crops as they fell
    return Row(mode, load, offered, found, found / most, simulated(mode, rate, steps))


def write_quick(folder: Path) -> Path:
    """Models that take next to nothing; the ensembles e1 to e4, the pipelines p1 and p2."""
    promise = f"slo_ms = {SLO * 1e3:g}"
    folder.mkdir()
    for number in range(1, STEPS + 1):
        (folder / f"m{number}").mkdir()
        (folder / f"m{number}" / "model.toml").write_text(
            f'backend = "fake"\nmax_batch = {MAX_BATCH}\n{promise}\n[fake]\ncurve = "{QUICK}"\n'
            f'[[input]]\nname = "x"\n{_TENSOR}[[output]]\nname = "y"\n{_TENSOR}'
        )
        steps = [
            _STEP.format(model=f"m{n}", x="x" if n == 1 else f"t{n - 1}", y="y" if n == number else f"t{n}")
            for n in range(1, number + 1)
        ]
        (folder / f"e{number}" / "1").mkdir(parents=True)
        (folder / f"e{number}" / "config.pbtxt").write_text(
            f'platform: "ensemble" max_batch_size: {MAX_BATCH}\n'
            f'parameters {{ key: "slo_ms" value {{ string_value: "{SLO * 1e3:g}" }} }}\n'
            'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }\n'
            'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }\n'
            f"ensemble_scheduling {{ {' '.join(steps)} }}\n"
        )
    finder = _FINDER.replace("0.040 + 0.010 * len(images)", "0.0003")
    files = {
        "first/model.py": finder,
        "first/model.toml": _FINDER_TOML.format(head=promise, tail=""),
        "second/model.toml": _NAMER_TOML.format(head=promise, tail="", curve=QUICK),
        "p1/pipeline.toml": _STREET.format(head=promise).rpartition("[[step]]")[0],
        "p2/pipeline.toml": _STREET.format(head=promise),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def cpu_of_each(url: str, process: int, rounds: int, requests: int) -> dict[str, float]:
    """µs of all processes of the server for each request, by what is asked: the median of rounds in turn."""
    x, pictures = np.zeros((1, 4), np.float32), pictures_of()
    found: dict[str, list[float]] = {}
    async with carpool.AsyncClient(url) as client:
        asks: dict[str, Callable[[], Awaitable[object]]] = {
            "m1": lambda: client.infer("m1", {"x": x}),
            **{f"e{n}": partial(client.infer, f"e{n}", {"x": x}) for n in range(1, STEPS + 1)},
            "p1": lambda: client.detect(pictures[1], model="p1"),
            "p2": lambda: client.detect(pictures[1], model="p2"),
            "p2, 4 crops": lambda: client.detect(pictures[4], model="p2"),
        }

        async def one(ask: Callable[[], Awaitable[object]]) -> None:
            for _ in range(requests // CLIENTS):
                await ask()

        for number in range(rounds + 1):
            for name, ask in asks.items():
                before = tree_cpu(process)
                await asyncio.gather(*(one(ask) for _ in range(CLIENTS)))
                if number:  # the first is to warm up
                    found.setdefault(name, []).append(spent(before, tree_cpu(process)) / requests * 1e6)
    return {name: median(values) for name, values in found.items()}


def cpu(rounds: int, requests: int) -> dict[str, float]:
    """And how fast the cores are just now, which on a shared machine is not always the same."""
    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as name:
        models = write_quick(Path(name) / "models")
        with carpool_server(models, options=("--frontends", "1")) as server:
            found = asyncio.run(cpu_of_each(server.url, server.process.pid, rounds, requests))
    began = time.process_time()
    sum(number * number for number in range(1_000_000))
    return found | {
        "a step of an ensemble": (found[f"e{STEPS}"] - found["e1"]) / (STEPS - 1),
        "a step of a pipeline": found["p2"] - found["p1"],
        "a crop": (found["p2, 4 crops"] - found["p2"]) / 3,
        "a million squares, ms": (time.process_time() - began) * 1e3,
    }


def simulated(mode: str, rate: float, steps: Sequence[StepPlan]) -> float | None:
    if mode == "by hand":
        return None
    settings = Promise(SLO, MAX_BATCH) if mode == "promise" else FixedBatching(MAX_BATCH, max_delay=DELAY)
    scenario = Scenario(
        steps[0].curve, SLO, settings, rate, seconds=60.0, noise=0.0, stall_share=0.0, steps=tuple(steps)
    )
    return measure(scenario).fraction_of_bound


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one load, shorter")
    parser.add_argument("--modes", default=",".join(MODES), help="those to run")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="times what can be promised")
    parser.add_argument("--fan-out", action="store_true", help="a pipeline.toml with crops")
    parser.add_argument("--json", action="store_true", help="print one object for machines")
    parser.add_argument("--cpu", action="store_true", help="what one more step costs")
    args = parser.parse_args()
    if args.cpu:
        for what, value in cpu(2 if args.quick else 5, 400).items():
            print(f"{what:<24} {value:6.0f}", flush=True)
        return 0
    steps = read_steps(FAN_OUT_CURVES if args.fan_out else CURVES, MAX_BATCH)
    seconds = 9.0 if args.quick else 20.0
    found = []
    for load in (3.0,) if args.quick else map(float, args.loads.split(",")):
        for mode in args.modes.split(","):
            row = measured(mode, load, seconds, steps, args.fan_out)
            found.append(row)
            if not args.json:
                beside = "" if row.simulated is None else f", simulated {row.simulated:.3f}"
                print(
                    f"{mode:<8} {load:>4g}×  {row.in_time_rps:6.1f}/s in time of {row.offered_rps:6.1f}/s: "
                    f"{row.of_the_bound:.3f} of the bound{beside}",
                    flush=True,
                )
    if args.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
    return 0


if __name__ == "__main__":
    run_program(main, "pipeline")
