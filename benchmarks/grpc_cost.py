"""What the gRPC front end spends on a request: CPU of its process, beside that of another version.

A model on a pretended device takes tensors of 150,528 bytes. Clients of grpcio ask it, so many at a time, for
some seconds; then they ask the other server, and so on in turn. CPU is the user and system time of the
front end's process per request, and of all processes of the server; figures are medians over the rounds.

    python benchmarks/grpc_cost.py                                   # this environment, about half a minute
    python benchmarks/grpc_cost.py --beside /elsewhere/bin/carpool   # and another, in turn
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2

from load.carpool_server import CarpoolServer, starting, wait_ready
from load.ports import free_port
from load.processes import spent, thread_cpu, tree_cpu

METHOD = "/inference.GRPCInferenceService/ModelInfer"
SIZE = 150_528
MODEL = f"""backend = "fake"
max_batch = 32
[fake]
curve = "0.2 + 0.01"
[[input]]
name = "x"
datatype = "UINT8"
shape = [{SIZE}]
[[output]]
name = "y"
datatype = "FP32"
shape = [10]
"""


@dataclass
class Measured:
    """One server, and what was seen of it in each round."""

    name: str
    server: CarpoolServer
    port: int
    front_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def front_end(self) -> int:
        """The process that is busy with gRPC: whose CPU grows most while only gRPC is asked."""
        before = tree_cpu(self.server.process.pid)
        ask(self.port, 4, 1.0)
        after = tree_cpu(self.server.process.pid)
        busiest = sorted(after, key=lambda pid: after[pid] - before.get(pid, 0.0), reverse=True)
        return next(pid for pid in busiest if listens(pid, self.port))

    def measure(self, front: int, concurrency: int, seconds: float) -> None:
        tree, threads = tree_cpu(self.server.process.pid), thread_cpu(front)
        count = ask(self.port, concurrency, seconds)
        self.front_us.append(1e6 * spent(threads, thread_cpu(front)) / count)
        self.server_us.append(1e6 * spent(tree, tree_cpu(self.server.process.pid)) / count)
        self.rates.append(count / seconds)


def listens(pid: int, port: int) -> bool:
    """Whether a socket of that port is among its descriptors."""
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}")}
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def message() -> bytes:
    request = service_pb2.ModelInferRequest(model_name="tensor")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, SIZE])
    request.raw_input_contents.append(bytes(SIZE))
    return bytes(request.SerializeToString())


def ask(port: int, concurrency: int, seconds: float) -> int:
    """From so many clients, each on a connection of its own; returns how often they were answered."""
    body, until, counts = message(), time.monotonic() + seconds, [0] * concurrency

    def one(number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            call = channel.unary_unary(METHOD)
            while time.monotonic() < until:
                call(body, timeout=10)
                counts[number] += 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def run(programs: Sequence[Path | None], rounds: int, concurrency: int, seconds: float) -> list[Measured]:
    with tempfile.TemporaryDirectory(prefix="carpool-grpc-") as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "models" / "tensor"
        folder.mkdir(parents=True)
        (folder / "model.toml").write_text(MODEL)
        found = []
        for program in programs:
            port = free_port()
            options = ["--grpc-frontends", "1", "--grpc-port", str(port)]
            server = stack.enter_context(starting(folder.parent, options=options, program=program))
            found.append(Measured("this" if program is None else str(program), server, port))
        for one in found:
            wait_ready(one.server)
        fronts = [one.front_end() for one in found]
        for _ in range(rounds):
            for one, front in zip(found, fronts, strict=True):
                one.measure(front, concurrency, seconds)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="the `carpool` of another version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a round")
    args = parser.parse_args()
    programs = [None] if args.beside is None else [None, args.beside]
    print(f"{'µs of CPU per request':>32}  front end  all processes  requests/s")
    for one in run(programs, args.rounds, args.concurrency, args.seconds):
        front, server, rate = map(statistics.median, (one.front_us, one.server_us, one.rates))
        print(f"{one.name[-32:]:>32}  {front:9.0f}  {server:13.0f}  {rate:10.0f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
