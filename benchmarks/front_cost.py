"""What a front end and the engine spend on a request, by how it comes: CPU beside that of another version.

A model on a pretended device takes tensors of 150,528 bytes: in the request, over HTTP and gRPC, or in shared
memory. wrk and h2load ask for some seconds, so many at a time; then they ask the next server or in the next
way, and so on in turn. CPU is the user and system time per request of the front end's process and of the
engine's; figures are medians over the rounds.

    python benchmarks/front_cost.py                                   # this environment, about a minute
    python benchmarks/front_cost.py --beside /elsewhere/bin/carpool   # and another, in turn
    python benchmarks/front_cost.py --ways http+shm,grpc+shm --quick
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from load import h2load, wrk
from load.burst import Fire, LoadError
from load.carpool_server import CarpoolServer, starting, wait_ready
from load.ports import free_port
from load.processes import command_line, tree_cpu
from load.program import run_program

WAYS = ("http", "grpc", "http+shm", "grpc+shm")
METHOD = "/inference.GRPCInferenceService/ModelInfer"
SIZE = 150_528
MODEL = """backend = "fake"
max_batch = 32
[fake]
curve = "0.2 + 0.01"
[[input]]
name = "x"
datatype = "UINT8"
shape = [{size}]
[[output]]
name = "y"
datatype = "FP32"
shape = [10]
"""


@dataclass
class Measured:
    """One server, and by the way it was asked what was seen of it in each round."""

    name: str
    server: CarpoolServer
    grpc_port: int
    loads: dict[str, Fire] = field(default_factory=dict)
    front_us: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    engine_us: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    all_us: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    rates: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def measure(self, way: str, concurrency: int, seconds: float) -> None:
        before = tree_cpu(self.server.process.pid)
        burst = self.loads[way](concurrency, seconds)
        after = tree_cpu(self.server.process.pid)
        if burst.failures:
            raise LoadError(f"{self.name}, {way}: {dict(burst.failures)}")
        used = {pid: 1e6 * (after[pid] - before.get(pid, 0.0)) / burst.requests for pid in after}
        self.engine_us[way].append(sum(used[pid] for pid in used if "engine" in command_line(pid)))
        # Of the front ends, one for each protocol, only that of the way has anything to do.
        self.front_us[way].append(sum(used[pid] for pid in used if "frontend" in command_line(pid)))
        self.all_us[way].append(sum(used.values()))
        self.rates[way].append(burst.rps)


def message(size: int, region: str = "") -> bytes:
    request = service_pb2.ModelInferRequest(model_name="tensor")
    tensor = request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    if region:
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = size
    else:
        request.raw_input_contents.append(bytes(size))
    return bytes(request.SerializeToString())


def http_request(port: int, size: int, region: str = "") -> wrk.Target:
    parameters: dict[str, object] = {"binary_data_size": size}
    if region:
        parameters = {"shared_memory_region": region, "shared_memory_byte_size": size}
    tensor = {"name": "x", "shape": [1, size], "datatype": "UINT8", "parameters": parameters}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return wrk.Target(port, "/v2/models/tensor/infer", headers, head if region else head + bytes(size))


def loads(one: Measured, region: Path, size: int, folder: Path) -> dict[str, Fire]:
    """What repeats the request, in each way. The server is ready."""
    url = f"{one.server.url}/v2/systemsharedmemory/region/image/register"
    body = json.dumps({"key": region.name, "offset": 0, "byte_size": size}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=10).close()
    http_port = int(one.server.url.rpartition(":")[2])
    found: dict[str, Fire] = {}
    for suffix, name in (("", ""), ("+shm", "image")):
        label = f"{http_port}{suffix}"
        found[f"http{suffix}"] = http_request(http_port, size, name).loader(folder, f"http-{label}")
        with grpc.insecure_channel(f"127.0.0.1:{one.grpc_port}") as channel:
            answer = channel.unary_unary(METHOD)(message(size, name), timeout=10)
        target = h2load.Target(one.grpc_port, METHOD, message(size, name))
        found[f"grpc{suffix}"] = target.loader(folder, f"grpc-{label}", len(answer))
    return found


@contextlib.contextmanager
def shared_picture(size: int) -> Iterator[Path]:
    path = Path(f"/dev/shm/carpool-front-cost-{os.getpid()}")
    try:
        path.write_bytes(bytes(size))
        yield path
    finally:
        path.unlink(missing_ok=True)


def run(ways: Sequence[str], args: argparse.Namespace) -> list[Measured]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="carpool-front-")))
        region = stack.enter_context(shared_picture(args.size))
        (folder / "models" / "tensor").mkdir(parents=True)
        (folder / "models" / "tensor" / "model.toml").write_text(MODEL.format(size=args.size))
        found = []
        for program in (None, args.beside) if args.beside else (None,):
            port = free_port()
            options = ["--frontends", "1", "--grpc-frontends", "1", "--grpc-port", str(port)]
            options += ["--allow-client-shm"]
            server = stack.enter_context(starting(folder / "models", options=options, program=program))
            found.append(Measured("this" if program is None else str(program), server, port))
        for one in found:
            wait_ready(one.server)
            one.loads = loads(one, region, args.size, folder)
            for way in ways:
                one.loads[way](args.concurrency, 1.0)
        for _ in range(args.rounds):
            for way in ways:
                for one in found:
                    one.measure(way, args.concurrency, args.seconds)
        return found


def rows(found: Sequence[Measured], ways: Sequence[str]) -> list[Mapping[str, object]]:
    median = statistics.median
    return [
        {
            "server": one.name,
            "way": way,
            "front_us": round(median(one.front_us[way]), 1),
            "engine_us": round(median(one.engine_us[way]), 1),
            "all_us": round(median(one.all_us[way]), 1),
            "requests_per_s": round(median(one.rates[way]), 1),
        }
        for way in ways
        for one in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="the `carpool` of another version")
    parser.add_argument("--ways", default=",".join(WAYS), help="how to ask (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round")
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of a tensor (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of a second")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        raise LoadError(f"--ways knows {', '.join(WAYS)}, and not {', '.join(sorted(unknown))}")
    if args.quick:
        args.rounds, args.seconds = 1, 1.0
    found = run(ways, args)
    table = rows(found, ways)
    if args.json:
        print(json.dumps(table, indent=2))
        return 0
    print(f"{'µs of CPU per request':>32}  {'asked by':>9}  front end  engine  all processes  requests/s")
    for row in table:
        print(
            f"{str(row['server'])[-32:]:>32}  {row['way']:>9}  {row['front_us']:9.0f}"
            f"  {row['engine_us']:6.0f}  {row['all_us']:13.0f}  {row['requests_per_s']:10.0f}"
        )
    return 0


if __name__ == "__main__":
    run_program(main, "front_cost", LoadError)
