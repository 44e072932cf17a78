"""An honest client: requests as a Poisson process over HTTP or gRPC, with a key or without one, and how long
each took. A process of its own, so that the attacker does not slow it down by more than the machine has."""

import asyncio
import contextlib
import io
import json
import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from PIL import Image

from attacks.attacker import HOST, Ports, post
from attacks.isolation import infer, sequence_step
from load.burst import LoadError

KEY = "honest-clients-key-01"
RATE = 30.0
GIVES_UP_S = 2.0
GOOD_HOST = "good.example"
FETCHED = "fetches"
"""Pictures that the server fetches from the good host."""
_MORE_S = 30.0
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_LIVE = "/inference.GRPCInferenceService/ServerLive"


@dataclass(frozen=True)
class Load:
    protocol: str  # http, grpc, pictures, sequences or fetches
    ports: Ports
    seconds: float
    keyed: bool
    seed: int = 1
    rate: float = RATE
    waits: bool = False  # for `begin`


@dataclass(frozen=True)
class Answers:
    latencies: tuple[float | None, ...]  # None: it was refused, failed or took too long

    def attainment(self, slo_s: float) -> float:
        return 1 - self.late(slo_s) / max(1, len(self.latencies))

    def late(self, slo_s: float) -> int:
        """Those that were rejected, failed or took longer."""
        return sum(one is None or one > slo_s for one in self.latencies)


class Running:
    def __init__(self, load: Load) -> None:
        forks = multiprocessing.get_context("forkserver")
        self._pipe, theirs = forks.Pipe()
        self._process = forks.Process(target=_main, args=(theirs, load), daemon=True)
        self._process.start()
        theirs.close()
        self._load = load

    def begin(self) -> None:
        self._pipe.send(None)

    def result(self) -> Answers:
        try:
            if not self._pipe.poll(self._load.seconds + _MORE_S):
                raise LoadError("the honest client did not end")
            found: Answers = self._pipe.recv()
        except EOFError:
            raise LoadError("the honest client failed") from None
        self._process.join(5.0)
        return found

    def end(self) -> None:
        """Ends it, if it still runs."""
        self._process.kill()
        self._process.join()


def _main(pipe: Connection, load: Load) -> None:
    pipe.send(asyncio.run(_run(load, pipe)))


async def _run(load: Load, pipe: Connection) -> Answers:
    kinds = {"grpc": _OverGrpc, "http": _OverHttp, "pictures": _Pictures, "sequences": _Sequences}
    asks = (kinds | {FETCHED: _Fetched})[load.protocol](load)
    with contextlib.suppress(Exception):
        await asyncio.wait_for(asks.ask(), GIVES_UP_S)  # the first one connects
    if load.waits:
        pipe.recv()
    draw, latencies = random.Random(load.seed), list[float | None]()
    end, due, under_way = time.monotonic() + load.seconds, time.monotonic(), set[asyncio.Task[None]]()

    async def one() -> None:
        began = time.monotonic()
        try:
            good = await asyncio.wait_for(asks.ask(), GIVES_UP_S)
        except Exception:
            good = False
        latencies.append(time.monotonic() - began if good else None)

    while (due := due + draw.expovariate(load.rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(one())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.wait(under_way)
    return Answers(tuple(latencies))


class _OverGrpc:
    def __init__(self, load: Load) -> None:
        import grpc.aio  # the attackers do without

        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(f"{HOST}:{load.ports.grpc}", options)
        self._infer = channel.unary_unary(_INFER)
        self._live = channel.unary_unary(_LIVE)
        self._metadata = (("x-api-key", KEY),) if load.keyed else ()
        self._asked = 0

    async def ask(self) -> bool:
        """Every tenth asks whether the server is alive, as a probe does."""
        self._asked += 1
        if self._asked % 10:
            await self._infer(infer("steady", 64), timeout=GIVES_UP_S, metadata=self._metadata)
        else:
            await self._live(b"", timeout=GIVES_UP_S)
        return True


class _OverHttp:
    path, body, fields = "/v2/models/steady/infer", bytes(64), b"Inference-Header-Content-Length: 0\r\n"

    def __init__(self, load: Load) -> None:
        fields = self.fields + (b"X-API-Key: %b\r\n" % KEY.encode() if load.keyed else b"")
        self._request = post(self.path, len(self.body), fields) + self.body
        self._port = load.ports.http
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self) -> bool:
        if self._free:
            reader, writer = self._free.pop()
        else:
            reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(self._request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
        except BaseException:
            writer.close()
            raise
        self._free.append((reader, writer))
        return b" 200 " in head[:16]


def small_picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (320, 240), (9, 99, 199)).save(file, "JPEG")
    return file.getvalue()


class _Pictures(_OverHttp):
    path, body, fields = "/models/pictures/predict", small_picture(), b"Content-Type: image/jpeg\r\n"


class _Fetched(_OverHttp):
    path, fields = "/models/pictures/predict", b"Content-Type: application/json\r\n"
    body = json.dumps({"url": f"http://{GOOD_HOST}/a.jpg"}).encode()


class _Sequences(_OverHttp):
    """Each request is a whole sequence, and needs a place."""

    path, body, fields = "/v2/models/tracker/infer", sequence_step(1, end=True), b""
