"""A long stay: requests over HTTP and gRPC from clients that leave when they like. What does the server keep?

One server with two front ends of each protocol; clients in processes of their own open connections, send
whole requests, parts of requests and several at once, cancel calls, close connections in the middle of
anything or reset them, and open the next. Tensors are 64 bytes, every tenth 150,528. Every so often it is
noted what memory of their own the server's processes have and how many descriptors are open; at the end, when
nobody is connected, both must be where they were after the first tenth, or this ends with 1.

    python benchmarks/soak.py                      # a million requests, about ten minutes on two cores
    python benchmarks/soak.py --requests 100000
    python benchmarks/soak.py --quick              # 20,000, under a minute
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import struct
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import uvloop
from tritonclient.grpc import service_pb2

from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.rpc_heads import FINE
from load.burst import LoadError
from load.carpool_server import CarpoolServer, starting, wait_ready
from load.ports import free_port
from load.processes import command_line, tree_cpu
from load.program import run_program, tell

SMALL, LARGE = 64, 150_528
MODEL = """backend = "fake"
max_batch = 32
[fake]
curve = "0.1 + 0.01"
[[input]]
name = "x"
datatype = "UINT8"
shape = [{size}]
[[output]]
name = "y"
datatype = "FP32"
shape = [10]
"""
PATH = b"/inference.GRPCInferenceService/ModelInfer"
AT_ONCE = 16  # connections of a client process
PER_CONNECTION = 40  # requests, on average
LEAVES = 0.05  # how many requests their client does not wait for
MORE_MIB, MORE_DESCRIPTORS = 24.0, 8
ANSWER_S = 20.0


@dataclass(frozen=True)
class Noted:
    """What the server has at one moment: MiB of memory of their own of its processes, and descriptors."""

    requests: int
    left: int
    seconds: float
    front_mib: float
    engine_mib: float
    supervisor_mib: float
    descriptors: int


# ---- clients


class Chance(random.Random):
    """What the clients of one process do next."""

    def leaves(self) -> bool:
        return self.random() < LEAVES

    def size(self) -> int:
        return LARGE if self.random() < 0.1 else SMALL


def http_request(size: int) -> bytes:
    tensor = {"name": "x", "shape": [1, size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = [
        f"POST /v2/models/m{size}/infer HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(head) + size}",
    ]
    lines += [f"Inference-Header-Content-Length: {len(head)}", "", ""]
    return "\r\n".join(lines).encode() + head + bytes(size)


def grpc_message(size: int) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=f"m{size}")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(bytes(size))
    message = bytes(request.SerializeToString())
    return b"\0" + len(message).to_bytes(4, "big") + message


HTTP = {size: http_request(size) for size in (SMALL, LARGE)}
GRPC = {size: grpc_message(size) for size in (SMALL, LARGE)}
FIELDS = {b":method": b"POST", b":scheme": b"http", b":path": PATH, b":authority": b"x", b"te": b"trailers"}
BLOCK = b"".join(h2.field(*one) for one in (*FIELDS.items(), (b"content-type", b"application/grpc")))
OPENING = h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0) + h2.window_update(0, 1 << 30)


def grpc_request(stream: int, size: int, chance: Chance) -> bytes:
    """In frames that are cut anywhere."""
    message, out = GRPC[size], [h2.frame(h2.HEADERS, h2.END_HEADERS, stream, BLOCK)]
    position = 0
    while position < len(message):
        end = min(len(message), position + chance.choice((size // 3 + 1, 16_384, 1 << 18)))
        last = h2.END_STREAM if end == len(message) else 0
        out.append(h2.frame(h2.DATA, last, stream, message[position:end]))
        position = end
    return b"".join(out)


async def use_http(port: int, chance: Chance, counts: Counter[str], wanted: Callable[[], bool]) -> None:
    """One connection, until its client leaves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for _ in range(chance.randrange(1, 2 * PER_CONNECTION)):
            if not wanted():
                return
            body = HTTP[chance.size()]
            counts["requests"] += 1
            if chance.leaves():
                counts["left"] += 1
                writer.write(body[: chance.randrange(len(body) + 1)])
                return
            writer.write(body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"\r\ncontent-length:")[2].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
            counts["answers" if head.startswith(b"HTTP/1.1 200") else "errors"] += 1
    finally:
        leave(writer, chance)


async def use_grpc(port: int, chance: Chance, counts: Counter[str], wanted: Callable[[], bool]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(OPENING)
    stream = -1
    try:
        for _ in range(chance.randrange(1, PER_CONNECTION)):
            if not wanted():
                return
            open_calls: set[int] = set()
            for _ in range(chance.choice((1, 1, 1, 4))):
                stream += 2
                counts["requests"] += 1
                frames = grpc_request(stream, chance.size(), chance)
                if not chance.leaves():
                    writer.write(frames)
                    open_calls.add(stream)
                    continue
                counts["left"] += 1
                if chance.random() < 0.5:  # the connection, in the middle of anything
                    writer.write(frames[: chance.randrange(len(frames) + 1)])
                    return
                writer.write(frames + h2.reset(stream, h2.Code.CANCEL))
            while open_calls:
                high, low, kind, flags, number = h2.FRAME.unpack(await reader.readexactly(h2.FRAME_BYTES))
                payload = await reader.readexactly(high << 8 | low)
                if kind == h2.GOAWAY:
                    raise LoadError(f"the server ended a connection: {payload[8:]!r}")
                if kind == h2.HEADERS and flags & h2.END_STREAM and number in open_calls:
                    open_calls.discard(number)
                    counts["answers" if payload.startswith(FINE) else "errors"] += 1
    finally:
        leave(writer, chance)


def leave(writer: asyncio.StreamWriter, chance: Chance) -> None:
    """With a word, or without one."""
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()
    writer.close()


def client(way: str, port: int, share: int, seed: int, done: Any, left: Any, answers: Any) -> None:
    """One process of clients, until so many requests were sent."""
    chance, counts = Chance(seed), Counter[str]()
    use = use_http if way == "http" else use_grpc

    def wanted() -> bool:
        return counts["requests"] < share

    async def one() -> None:
        while wanted():
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(use(port, chance, counts, wanted), 10 * ANSWER_S)
            done.value, left.value = counts["requests"], counts["left"]

    async def run() -> None:
        await asyncio.gather(*(one() for _ in range(AT_ONCE)))

    try:
        uvloop.run(run())
    finally:
        done.value, left.value = counts["requests"], counts["left"]
        answers.put((way, dict(counts)))


# ---- the server


def note(server: CarpoolServer, requests: int, left: int, began: float) -> Noted:
    pids = tree_cpu(server.process.pid)
    memory = dict.fromkeys(("frontend", "engine", ""), 0.0)
    for pid in pids:
        words = command_line(pid)
        memory[next((kind for kind in ("frontend", "engine") if kind in words), "")] += anonymous_mib(pid)
    opened = sum(1 for pid in pids for _ in Path(f"/proc/{pid}/fd").iterdir())
    seconds = round(time.monotonic() - began, 1)
    figures = [round(memory[kind], 1) for kind in ("frontend", "engine", "")]
    return Noted(requests, left, seconds, *figures, opened)


def anonymous_mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def settle(server: CarpoolServer) -> None:
    """Until the server has noticed that everybody left: what it still runs it finishes."""
    url = f"{server.url}/v2/health/ready"
    for _ in range(4):
        time.sleep(0.5)
        urllib.request.urlopen(url, timeout=10).close()


def soak(server: CarpoolServer, grpc_port: int, total: int, seed: int) -> tuple[list[Noted], Counter[str]]:
    began, noted = time.monotonic(), []
    half = (total // 2 + 1, total - total // 2)
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    counted: list[tuple[Synchronized[int], Synchronized[int]]] = []
    clients = []
    ports = {"http": int(server.url.rpartition(":")[2]), "grpc": grpc_port}
    for number, (way, port) in enumerate(ports.items()):
        done, left = fork.Value("q", 0), fork.Value("q", 0)
        counted.append((done, left))
        arguments = (way, port, half[number], seed + number, done, left, answers)
        clients.append(fork.Process(target=client, args=arguments, daemon=True))
    for one in clients:
        one.start()
    checkpoint = total // 10
    while any(one.is_alive() for one in clients):
        time.sleep(0.1)
        sent = sum(done.value for done, _ in counted)
        if server.process.poll() is not None:
            raise LoadError(f"the server ended with {server.process.returncode}")
        if sent >= checkpoint * (len(noted) + 1):
            noted.append(note(server, sent, sum(left.value for _, left in counted), began))
            tell(f"{sent} requests")
    seen: Counter[str] = Counter()
    for one in clients:
        seen.update(answers.get(timeout=10)[1])
        one.join()
        if one.exitcode:
            raise LoadError("a client failed; see above")
    settle(server)
    noted.append(note(server, seen["requests"], seen["left"], began))
    return noted, seen


def grew(noted: Sequence[Noted]) -> list[str]:
    """What there is more of at the end than after the first tenth."""
    first, last = noted[0], noted[-1]
    found = []
    for name in ("front_mib", "engine_mib", "supervisor_mib"):
        before, after = getattr(first, name), getattr(last, name)
        if after > 1.1 * before + MORE_MIB:
            found.append(f"{name} grew from {before} to {after}")
    if last.descriptors > min(one.descriptors for one in noted) + MORE_DESCRIPTORS:
        found.append(f"{last.descriptors} descriptors are open with nobody connected")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="20,000 requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    args = parser.parse_args()
    total = 20_000 if args.quick else args.requests
    with tempfile.TemporaryDirectory(prefix="carpool-soak-") as name:
        models = Path(name) / "models"
        for size in (SMALL, LARGE):
            (models / f"m{size}").mkdir(parents=True)
            (models / f"m{size}" / "model.toml").write_text(MODEL.format(size=size))
        port = free_port()
        options = ["--frontends", "2", "--grpc-frontends", "2", "--grpc-port", str(port)]
        with starting(models, options=options) as server:
            wait_ready(server)
            idle = note(server, 0, 0, time.monotonic())
            noted, seen = soak(server, port, total, args.seed)
            log = server.log.read_text(errors="replace")
    wrong = grew(noted)
    if noted[-1].descriptors > idle.descriptors + MORE_DESCRIPTORS:
        wrong.append(f"{idle.descriptors} descriptors were open before anybody came")
    if "request-failed" in log or "Traceback" in log:
        wrong.append("the log tells of a fault of the server's own")
    if seen["errors"] > seen["requests"] // 100:
        wrong.append(f"{seen['errors']} requests were answered with an error")
    show(noted, idle, seen, wrong, as_json=args.json)
    return 1 if wrong else 0


def show(
    noted: Sequence[Noted], idle: Noted, seen: Counter[str], wrong: Sequence[str], *, as_json: bool
) -> None:
    if as_json:
        rows = [asdict(one) for one in (idle, *noted)]
        print(json.dumps({"rows": rows, "seen": dict(seen), "wrong": list(wrong)}, indent=2))
        return
    print("  requests  not waited for  seconds  front ends MiB  engine MiB  supervisor MiB  descriptors")
    for one in (idle, *noted):
        print(
            f"{one.requests:10}  {one.left:14}  {one.seconds:7.0f}  {one.front_mib:14.1f}"
            f"  {one.engine_mib:10.1f}  {one.supervisor_mib:14.1f}  {one.descriptors:11}"
        )
    print(f"{seen['answers']} answers, {seen['errors']} errors; {'; '.join(wrong) or 'nothing grew'}")


if __name__ == "__main__":
    run_program(main, "soak", LoadError)
