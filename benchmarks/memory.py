"""What the demo's models take of memory, and what sparing it costs.

`ways`: arenas that keep what batches took, the same with memory patterns (a block for a whole batch, beside
those of the batch from which the pattern was learned), arenas that are shrunk after each batch, and sessions
without arenas, each in a process of its own, in turns. Times are of the thread's processor, so that other
work hardly matters; new pages are paid for in them. `table`: megabytes beside the weights, by instances and
batch size. `server`: resident megabytes of the demo's engine after its first start, after its second, and
directly and ten seconds after 1,000 mixed requests. Aim: 600 at most, and 1.03 times the time of a batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime

from carpool import backends
from carpool.config.repository import find_models
from carpool.demo import demo_models, pictures
from carpool.engine.loading.loading import Loading
from carpool.engine.profile.layouts import Layout, close_all
from carpool.engine.profile.measuring import Measuring
from carpool.engine.profile.run_memory import batch_bytes, give_back_all
from carpool.engine.run.model_inputs import signature_of
from carpool.memory.free_memory import own_bytes
from load.burst import LoadError
from load.carpool_server import CarpoolServer, carpool_server
from load.program import run_program, tell

KEPT, PATTERNS, SHRUNK, NONE = WAYS = ("kept", "patterns", "shrunk", "none")
LARGEST = {"u2netp": 2}  # of the others 8
TASKS = {"efficientnet_lite0": "classify", "nanodet": "detect", "open_nsfw": "classify", "u2netp": "segment"}
SPAWN = multiprocessing.get_context("spawn")
REQUESTS, CLIENTS, REST_S = 1000, 16, 10.0


def one_way(asked: Connection, file: str, way: str) -> None:
    """The process of one way: for each size that it is sent, the processor's seconds of one run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = way != NONE
    options.enable_mem_pattern = way == PATTERNS
    run_options = onnxruntime.RunOptions()
    if way == SHRUNK:
        run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    [tensor] = session.get_inputs()
    while (size := asked.recv()) is not None:
        inputs = {tensor.name: np.zeros((size, *tensor.shape[1:]), np.float32)}
        began = time.thread_time()
        session.run(None, inputs, run_options)
        asked.send((time.thread_time() - began, own_bytes() / 1e6))


def ways(folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    pipes = {}
    for way in WAYS:
        pipes[way], theirs = SPAWN.Pipe()
        arguments = (theirs, str(folder / "1" / "model.onnx"), way)
        SPAWN.Process(target=one_way, args=arguments, daemon=True).start()

    def run(way: str, size: int) -> tuple[float, float]:
        pipes[way].send(size)
        found: tuple[float, float] = pipes[way].recv()
        return found

    for size in (1, LARGEST.get(folder.name, 8)):
        for way in WAYS:
            for _ in range(2):  # what is known of the first run shapes the second
                run(way, size)
        turns = [
            {way: run(way, size) for way in (WAYS if turn % 2 else WAYS[::-1])} for turn in range(rounds)
        ]
        row: dict[str, Any] = {"part": "ways", "model": folder.name, "batch": size}
        row["ms"] = round(1e3 * median(turn[KEPT][0] for turn in turns), 1)
        for way in WAYS:
            row[f"{way}_mb"] = round(turns[-1][way][1])
            row[f"{way}_ratio"] = round(median(turn[way][0] / turn[KEPT][0] for turn in turns), 3)
        yield row
    for pipe in pipes.values():
        pipe.send(None)


def in_its_own_process(row: Connection, folder: Path, layout: Layout) -> None:
    row.send(table(folder, layout))


def table(folder: Path, layout: Layout) -> dict[str, Any]:
    [source], _ = find_models([folder], gpus=0)
    version = source.versions[-1]
    config = backends.describe(source.config, version)
    signature = signature_of(config)
    before = own_bytes()
    opened = Loading(config, version, signature=signature).open(layout)
    measuring = Measuring(opened, signature)
    row: dict[str, Any] = {"part": "table", "model": folder.name, "layout": str(layout)}
    try:
        measuring.once(1)
        give_back_all(opened)
        row["loaded_mb"] = round((own_bytes() - before) / 1e6)
        for size in (1, 2, 4, 8):
            if size <= LARGEST.get(folder.name, 8):
                measuring.once(size)  # what is known of the first run shapes the second
                row[f"batch_{size}_mb"] = round(batch_bytes(measuring, size) / 1e6)
    finally:
        close_all(opened)
    return row


def server() -> Iterator[dict[str, Any]]:
    with TemporaryDirectory(prefix="carpool-memory-") as folder:
        settings = {"CARPOOL_CACHE_DIR": folder}
        for start in ("first", "second"):
            with carpool_server(settings=settings) as running:
                time.sleep(1.0)  # what loading left behind is gone
                yield {"part": "server", "when": f"{start} start", "engine_mb": resident_mb(running)}
                if start == "second":
                    codes = ask(running)
                    yield {"part": "server", "when": "requests", "engine_mb": resident_mb(running)} | codes
                    time.sleep(REST_S)
                    yield {"part": "server", "when": f"{REST_S:g} s later", "engine_mb": resident_mb(running)}


def resident_mb(running: CarpoolServer) -> int:
    """Of the engine, with files and shared memory (RSS)."""
    for process in Path("/proc").iterdir():
        try:
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == running.process.pid and b"engine" in (process / "cmdline").read_bytes():
                found = re.search(r"VmRSS:\s+(\d+)", (process / "status").read_text())
                return round(int(found[1]) * 1024 / 1e6) if found else 0
        except (OSError, IndexError):
            continue
    return 0


def ask(running: CarpoolServer) -> dict[str, int]:
    bodies = [picture.read_bytes() for picture in pictures()]
    numbers = count()

    def one(_: int) -> int:
        number = next(numbers)
        model, task = list(TASKS.items())[number % len(TASKS)]
        body = bodies[number % len(bodies)]
        try:
            url = f"{running.url}/{task}?model={model}"
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with ThreadPoolExecutor(CLIENTS) as clients:
        codes = Counter(clients.map(one, range(REQUESTS)))
    return {f"answered_{code}": many for code, many in sorted(codes.items())}


def rows(quick: bool, parts: list[str]) -> Iterator[dict[str, Any]]:
    folders = demo_models()
    if "table" in parts:
        for folder in folders:
            for layout in (Layout(2, 1),) if quick else (Layout(1, 1), Layout(2, 1), Layout(2, 2)):
                tell(f"{folder.name}, {layout}")
                ours, theirs = SPAWN.Pipe()
                SPAWN.Process(target=in_its_own_process, args=(theirs, folder, layout), daemon=True).start()
                yield ours.recv()
    if "ways" in parts:
        for folder in folders[:1] if quick else folders:
            tell(f"{folder.name} in three ways")
            yield from ways(folder, 3 if quick else 9)
    if "server" in parts:
        tell("the demo, started twice")
        yield from server()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=[], choices=("table", "ways", "server"))
    parser.add_argument("--quick", action="store_true", help="the table, and one model in three ways")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    parts = given.parts or (["table", "ways"] if given.quick else ["table", "ways", "server"])
    found = list(rows(given.quick, parts))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items() if name != "part"))


if __name__ == "__main__":
    run_program(main, "memory", LoadError)
