"""What one warm request costs in Python: how many files it passes through, and how many calls it makes.

A whole server, with a front end for each protocol and the engine in processes of their own and the link
between them, is asked by a client that is not counted: a v2 tensor; two in a gRPC ModelInfer; a JPEG on a
picture route; a JPEG for a pipeline, whose second step sees two crops; and a picture for a model that writes
four tokens, sent to Triton's generate_stream. The models are the fake device, so no runtime is in the way;
only the pipeline's detector is a small ONNX file, because the fake one finds nothing.

Calls are counted by `sys.setprofile` in every thread of every process of the server. Only functions in
Carpool's own files count (each time that a generator goes on is a call, too); those written in C and those of
other packages do not. A move is a call that follows one in another file, in the same thread. After each
answer the server has time to finish what it does later. Figures are lower quartiles over requests, function
by function: what the server does by itself ten times a second is not in them.

    python benchmarks/hops.py                # within a minute
    python benchmarks/hops.py --quick        # fewer requests
    python benchmarks/hops.py --functions    # the functions, in the order in which they are first called
    python benchmarks/hops.py --json
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tritonclient.grpc import service_pb2

import carpool
from load.burst import LoadError
from load.carpool_server import stop
from load.ports import free_port
from load.program import run_program

PACKAGE = f"{Path(carpool.__file__).parent}{os.sep}"
COUNTING = Path(__file__).resolve().parent / "hop_counting"
PULSE = "memory/pulse.py"  # beats ten times a second, and on a busy machine in every window
REQUESTS, QUICK_REQUESTS = 41, 17
WARM_UP = 60  # what is learnt from the first requests is learnt, and every cache is filled
LATER_S = 0.02  # for what the server does when the answer is away
READY_S = 90.0
REPORT_S = 30.0

MODEL = """
backend = "fake"
slo_ms = 1000
max_batch = 32
{more}
[fake]
curve = "0.001+0"
[[input]]
name = "image"
datatype = "FP32"
shape = [3, 32, 32]
[[output]]
name = "scores"
datatype = "FP32"
shape = [10]
"""
WRITER = """
slo_ms = 1000
[generate]
slots = 4
[fake]
curve = "0.001+0"
step_curve = "1+0"
"""
DETECTOR = 'task = "detect"\nslo_ms = 1000\nmax_batch = 32\n[detect]\nformat = "end2end"\n'
PIPELINE = """
slo_ms = 1000
[[step]]
name = "find"
model = "detector"
[[step]]
name = "kind"
model = "picture"
each = "find.boxes"
"""
BOXES = np.float32(
    [[0, 0, 16, 32, 0.9, 0], [16, 0, 32, 32, 0.8, 1]]
)  # left, top, right, bottom, score, class


def tensor() -> bytes:
    return np.ones((1, 3, 32, 32), np.float32).tobytes()


def photo(height: int = 240, width: int = 320) -> bytes:
    file = io.BytesIO()
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows, columns, rows + columns], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def line_to_read() -> bytes:
    picture = base64.b64encode(photo(32, 64)).decode()
    return json.dumps({"image": picture, "max_tokens": 4}).encode()


def model_infer() -> bytes:
    """Two images, so that the message is worth a slot of its own."""
    request = service_pb2.ModelInferRequest(model_name="tensor")
    request.inputs.add(name="image", datatype="FP32", shape=[2, 3, 32, 32])
    request.raw_input_contents.append(2 * tensor())
    return bytes(request.SerializeToString())


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the most that it may cost. The path of a call of gRPC names a method."""

    name: str
    path: str
    headers: Mapping[str, str]
    body: Callable[[], bytes]
    most_files: int
    most_calls: int


V2 = Asked("v2", "/v2/models/tensor/infer", {"Inference-Header-Content-Length": "0"}, tensor, 34, 199)
JPEG = Asked("jpeg", "/classify?model=picture", {"Content-Type": "image/jpeg"}, photo, 47, 311)
STEPS = Asked("pipeline", "/detect?model=street", {"Content-Type": "image/jpeg"}, photo, 63, 802)
STREAM = Asked("stream", "/v2/models/writer/generate_stream", {}, line_to_read, 64, 1105)
GRPC = Asked("grpc", "/inference.GRPCInferenceService/ModelInfer", {}, model_infer, 42, 237)
ALL = (V2, GRPC, JPEG, STEPS, STREAM)


@dataclass(frozen=True, slots=True)
class Hops:
    """What one request did: calls by file and function, in the order in which they were first made."""

    by_function: Counter[tuple[str, str]]
    moves: int
    threads: int

    @property
    def by_file(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (file, _), calls in self.by_function.items():
            found[file] += calls
        return found

    @property
    def calls(self) -> int:
        return self.by_function.total()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--functions", action="store_true", help="print every function that is called")
    parser.add_argument("--json", action="store_true", help="print objects for machines")
    args = parser.parse_args()
    requests = QUICK_REQUESTS if args.quick else REQUESTS
    with tempfile.TemporaryDirectory(prefix="carpool-hops-") as name, counted_server(Path(name)) as server:
        found = [(asked, server.usual(asked, requests)) for asked in ALL]
    print(json.dumps([as_row(*one) for one in found], indent=1) if args.json else as_text(found))
    if args.functions:
        print(*(as_walk(*one) for one in found), sep="\n")
    return 0


class CountedServer:
    """A running server whose processes note their calls while the switch is on."""

    def __init__(self, folder: Path, connection: http.client.HTTPConnection, channel: grpc.Channel) -> None:
        self._folder = folder
        self._window = 0
        self._connection = connection
        self._channel = channel

    def usual(self, asked: Asked, requests: int) -> Hops:
        return usual(self.each(asked, requests))

    def each(self, asked: Asked, requests: int) -> list[Hops]:
        content = asked.body()
        for _ in range(WARM_UP):
            self._ask(asked, content)
        time.sleep(LATER_S)
        self._count()  # of what came before nothing is kept
        hops = []
        for _ in range(requests):
            self._set(0, 1)
            self._ask(asked, content)
            time.sleep(LATER_S)
            self._set(0, 0)
            hops.append(self._count())
        return hops

    def _ask(self, asked: Asked, content: bytes) -> None:
        if asked is GRPC:
            self._channel.unary_unary(asked.path)(content, timeout=REPORT_S)
            return
        self._connection.request("POST", asked.path, content, asked.headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise LoadError(f"{asked.path} was answered {answer.status}: {text[:300]!r}")

    def _set(self, byte: int, value: int) -> None:
        with (self._folder / "switch").open("r+b") as file:
            file.seek(byte)
            file.write(bytes([value]))

    def _count(self) -> Hops:
        """Close the window, and gather what all processes noted in it."""
        self._window = (self._window + 1) % 256
        self._set(1, self._window)
        by_function: Counter[tuple[str, str]] = Counter()
        moves = 0
        threads = set()
        for counted in self._folder.glob("*.counted"):
            last: dict[int, str] = {}
            for thread, name, function in self._report(int(counted.stem)):
                file = name.removeprefix(PACKAGE)
                if file == PULSE:
                    continue
                by_function[file, function] += 1
                moves += last.get(thread, file) != file
                last[thread] = file
            threads |= {(counted.stem, thread) for thread in last}
        return Hops(by_function, moves, len(threads))

    def _report(self, pid: int) -> list[tuple[int, str, str]]:
        path = self._folder / f"{self._window}.{pid}.json"
        give_up = time.monotonic() + REPORT_S
        while time.monotonic() < give_up and Path(f"/proc/{pid}").exists():
            if path.exists():
                found: list[tuple[int, str, str]] = json.loads(path.read_text())
                path.unlink()
                return found
            time.sleep(0.002)
        return []


def write_models(models: Path) -> None:
    settings = {
        "tensor/model.toml": MODEL.format(more=""),
        "picture/model.toml": MODEL.format(more='task = "classify"'),
        "writer/model.toml": WRITER,
        "detector/model.toml": DETECTOR,
        "street/pipeline.toml": PIPELINE,
    }
    for path, text in settings.items():
        (models / path).parent.mkdir(parents=True)
        (models / path).write_text(text)
    (models / "detector" / "1").mkdir()
    write_detector(models / "detector" / "1" / "model.onnx")


def write_detector(path: Path) -> None:
    """It finds the same two boxes in every picture."""
    weights = {
        "zeros": np.zeros((3, BOXES.size), np.float32),
        "boxes": BOXES.ravel(),
        "shape": [-1, *BOXES.shape],
    }
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "zeros", "boxes"], ["rows"]),
        helper.make_node("Reshape", ["rows", "shape"], ["found"]),
    ]
    shapes = {"images": ["n", 3, 32, 32], "found": ["n", *BOXES.shape]}
    images, found = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()
    )
    kept = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "detector", [images], [found], kept)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))


@contextlib.contextmanager
def counted_server(folder: Path) -> Iterator[CountedServer]:
    write_models(folder / "models")
    (folder / "switch").write_bytes(bytes(2))
    port, grpc_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("carpool")), "serve", str(folder / "models")]
    command += ["--host", "127.0.0.1", "--http-port", str(port), "--metrics-port", str(free_port())]
    command += ["--frontends", "1", "--grpc-frontends", "1", "--grpc-port", str(grpc_port)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL_", "PYTHON"))}
    kept |= {"CARPOOL_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(COUNTING)}
    kept |= {"HOPS_FOLDER": str(folder), "HOPS_PACKAGE": PACKAGE}
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        _wait_ready(port, process, log)
        with (
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=REPORT_S)) as connection,
            grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
        ):
            yield CountedServer(folder, connection, channel)
    finally:
        stop(process)


def _wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise LoadError(f"carpool serve is not ready:\n{log.read_text(errors='replace')[-2000:]}")


def usual(hops: Sequence[Hops]) -> Hops:
    return _summed_up(hops, _quartile)


def least(hops: Sequence[Hops]) -> Hops:
    """Where the machine is busy, most requests take so long that the server's own work falls into them."""
    return _summed_up(hops, min)


def _summed_up(hops: Sequence[Hops], chosen: Callable[[Iterable[int]], int]) -> Hops:
    called = dict.fromkeys(function for one in hops for function in one.by_function)
    by_function = Counter({one: chosen([each.by_function[one] for each in hops]) for one in called})
    moves, threads = chosen([one.moves for one in hops]), chosen([one.threads for one in hops])
    return Hops(+by_function, moves, threads)  # without those that have none


def _quartile(counts: Iterable[int]) -> int:
    ordered = sorted(counts)
    return ordered[len(ordered) // 4]


def as_row(asked: Asked, hops: Hops) -> dict[str, object]:
    return {
        "request": asked.name,
        "files": len(hops.by_file),
        "calls": hops.calls,
        "moves": hops.moves,
        "threads": hops.threads,
        "asked": {"files": asked.most_files, "calls": asked.most_calls},
        "by_file": dict(hops.by_file.most_common()),
    }


def as_text(found: Sequence[tuple[Asked, Hops]]) -> str:
    lines = [f"{'request':<10}{'files':>7}{'asked':>8}{'calls':>8}{'asked':>8}{'moves':>8}{'threads':>9}"]
    for asked, hops in found:
        lines.append(
            f"{asked.name:<10}{len(hops.by_file):>7}{f'≤ {asked.most_files}':>8}"
            f"{hops.calls:>8}{f'≤ {asked.most_calls}':>8}{hops.moves:>8}{hops.threads:>9}"
        )
    files = sorted(
        {file for _, hops in found for file in hops.by_file}, key=lambda file: _weight(file, found)
    )
    lines += ["", f"{'calls in':<44}" + "".join(f"{asked.name:>8}" for asked, _ in found)]
    lines += [f"{file:<44}" + "".join(f"{hops.by_file[file]:>8}" for _, hops in found) for file in files]
    return "\n".join(lines)


def as_walk(asked: Asked, hops: Hops) -> str:
    """The functions, grouped by file where calls follow each other."""
    lines, last = ["", f"{asked.name}:"], ""
    for (file, function), calls in hops.by_function.items():
        lines += [] if file == last else [f"  {file}"]
        lines.append(f"    {function}" + (f" ×{calls}" if calls > 1 else ""))
        last = file
    return "\n".join(lines)


def _weight(file: str, found: Sequence[tuple[Asked, Hops]]) -> tuple[int, str]:
    return -max(hops.by_file[file] for _, hops in found), file


if __name__ == "__main__":
    run_program(main, "hops", LoadError)
