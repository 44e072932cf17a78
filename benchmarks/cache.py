"""What the response cache costs and gives, and how often it would be wrong, beside what textbooks do.

A whole server, asked over HTTP. CPU time is that of all of its processes and threads, from the kernel
(/proc/…/schedstat), so that what else the machine does hardly matters; what is compared is asked in turn, in
short slices. The textbooks' way is a hash of the whole picture (`imagehash.phash`) and a look into Redis
(redis-py, a redis-server of its own), in this process.

    python benchmarks/cache.py                    # about seven minutes
    python benchmarks/cache.py --quick            # less of everything: a look
    python benchmarks/cache.py --only costs,people
    python benchmarks/cache.py --json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import carpool.demo
from carpool.core.evidence import interval
from carpool.extensions.cache.cache_key import by_blake2b, by_sha256
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.plans.compare import compare_answers
from carpool.wire.http_reply import read_reply
from load import cache_redis, cache_rules
from load.carpool_server import CarpoolServer, carpool_server
from load.ports import free_port
from load.program import run_program
from load.still_camera import WIDTH, frame, is_seen

MODEL = """
backend = "fake"
task = "classify"
slo_ms = {slo_ms}
max_batch = 16
[fake]
curve = "{curve}"
[[input]]
name = "image"
datatype = "UINT8"
shape = [3, 32, 32]
[[output]]
name = "scores"
datatype = "FP32"
shape = [10]
{cache}
"""
EXACT = "[cache]\nexact = true\n"
SIMILAR = "[cache]\nexact = false\nsimilar = true\naudit = 0\nsimilar_ttl_s = {ttl}\n"
TENSOR = {"name": "image", "datatype": "UINT8", "shape": [1, 3, 32, 32]}
HUNDRED_KB = 100_000
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    quick: bool
    hits: int
    seed: int
    rules: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--hits", type=int, default=1000, help="people: end after so many")
    parser.add_argument("--rules", default=";".join(RULES), help="people: some of these, with ; between")
    parser.add_argument("--seed", type=int, default=1, help="people: another one walks otherwise")
    parser.add_argument("--json", action="store_true", help="print objects for machines")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in args.only.split(","):
        found = PARTS[name](Plan(args.quick, args.hits, args.seed, tuple(args.rules.split(";"))))
        rows += found
        if not args.json:
            print(as_text(found), flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    return 0


def as_text(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        said = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("  ".join(f"{key}={value}" for key, value in zip(row, said, strict=True)))
    return "\n".join(lines)


# ---- servers and their CPU time ----------------------------------------------------------------------------


@contextlib.contextmanager
def server(slo_ms: float = 1000, curve: str = "0.001+0", **models: str) -> Iterator[CarpoolServer]:
    """Of fake models by name, each with its [cache]."""
    with tempfile.TemporaryDirectory(prefix="carpool-cache-") as name:
        for model, cache in models.items():
            folder = Path(name) / "models" / model
            folder.mkdir(parents=True)
            text = MODEL.format(slo_ms=slo_ms, curve=curve, cache=cache)
            (folder / "model.toml").write_text(text)
        with carpool_server(Path(name) / "models", options=("--frontends", "1")) as running:
            yield running


def cpu_seconds(process: int) -> float:
    """Of a process and all of its children."""
    total, waiting = 0, [process]
    while waiting:
        one = waiting.pop()
        for task in Path(f"/proc/{one}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
                waiting += map(int, (task / "children").read_text().split())
    return total / 1e9


class Asking:
    """One client with one connection."""

    def __init__(self, running: CarpoolServer) -> None:
        host = running.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=60)
        self._process = running.process.pid
        self.words: Counter[str] = Counter()

    def picture(self, model: str, data: bytes, **fields: str) -> bytes:
        headers = {"Content-Type": "image/jpeg", **{k.replace("_", "-"): v for k, v in fields.items()}}
        return self._ask(model, f"/models/{model}/predict", data, headers)

    def tensors(self, model: str, head: bytes, tail: bytes) -> bytes:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        return self._ask(model, f"/v2/models/{model}/infer", head + tail, headers)

    def _ask(self, model: str, path: str, data: bytes, headers: dict[str, str]) -> bytes:
        self._connection.request("POST", path, data, headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"{model} answered {answer.status}: {body[:300]!r}")
        self.word = (answer.getheader("X-Carpool-Cache") or "none").partition("; age")[0]
        self.words[self.word.partition("; change")[0]] += 1
        return body

    def slice(self, work: Callable[[], object], times: int, idle: float = 0.0) -> float:
        """µs of the server's CPU for each, without what it takes for itself: `idle`, of each second."""
        began, before = time.monotonic(), cpu_seconds(self._process)
        for _ in range(times):
            work()
        spent = cpu_seconds(self._process) - before
        return (spent - idle * (time.monotonic() - began)) / times * 1e6

    def idle(self, seconds: float = 3.0) -> float:
        """Its CPU for each second in which nobody asks."""
        before = cpu_seconds(self._process)
        time.sleep(seconds)
        return (cpu_seconds(self._process) - before) / seconds

    def alive(self) -> None:
        self._connection.request("GET", "/v2/health/live")
        self._connection.getresponse().read()


def with_comment(jpeg: bytes, text: bytes) -> bytes:
    """The same picture, other bytes."""
    return jpeg[:2] + b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text + jpeg[2:]


def hundred_kb() -> bytes:
    """A JPEG of that size: a small one, with a comment that is skipped, would cost nothing to decode."""
    jpeg = frame("chelsea.jpg", 1)
    rest = HUNDRED_KB - len(jpeg) - 4
    return with_comment(jpeg, bytes(rest)) if rest > 0 else jpeg


# ---- what a hit and a miss cost ----------------------------------------------------------------------------


def costs(plan: Plan) -> list[Row]:
    slices, each = (6, 40) if plan.quick else (24, 60)
    base = hundred_kb()
    number = 0

    def unique() -> bytes:
        nonlocal number
        number += 1
        return with_comment(base[:-2], b"%012d" % number) + base[-2:]

    def tensor() -> bytes:
        nonlocal number
        number += 1
        return number.to_bytes(8, "little") + bytes(3064)

    small = "a tensor of 3 KB"
    head = json.dumps({"inputs": [TENSOR | {"parameters": {"binary_data_size": 3072}}]}).encode()
    frames = [frame("chelsea.jpg", seed) for seed in range(40)]
    models = {"plain": "", "exact": EXACT, "similar": SIMILAR.format(ttl=3600)}
    with server(**models) as running:
        client = Asking(running)
        source = {"X_Carpool_Source": "camera"}
        ways: dict[str, Callable[[], object]] = {
            "a request for nothing (GET /v2/health/live)": client.alive,
            "computed, no cache": lambda: client.picture("plain", unique()),
            "miss": lambda: client.picture("exact", unique()),
            "exact hit": lambda: client.picture("exact", base),
            "similar hit, 640x480": lambda: client.picture("similar", frames[number_of(client)], **source),
            f"{small}, no cache": lambda: client.tensors("plain", head, tensor()),
            f"{small}, miss": lambda: client.tensors("exact", head, tensor()),
        }
        for way in ways.values():
            for _ in range(60):
                way()
        client.words.clear()
        idle = client.idle()
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(slices):
            for name, way in ways.items():
                found[name].append(client.slice(way, each, idle))
    rows = [{"part": "costs", "what": name, "us_of_cpu": usual(times)} for name, times in found.items()]
    # the noise of decoding a picture is more than a look takes; a tensor shows it
    for miss, plain in (("miss", "computed, no cache"), (f"{small}, miss", f"{small}, no cache")):
        more = median(one - other for one, other in zip(found[miss], found[plain], strict=True))
        rows.append({"part": "costs", "what": f"{miss}: more than without a cache", "us_of_cpu": more})
    rows.append({"part": "costs", "what": "what the answers said", **client.words})
    return [*rows, *textbook(frames, plan), *digests()]


def usual(times: Sequence[float]) -> float:
    """The lower quartile of the slices: what else the machine does only ever adds."""
    return sorted(times)[len(times) // 4]


def number_of(client: Asking) -> int:
    return client.words.total() % 40


def textbook(frames: Sequence[bytes], plan: Plan) -> list[Row]:
    """Decode, hash the whole picture, ask Redis."""
    try:
        import imagehash
        import redis
    except ImportError:
        return [{"part": "costs", "what": "imagehash and redis are not installed"}]
    from PIL import Image

    program = shutil.which("redis-server")
    rows = []
    with contextlib.ExitStack() as stack:
        found: Any = None
        if program is not None:
            port = free_port()
            command = [
                program,
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            found = redis.Redis(port=port)
            for _ in range(100):
                with contextlib.suppress(redis.exceptions.ConnectionError):
                    found.ping()
                    break
                time.sleep(0.05)
        times = []
        for data in list(frames) * (1 if plan.quick else 3):
            before = time.thread_time()
            key = str(imagehash.phash(Image.open(io.BytesIO(data))))
            if found is not None:
                found.get(key)
            times.append((time.thread_time() - before) * 1e6)
        rows.append(
            {
                "part": "costs",
                "what": "imagehash + redis-py, the client's CPU alone" if found else "imagehash alone",
                "us_of_cpu": median(times),
            }
        )
    return rows


def digests() -> list[Row]:
    import xxhash

    rows: list[Row] = []
    ways: dict[str, Callable[[bytes], object]] = {
        "xxh3_128": xxhash.xxh3_128_digest,
        "blake2b, keyed": lambda data: by_blake2b(b"k" * 32, b"", (data,)),
        "hmac-sha256": lambda data: by_sha256(b"k" * 32, b"", (data,)),
    }
    for name, way in ways.items():
        row: Row = {"part": "costs", "what": f"digest: {name}"}
        for size in (10, 100, 1000):
            data, best = bytes(size * 1000), float("inf")
            for _ in range(7):
                before = time.thread_time()
                for _ in range(20):
                    way(data)
                best = min(best, (time.thread_time() - before) / 20 * 1e6)
            row[f"us_{size}_kb"] = best
        rows.append(row)
    return rows


# ---- cameras that stand still ------------------------------------------------------------------------------


def cameras(plan: Plan) -> list[Row]:
    """In real time: how many frames of a still scene are answered from the cache, with a TTL of 2 s."""
    seconds, each = (8, 2) if plan.quick else (30, 4)
    rows = []
    frames = {kind: [frame(kind, seed) for seed in range(30)] for kind in ("chelsea.jpg", "wall")}
    with server(kept=SIMILAR.format(ttl=2)) as running:
        for fps in (5, 10):
            words: Counter[str] = Counter()

            async def camera(number: int, fps: int = fps, words: Counter[str] = words) -> None:
                kind = ("chelsea.jpg", "wall")[number % 2]
                ask = AsyncAsking(running.url)
                began = time.monotonic() + number / fps / each / 2
                for tick in range(seconds * fps):
                    await asyncio.sleep(max(0.0, began + tick / fps - time.monotonic()))
                    data = frames[kind][tick % 30]
                    _, word = await ask.picture("kept", data, f"camera-{fps}-{number}")
                    words[word.partition(";")[0]] += 1

            async def all_of_them(camera: Any = camera) -> None:
                await asyncio.gather(*(camera(number) for number in range(2 * each)))

            asyncio.run(all_of_them())
            ceiling = 1 - 1 / (2 * fps)
            hits = words["hit"] / words.total()
            rows.append(
                {"part": "cameras", "fps": fps, "frames": words.total(), "hits": hits, "most": ceiling}
            )
    return rows


class AsyncAsking:
    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def picture(self, model: str, data: bytes, source: str = "") -> tuple[int, str]:
        """The status, and what the cache says."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        said = f"X-Carpool-Source: {source}\r\n" if source else ""
        head = (
            f"POST /models/{model}/predict HTTP/1.1\r\nHost: localhost\r\n{said}Content-Length: {len(data)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + data)
        reply = await read_reply(reader, 1 << 22)
        return reply.status, reply.fields.get("x-carpool-cache", "none")


# ---- people who walk through -------------------------------------------------------------------------------

RULES = {
    "block change <= 6": "",
    "phash <= 10": 'similar_hash = "phash"\nsimilar_threshold = 10\n',
    "phash <= 4": 'similar_hash = "phash"\nsimilar_threshold = 4\n',
    "phash equal": 'similar_hash = "phash"\nsimilar_threshold = 0\n',
}


HEIGHTS = (24, 48, 64, 96, 160, 240)
STEPS = 200


@dataclass
class Verdict:
    frames: int = 0
    hits: int = 0
    differ: int = 0
    unseen: int = 0  # hits while somebody moves in the picture
    visible: int = 0
    why: list[str] = field(default_factory=list)


def people(plan: Plan) -> list[Row]:
    """The demo detector judges: every frame is also computed, and both answers are compared. Figures of 24
    to 240 px walk through, 12 px a frame, a quarter of the time. As fast as the detector is:
    a frame takes less than the fifth of a second that it stands for, and answers live two seconds all the
    same, so that the cache has a harder time than with 5 frames a second."""
    wanted = min(plan.hits, 60) if plan.quick else plan.hits
    rows = []
    for number, (name, rule) in enumerate(RULES.items()):
        if name in plan.rules and not (number and plan.quick):
            with detector(rule) as running:
                verdict = walk(Asking(running), "nanodet", wanted, plan.seed)
            low, high = interval(verdict.differ, verdict.hits)
            rows.append(
                {
                    "part": "people",
                    "rule": name,
                    "frames": verdict.frames,
                    "hits": verdict.hits,
                    "differ": verdict.differ,
                    "wrong_99": f"{low:.1%}-{high:.1%}",
                    "figure_frames": verdict.visible,
                    "figure_moved_within_a_hit": verdict.unseen,
                    "why": ", ".join(why for why, _ in Counter(verdict.why).most_common(2)),
                }
            )
    return rows


@contextlib.contextmanager
def detector(rule: str) -> Iterator[CarpoolServer]:
    """The demo's, with a cache of this rule."""
    with tempfile.TemporaryDirectory(prefix="carpool-cache-") as name:
        folder = Path(name) / "models" / "nanodet"
        shutil.copytree(Path(carpool.demo.__file__).parent / "models" / "nanodet", folder)
        settings = (folder / "model.toml").read_text().replace("slo_ms = 500", "slo_ms = 5000")
        cache = f"\n[cache]\nexact = false\nsimilar = true\naudit = 0\n{rule}"
        (folder / "model.toml").write_text(settings + cache)
        with carpool_server(Path(name) / "models", options=("--frontends", "1")) as running:
            yield running


def walk(client: Asking, model: str, wanted: int, seed: int) -> Verdict:
    verdict, number = Verdict(), 1_000_000 * seed
    scenes = [(kind, height) for height in HEIGHTS for kind in ("chelsea.jpg", "wall")]
    while True:
        kind, height = scenes[(verdict.frames // STEPS + seed) % len(scenes)]
        step = verdict.frames % STEPS - 24  # nobody is there before 0, nor after the last
        left = -height + 12 * step if 0 <= step < 52 else 2 * WIDTH
        is_hit = judge(client, model, frame(kind, number, height, left), kind, verdict)
        if is_seen(height, left):
            verdict.visible += 1
            verdict.unseen += is_hit
        if verdict.hits >= wanted:
            return verdict
        number += 1


def judge(client: Asking, model: str, data: bytes, kind: str, verdict: Verdict) -> bool:
    sent = json.loads(client.picture(model, data, X_Carpool_Source=kind))
    verdict.frames += 1
    if not client.word.startswith("hit"):
        return False
    verdict.hits += 1
    computed = json.loads(client.picture(model, data, Cache_Control="no-store"))
    found = compare_answers("detect", sent, computed, CompareSettings())
    verdict.differ += found.differs
    if found.differs:
        verdict.why.append(found.why)
    return True


# ---- three times the load, most of it repeated -------------------------------------------------------------


def overload(plan: Plan) -> list[Row]:
    """Open loop: 3 x what the model can answer in time, 60 % of it the same ten pictures."""
    seconds = 4 if plan.quick else 12
    known = [with_comment(frame("coffee.jpg", seed), b"known") for seed in range(10)]
    unique = [frame("chelsea.jpg", seed) for seed in range(20)]
    with server(slo_ms=100, curve="20+5", kept=EXACT, plain="") as running:
        capacity = asyncio.run(offered(running.url, "plain", 240.0, seconds, unique, (), 0.0))["in_time"]
        rate = 3 * capacity / seconds
        for data in known * 3:
            asyncio.run(AsyncAsking(running.url).picture("kept", data))
        alone = asyncio.run(offered(running.url, "kept", 0.4 * rate, seconds, unique, known, 0.0))
        mixed = asyncio.run(offered(running.url, "kept", rate, seconds, unique, known, 0.6))
    return [
        {"part": "overload", "what": "misses alone", "rate": 0.4 * rate, **alone},
        {"part": "overload", "what": "60 % repeated", "rate": rate, **mixed},
    ]


async def offered(
    url: str,
    model: str,
    rate: float,
    seconds: float,
    unique: Sequence[bytes],
    known: Sequence[bytes],
    part: float,
) -> Row:
    """What became of requests that came at this rate; the rest of them is unique."""
    counts: Counter[str] = Counter()
    free: list[AsyncAsking] = []
    tasks = []

    async def one(number: int) -> None:
        repeated = known and (number * 7 % 10) / 10 < part
        data = known[number % len(known)] if repeated else with_comment(unique[number % 20], b"%d" % number)
        client = free.pop() if free else AsyncAsking(url)
        began = time.monotonic()
        status, word = await client.picture(model, data)
        free.append(client)
        late = time.monotonic() - began > 0.1
        counts["repeated" if repeated else "unique"] += 1
        counts["in_time"] += status == 200 and not late
        counts["hits"] += word.startswith("hit")
        counts["repeated_refused"] += bool(repeated) and status != 200
        counts["unique_in_time"] += not repeated and status == 200 and not late

    began = time.monotonic()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    names = ("in_time", "hits", "repeated", "unique", "repeated_refused", "unique_in_time")
    return {name: counts[name] for name in names}


# ---- what tells frames apart, and Redis -----------------------------------------------------------------


def rules(plan: Plan) -> list[Row]:
    """The distance between frames of the same scene, and of one with somebody in it, by three rules."""
    return cache_rules.rows(1 if plan.quick else 5)


def shared(plan: Plan) -> list[Row]:
    """A server that shares answers through a Redis which fails, beside one that shares none."""
    base = frame("coffee.jpg", 1)
    pixels = bytes(3 * 32 * 32 - 8)
    head = json.dumps({"inputs": [{**TENSOR, "parameters": {"binary_data_size": 3072}}]}).encode()

    def asking(running: CarpoolServer) -> Callable[[int], bytes]:
        client = Asking(running)

        def ask(number: int) -> bytes:
            """A picture, or a tensor: the one is decoded while Redis is asked, the other waits for it."""
            if number % 2:
                return client.picture("kept", with_comment(base, b"%012d" % number))
            return client.tensors("kept", head, number.to_bytes(8, "big") + pixels)

        return ask

    model = MODEL.format(slo_ms=1000, curve="0.001+0", cache=EXACT)
    return cache_redis.rows(model, asking, 2.0 if plan.quick else 10.0)


PARTS: dict[str, Callable[[Plan], list[Row]]] = {
    "costs": costs,
    "cameras": cameras,
    "people": people,
    "overload": overload,
    "rules": rules,
    "redis": shared,
}

if __name__ == "__main__":
    run_program(main, "cache")
