"""What an uploaded JPEG costs beside its decoding: Carpool's front end and what a team writes with FastAPI.

Both serve a classifier that only averages, and decode in threads, so that what the threads of their event
loops take is the server: taking the upload, passing it to a thread, gathering batches, writing the answer.
(What is left of a process when decoding, measured alone, is taken off says less: two busy threads of one core
decode slower than one.) wrk asks one server after the other, and so on in turn; CPU is the user and system
time per picture, figures are medians over the rounds, and the ratios are taken within each.

    python benchmarks/vision.py --setup        # once: FastAPI's own environment
    python benchmarks/upload_cost.py           # about a minute and a half
    python benchmarks/upload_cost.py --quick   # half a minute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from carpool.demo import pictures
from load import processes, wrk
from load.burst import Fire, LoadError
from load.ports import free_port
from load.program import run_program, tell
from peers import setup
from vision import Server

CLASSES = 10
NAME = "averages"
PICTURE = "coffee"
SETTINGS = """task = "classify"
max_batch = 8
labels = "labels.txt"
[image]
size = 224
resize = "crop"
crop = 0.875
kernel = "bicubic"
channels = "rgb"
layout = "nchw"
mean = 127
std = 128
[classify]
activation = "softmax"
[onnxruntime]
intra_op_threads = 1
"""
_PEER = Path(__file__).with_name("peers") / "fastapi_vision.py"


@dataclass(frozen=True)
class Spent:
    """µs of CPU per picture."""

    rps: float
    loop: float  # the thread that takes uploads and writes answers
    front: float  # its whole process
    every: float  # all processes


@dataclass(frozen=True)
class Row:
    concurrency: int
    rps: float
    loop_us: float
    front_us: float
    all_us: float
    fastapi_rps: float
    fastapi_loop_us: float
    fastapi_us: float
    loop_ratio: float
    all_ratio: float


def write_model(folder: Path) -> Path:
    """The classifier: three averages and a small matrix. Returns its folder."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).normal(size=(3, CLASSES)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["image"], ["averages"], axes=[2, 3], keepdims=0),
            helper.make_node("MatMul", ["averages", "weights"], ["logits"]),
        ],
        NAME,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / NAME / "1").mkdir(parents=True)
    onnx.save(model, str(folder / NAME / "1" / "model.onnx"))
    (folder / NAME / "model.toml").write_text(SETTINGS)
    (folder / NAME / "labels.txt").write_text("".join(f"class {number}\n" for number in range(CLASSES)))
    return folder / NAME


class Contest:
    def __init__(self, folder: Path, peers_dir: Path) -> None:
        self._folder = folder
        self._model = write_model(folder)
        self._body = next(file for file in pictures() if file.stem == PICTURE).read_bytes()
        self._peer_python = setup.vision_python(peers_dir)
        self._peer_env = {
            "BENCH_TASK": "classify",
            "BENCH_MODEL": str(self._model / "1" / "model.onnx"),
            "BENCH_LABELS": str(self._model / "labels.txt"),
            "BENCH_THREADS": "1",
            "BENCH_MAX_BATCH": "8",
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        port, peer_port = free_port(), free_port()
        command = [str(Path(sys.executable).with_name("carpool")), "serve", str(self._model)]
        command += ["--host", "127.0.0.1", "--http-port", str(port), "--metrics-port", str(free_port())]
        command += ["--grpc-frontends", "0", "--frontends", "1"]
        ours = Server(command, {}, self._folder / "carpool.log")
        peer_env = self._peer_env | {"BENCH_PORT": str(peer_port)}
        peer = Server([str(self._peer_python), str(_PEER)], peer_env, self._folder / "fastapi.log")
        try:
            self.ours, self._fire = ours, self._asked(ours, port, f"/models/{NAME}/predict")
            self.peer, self._peer_fire = peer, self._asked(peer, peer_port, "/predict")
            yield
        finally:
            ours.stop()
            peer.stop()

    def _asked(self, server: Server, port: int, path: str) -> Fire:
        server.wait_for(f"http://127.0.0.1:{port}{path}", self._body)
        return wrk.Target(port, path, {"Content-Type": "image/jpeg"}, self._body).loader(
            self._folder, f"upload-{port}"
        )

    def turn(self, concurrency: int, seconds: float) -> tuple[Spent, Spent]:
        ours = _spent(self.ours, "frontend", self._fire, concurrency, seconds)
        return ours, _spent(self.peer, str(_PEER), self._peer_fire, concurrency, seconds)


def _spent(server: Server, front: str, fire: Fire, concurrency: int, seconds: float) -> Spent:
    """`front` is a word of the command of the process that is asked."""
    before = server.cpu()
    [pid] = [pid for pid in before if front in processes.command_line(pid)]
    loop_before = _loop_seconds(pid)
    burst = fire(concurrency, seconds)
    loop, after = _loop_seconds(pid) - loop_before, server.cpu()
    if burst.failures:
        raise LoadError(f"not every picture was answered: {dict(burst.failures)}")
    spent = {one: after[one] - before.get(one, 0.0) for one in after}
    per_picture = 1e6 / burst.requests
    return Spent(burst.rps, loop * per_picture, spent[pid] * per_picture, sum(spent.values()) * per_picture)


def _loop_seconds(pid: int) -> float:
    """CPU of the thread that the process began with, where everybody's event loop runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def summarise(concurrency: int, turns: Sequence[tuple[Spent, Spent]]) -> Row:
    return Row(
        concurrency=concurrency,
        rps=round(median(ours.rps for ours, _ in turns), 1),
        loop_us=round(median(ours.loop for ours, _ in turns)),
        front_us=round(median(ours.front for ours, _ in turns)),
        all_us=round(median(ours.every for ours, _ in turns)),
        fastapi_rps=round(median(peer.rps for _, peer in turns), 1),
        fastapi_loop_us=round(median(peer.loop for _, peer in turns)),
        fastapi_us=round(median(peer.every for _, peer in turns)),
        loop_ratio=round(median(ours.loop / peer.loop for ours, peer in turns), 2),
        all_ratio=round(median(ours.every / peer.every for ours, peer in turns), 2),
    )


def show(rows: Sequence[Row]) -> None:
    print(f"{'':10}{'Carpool, CPU µs a picture':^40}{'FastAPI, CPU µs a picture':^30}{'ratio':^16}")
    print(
        f"{'in flight':>10}{'rps':>10}{'loop':>8}{'front end':>12}{'all':>10}"
        f"{'rps':>10}{'loop':>8}{'all':>12}{'loops':>8}{'all':>8}"
    )
    for row in rows:
        print(
            f"{row.concurrency:>10}{row.rps:>10}{row.loop_us:>8}{row.front_us:>12}{row.all_us:>10}"
            f"{row.fastapi_rps:>10}{row.fastapi_loop_us:>8}{row.fastapi_us:>12}"
            f"{row.loop_ratio:>8}{row.all_ratio:>8}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--rounds", type=int, default=0, help="7, or 2 with --quick")
    parser.add_argument("--peers-dir", type=Path, default=setup.default_dir(), help="default: %(default)s")
    asked = parser.parse_args()
    if not setup.vision_python(asked.peers_dir).exists():  # as in `make bench` on a new machine
        tell("left out: FastAPI's environment is missing (python benchmarks/vision.py --setup)")
        return 0
    rounds, seconds, all_at_once = (2, 1.0, (1, 32)) if asked.quick else (7, 2.0, (1, 8, 32))
    with tempfile.TemporaryDirectory(prefix="carpool-uploads-") as folder:
        contest = Contest(Path(folder), asked.peers_dir)
        with contest.running():
            contest.turn(8, 1.0)  # to warm up
            turns: dict[int, list[tuple[Spent, Spent]]] = {concurrency: [] for concurrency in all_at_once}
            for _ in range(asked.rounds or rounds):
                for concurrency, taken in turns.items():
                    taken.append(contest.turn(concurrency, seconds))
    rows = [summarise(concurrency, taken) for concurrency, taken in turns.items()]
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    run_program(main, "upload_cost", LoadError, setup.SetupError)
