"""A hundred thousand requests leave no memory behind, and a server that nobody asks costs next to nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from backends import onnx_models
from engine import repositories
from frontend.http.harness import post
from live.server import ONE_PROCESS, Live, infer_path, processor_seconds, resident_bytes, serving

CONNECTIONS = 24
MARGIN = 8 << 20
IDLE_S = 2.5
LOOKS = 6  # what a machine that is busy with others puts on our bill is not there every time

RAW = post(infer_path("same"), bytes(12), b"Inference-Header-Content-Length: 0\r\n")
IN_JSON = post(
    infer_path("same"),
    orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}),
)
WRONG = post(infer_path("same"), b'{"inputs": []}')
NOWHERE = b"GET /v2/models/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
EXPECTED = {RAW: b"200", IN_JSON: b"200", WRONG: b"400", NOWHERE: b"404"}


def kind(number: int) -> bytes:
    """Mostly the cheap and common request; the others take other ways through the server."""
    if number % 16:
        return RAW
    return (IN_JSON, IN_JSON, WRONG, NOWHERE)[number // 16 % 4]


class Crowd:
    """Connections that share a number of requests, each with one under way at a time."""

    def __init__(self, port: int, requests: int) -> None:
        self.port = port
        self.left = requests
        self.statuses: Counter[bytes] = Counter()
        self.wrong: list[bytes] = []
        self.open = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS):
            self.open += 1
            await loop.create_connection(lambda: One(self), "127.0.0.1", self.port)
        await asyncio.wait_for(self.done, 600)

    def closed(self) -> None:
        self.open -= 1
        if not self.open and not self.done.done():
            self.done.set_result(None)


class One(asyncio.Protocol):
    """The smallest HTTP client there is: time spent here is the test's, not the server's."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._received = b""
        self._sent = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data
        head = received.find(b"\r\n\r\n")
        if head < 0:
            return
        at = received.index(b"content-length: ") + 16
        size = int(received[at : received.index(b"\r", at)])
        if len(received) < head + 4 + size:
            return
        crowd = self._crowd
        status = received[9:12]
        crowd.statuses[status] += 1
        if status != EXPECTED[self._sent] or len(received) != head + 4 + size:
            crowd.wrong.append(received)
        self._received = b""
        self._next()

    def connection_lost(self, _exc: Exception | None) -> None:
        self._crowd.closed()

    def _next(self) -> None:
        crowd = self._crowd
        if not crowd.left:
            self._transport.close()
            return
        self._sent = kind(crowd.left)
        crowd.left -= 1
        self._transport.write(self._sent)


def send(server: Live, requests: int) -> None:
    async def inside() -> Crowd:
        crowd = Crowd(server.port, requests)
        await crowd.run()
        return crowd

    crowd = asyncio.run(inside())
    assert crowd.statuses.total() == requests
    assert crowd.wrong == []


def memory(server: Live) -> dict[str, int]:
    """Bytes of each process, the workers of models apart."""
    pids = {"first": server.pid, "engine": server.engine_pid}
    pids |= {f"front end {number}": pid for number, pid in enumerate(server.frontend_pids)}
    return {f"{name} {pid}": resident_bytes(pid) for name, pid in pids.items()}


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("frontends", "early", "requests"),
    [(1, 20_000, 100_000), (0, 10_000, 30_000)],
    ids=["two processes", "one"],
)
def test_memory_is_flat(tmp_path: Path, frontends: int, early: int, requests: int) -> None:
    models = tmp_path / "models"
    onnx_models.identity(models / "same" / "1" / "model.onnx")
    with serving(models, frontends=frontends, folder=tmp_path) as server:
        send(server, early)
        before = memory(server)
        send(server, requests - early)
        after = memory(server)
        assert before.keys() == after.keys(), "a process was replaced"
        grown = {name: after[name] - before[name] for name in before}
        assert max(grown.values()) < MARGIN, grown
        sent = Counter(map(kind, [*range(1, early + 1), *range(1, requests - early + 1)]))
        server.until_metric(sent[RAW] + sent[IN_JSON], "nv_inference_request_success", model="same")
        server.until_metric(sent[WRONG], "nv_inference_request_failure", model="same")


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", [ONE_PROCESS, 2])
def test_idle_costs_less_than_one_percent_of_a_core(tmp_path: Path, frontends: int) -> None:
    """All its processes together, with a model of every mode, connections open, and work done before."""
    models = tmp_path / "models"
    onnx_models.identity(models / "same" / "1" / "model.onnx")
    repositories.fake(models, name="promising")
    repositories.python(
        models, "def predict(x):\n    return x\n", name="patient", head="[batching]\nmax_delay_ms = 5"
    )
    with serving(models, frontends=frontends, folder=tmp_path) as server:
        send(server, 500)
        idle = [server.connect() for _ in range(8)]
        for client in idle:
            assert client.get("/v2/health/ready").status == 200
        shares: list[float] = []
        while len(shares) < LOOKS and min(shares, default=1.0) >= 0.01:
            shares.append(share_of_a_core(server.all_pids()))
        for client in idle:
            client.socket.close()
        assert min(shares) < 0.01, shares


def share_of_a_core(pids: Sequence[int]) -> float:
    before, began = sum(map(processor_seconds, pids)), time.monotonic()
    time.sleep(IDLE_S)  # the measurement, not a wait for something
    return (sum(map(processor_seconds, pids)) - before) / (time.monotonic() - began)
