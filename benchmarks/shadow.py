"""What a shadow costs production, live: an engine with two versions of a pretended model on one device.

The engine runs in a process of its own and is asked through a front end's door over a real link, open loop.
At 0.5 and 3 times what the device carries within the promise, slices without a shadow and slices in which
every request is also offered to the other version, as work that nobody waits for, take turns. Ratios are
taken between neighbouring slices, and their medians are shown. With --server it is a whole `carpool serve`
that is asked over HTTP, and the shadow is that of a rollout, which mirrors and compares.

    python benchmarks/shadow.py                 # about four minutes
    python benchmarks/shadow.py --quick         # within a minute
    python benchmarks/shadow.py --processors    # the same without a shared device
    python benchmarks/shadow.py --server        # with a front end, its mirror and its comparisons
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import uvloop

from carpool.core.curve import BatchCurve, slo_capacity
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_link import EngineSide
from carpool.errors import Unavailable
from carpool.frontend.front_link import RemoteCall
from carpool.frontend.link_client import LinkClient
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import BACKGROUND, USUAL, Answer, Ask, OneAnswer
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.types import InferRequest, Tensor
from carpool.wire.v2 import RequestHead, encode_request, read_head
from load.program import run_program

CURVE, MAX_BATCH, SLO = "24+8", 64, 0.4  # slow enough for a generator in Python on a busy machine
LOADS = (0.5, 3.0)
Told = Callable[[Answer], None]
ARENA_BYTES, ANSWER_BYTES = 64 << 20, 1 << 20
SETTLE_S = 1.5  # of each slice: what the one before left is forgotten, and slack is looked at for a second
READY_S = 60.0
MODEL = """
backend = "fake"
versions = "all"
slo_ms = {slo_ms:g}
max_batch = {max_batch}
[fake]
curve = "{curve}"
{device}
[[input]]
name = "x"
datatype = "FP32"
shape = [64]
[[output]]
name = "y"
datatype = "FP32"
shape = [1]
"""


@dataclass(slots=True)
class Slice:
    """What became of what was offered in one slice, after it had settled; of copies also before."""

    seconds: float
    offered: int = 0
    in_time: int = 0
    refused: int = 0
    copies: int = 0
    ran: int = 0
    skipped: int = 0
    latencies: list[float] = field(default_factory=list)
    cpu_ms: float = 0.0  # of the server, for each request that was offered; only with --server

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds


@dataclass(frozen=True)
class Row:
    load: float
    goodput_ratio: float  # beside a shadow over alone
    refused_ratio: float  # the same of refusals; of one more each, since at half load there are none
    p99_ms_alone: float
    p99_ms_beside: float
    offered: float  # per second
    goodput_alone: float
    goodput_beside: float
    copies: int
    ran: int
    skipped: int
    cpu_ms_alone: float  # of the server, for each request; only with --server
    cpu_ms_beside: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter slices")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--processors", action="store_true", help="models that name no device")
    parser.add_argument("--server", action="store_true", help="a whole server, asked over HTTP")
    parser.add_argument("--pairs", type=int, help="of slices, at each load")
    args = parser.parse_args()
    pairs, seconds = (2, 5.0) if args.quick else (6, 8.0)
    of = served_rows if args.server else rows
    found = of(args.pairs or pairs, seconds, "" if args.processors else 'device = "one"')
    print(json.dumps([asdict(row) for row in found], indent=2) if args.json else as_text(found))
    return 0


def write_model(folder: Path, device: str) -> None:
    for version in ("1", "2"):
        (folder / "m" / version).mkdir(parents=True)
    settings = MODEL.format(slo_ms=SLO * 1e3, max_batch=MAX_BATCH, curve=CURVE, device=device)
    (folder / "m" / "model.toml").write_text(settings)


def rows(pairs: int, seconds: float, device: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="carpool-shadow-") as folder:
        write_model(Path(folder), device)
        ours, theirs = socket.socketpair()
        arena = create_memory("shadow-arena", ARENA_BYTES)
        context = multiprocessing.get_context("fork")
        told, tell = context.Pipe(duplex=False)
        engine = context.Process(target=serve, args=(folder, ours, arena, tell), daemon=True)
        engine.start()
        ours.close()
        try:
            if not told.poll(READY_S):
                raise SystemExit("the engine did not start")
            return uvloop.run(measure(theirs, arena, pairs, seconds))
        finally:
            engine.terminate()
            engine.join(10.0)


def serve(folder: str, sock: socket.socket, arena: int, tell: Connection) -> None:
    """The engine's process."""

    async def live() -> None:
        host = EngineHost(partial(Engine, folder))
        async with host.engine:
            host.set_ready(True)
            side = EngineSide(host, max_answer_bytes=ANSWER_BYTES)
            await side.attach(1, sock, os.dup(arena))
            tell.send("ready")
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            await stop.wait()
            side.close()

    uvloop.run(live())


# ---- the front end


async def measure(sock: socket.socket, arena: int, pairs: int, seconds: float) -> list[Row]:
    door = LinkClient(Arena(map_memory(arena)), max_answer_bytes=ANSWER_BYTES)
    await door.attach(sock)
    while not door.serving:
        await asyncio.sleep(0.01)
    asker = Asker(door)
    found = await in_turn(asker, pairs, seconds)
    door.close()
    return found


async def in_turn(asker: Asker | HttpAsker, pairs: int, seconds: float) -> list[Row]:
    capacity = slo_capacity(BatchCurve.parse(CURVE, MAX_BATCH), SLO)
    await asker.slice(0.3 * capacity, 1.0, Random(0), shadow=True)  # whatever comes first is slow
    found = []
    for load in LOADS:
        slices: list[tuple[Slice, Slice]] = []
        for number in range(pairs):
            order = (False, True) if number % 2 else (True, False)
            pair = {
                shadow: await asker.slice(load * capacity, seconds, Random(number), shadow=shadow)
                for shadow in order
            }
            slices.append((pair[False], pair[True]))
        found.append(row_of(load, slices))
    return found


class Asker:
    """Asks version 1, and version 2 as background work, with the same tensor."""

    def __init__(self, door: LinkClient) -> None:
        self.door = door
        self.entries: Sequence[ModelEntry] = [door.catalog.entries["m", version] for version in ("1", "2")]
        self.heads: list[RequestHead] = []
        for entry in self.entries:
            x = np.zeros((1, 64), np.float32)
            tensor = Tensor("x", entry.signature.inputs[0].datatype, x.shape, x)
            encoded = encode_request(InferRequest(entry.name, [tensor], binary_output=True))
            body = b"".join(encoded.buffers)
            self.tail = encoded.header_length or 0
            self.body = body
            self.heads.append(read_head(body[: self.tail], entry.signature))
        self.open = 0
        self.copies: set[RemoteCall] = set()  # that nobody has answered

    async def slice(self, rate: float, seconds: float, random: Random, *, shadow: bool) -> Slice:
        found = Slice(seconds - SETTLE_S if seconds > SETTLE_S else seconds)
        began = due = time.monotonic()
        while due < began + seconds:
            due += random.expovariate(rate)
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            counts = due - began > SETTLE_S
            self._ask(found if counts else Slice(1.0), due)
            if shadow:
                self._copy(found)
        for call in self.copies:  # when nobody asks any more, there is slack for all of them
            call.cancel()
            found.skipped += 1
        self.open -= len(self.copies)
        self.copies.clear()
        while self.open:
            await asyncio.sleep(0.01)
        return found

    def _ask(self, found: Slice, due: float) -> None:
        found.offered += 1

        def done(answer: Answer) -> None:
            took = time.monotonic() - due
            if answer.error is not None:
                found.refused += 1
            else:
                found.in_time += took <= SLO
                found.latencies.append(took)

        self._send(0, done, due, background=False)

    def _copy(self, found: Slice) -> None:
        found.copies += 1

        def done(answer: Answer) -> None:
            found.ran += answer.error is None
            found.skipped += answer.error is not None

        self._send(1, done, time.monotonic(), background=True)

    def _send(self, which: int, told: Told, arrived: float, *, background: bool) -> None:
        try:
            slot = self.door.slot(len(self.body))
        except Unavailable as error:
            told(Answer(error=error))
            return
        slot.view[: len(self.body)] = self.body
        self.open += 1

        def done(answer: Answer) -> None:
            self.open -= 1
            self.copies.discard(call)
            told(answer)
            call.release()

        handling = BACKGROUND if background else USUAL
        ask = Ask(self.entries[which], self.heads[which], slot, self.tail, arrived, handling=handling)
        call = self.door.infer(ask, Once(done))
        if background:
            self.copies.add(call)


class Once(OneAnswer):
    def __init__(self, done: Told) -> None:
        self.done = done  # type: ignore[method-assign]


# ---- a whole server

SERVE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
PLAN = {
    "shadow": 1.0,
    "shadow_h": 24,
    "least": 10**9,
    "guards": {"disagreement": False, "late": False, "errors": False},
}


def served_rows(pairs: int, seconds: float, device: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="carpool-shadow-") as folder:
        home = Path(folder)
        write_model(home / "models", device)
        settings = home / "models" / "m" / "model.toml"
        settings.write_text(settings.read_text().replace('versions = "all"', "versions = [1]"))
        ports = Random().sample(range(20_000, 32_000), 3)  # below those of outgoing connections
        options = zip(("--http-port", "--grpc-port", "--metrics-port"), map(str, ports), strict=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
        own |= {"CARPOOL_STATE_DIR": str(home / "state"), "CARPOOL_CACHE_DIR": str(home / "cache")}
        server = subprocess.Popen(
            [
                *(sys.executable, "-c", SERVE, "serve", str(home / "models"), "--allow-rollouts"),
                *(word for option in options for word in option),
                *("--host", "127.0.0.1", "--frontends", "1", "--grpc-frontends", "0"),
            ],
            env=own,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return uvloop.run(measure_server(ports[0], server.pid, pairs, seconds))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def processor_seconds(pid: int) -> float:
    """Of a process and all below it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return spent + sum(processor_seconds(int(child)) for child in children)


async def measure_server(port: int, pid: int, pairs: int, seconds: float) -> list[Row]:
    asker = HttpAsker(port, pid)
    await asker.until(lambda found: found["stable"] is not None)  # it is loaded
    return await in_turn(asker, pairs, seconds)


class HttpAsker:
    """Asks over connections that are kept, and has the rollout started and aborted between slices."""

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self._pid = pid
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
        self._body = json.dumps({"inputs": [tensor]}).encode()

    async def slice(self, rate: float, seconds: float, random: Random, *, shadow: bool) -> Slice:
        await self._ask("POST", "/v2/models/m/rollout", json.dumps({"action": "abort"}).encode())
        if shadow:
            start = json.dumps({"action": "start", "version": 2, "plan": PLAN}).encode()
            status, said = await self._ask("POST", "/v2/models/m/rollout", start)
            if status != 200:
                raise SystemExit(f"no rollout: {said.decode()}")
            await self.until(lambda found: found["state"] == "shadow")
        found = Slice(seconds - SETTLE_S if seconds > SETTLE_S else seconds)
        tasks: list[asyncio.Task[None]] = []
        spent = processor_seconds(self._pid)
        began = due = time.monotonic()
        while due < began + seconds:
            due += random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            counts = due - began > SETTLE_S
            tasks.append(asyncio.create_task(self._infer(found if counts else Slice(1.0), due)))
        await asyncio.gather(*tasks)
        found.cpu_ms = 1e3 * (processor_seconds(self._pid) - spent) / len(tasks)
        if shadow:
            counts = (await self.until(lambda _: True))["counts"]
            found.ran, found.skipped = counts["compared"] + counts["seen"], sum(counts["skipped"].values())
            found.copies = found.ran + found.skipped
        return found

    async def _infer(self, found: Slice, due: float) -> None:
        found.offered += 1
        status, _ = await self._ask("POST", "/v2/models/m/infer", self._body)
        took = time.monotonic() - due
        if status == 200:
            found.in_time += took <= SLO
            found.latencies.append(took)
        else:
            found.refused += 1

    async def until(self, so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        body = b""
        give_up = time.monotonic() + READY_S
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                status, body = await self._ask("GET", "/v2/models/m/rollout")
                if status == 200 and so(found := json.loads(body)):
                    return dict(found)
            await asyncio.sleep(0.1)
        raise SystemExit(f"the rollout did not come so far: {body.decode()[:500]}")

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        reader, writer = (
            self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        )
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        fields = await reader.readuntil(b"\r\n\r\n")
        lower = fields.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        answer = await reader.readexactly(length)
        if b"connection: close" in lower:
            writer.close()
        else:
            self._free.append((reader, writer))
        return int(fields.split()[1]), answer


# ---- what came out


def row_of(load: float, slices: Sequence[tuple[Slice, Slice]]) -> Row:
    alone, beside = ([pair[side] for pair in slices] for side in (0, 1))
    return Row(
        load,
        goodput_ratio=median(b.goodput / a.goodput if a.goodput else math.nan for a, b in slices),
        refused_ratio=median((b.refused + 1) / (a.refused + 1) for a, b in slices),
        p99_ms_alone=median(p99_ms(one) for one in alone),
        p99_ms_beside=median(p99_ms(one) for one in beside),
        offered=sum(one.offered for one in alone) / sum(one.seconds for one in alone),
        goodput_alone=median(one.goodput for one in alone),
        goodput_beside=median(one.goodput for one in beside),
        copies=sum(one.copies for one in beside),
        ran=sum(one.ran for one in beside),
        skipped=sum(one.skipped for one in beside),
        cpu_ms_alone=median(one.cpu_ms for one in alone),
        cpu_ms_beside=median(one.cpu_ms for one in beside),
    )


def p99_ms(one: Slice) -> float:
    ordered = sorted(one.latencies)
    return 1e3 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0


def as_text(found: Sequence[Row]) -> str:
    lines = [
        f"{'load':>5} {'offered/s':>10} {'in time/s':>10} {'beside':>8} {'ratio':>7} {'refusals':>9} "
        f"{'p99 ms':>7} {'beside':>7} {'copies':>7} {'run':>6} {'CPU ms':>7} {'beside':>7}"
    ]
    lines += [
        f"{row.load:>4g}× {row.offered:>10.0f} {row.goodput_alone:>10.1f} {row.goodput_beside:>8.1f} "
        f"{row.goodput_ratio:>7.4f} {row.refused_ratio:>9.3f} {row.p99_ms_alone:>7.1f} "
        f"{row.p99_ms_beside:>7.1f} {row.copies:>7} {row.ran / max(1, row.copies):>6.1%} "
        f"{row.cpu_ms_alone:>7.2f} {row.cpu_ms_beside:>7.2f}"
        for row in found
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main, "shadow")
