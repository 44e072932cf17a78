"""What a picture costs over HTTP: JPEG in, typed answer out, beside the same work in one process.

For each model and concurrency, short slices in turn: Carpool's image route, the same decoding, transform,
onnxruntime (at the server's mean batch) and postprocessing called directly, and what a team writes with
FastAPI. CPU is the user and system time of all processes, per picture; figures are medians over the rounds,
the ratio is taken within each. Then NMS beside opencv's: `nms.py`.

    python benchmarks/vision.py --setup     # once: FastAPI's own environment
    python benchmarks/vision.py             # about eight minutes
    python benchmarks/vision.py --quick     # within a minute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import process_time

import cv2
import numpy as np
import onnxruntime
import orjson

import nms
from carpool.demo import bundled_models, pictures
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.link.catalog import Batching, ModelEntry
from carpool.types import Datatype, Tensor
from carpool.vision.picture_answers import DEFAULT
from load import processes
from load.burst import Burst, LoadError
from load.ports import free_port
from load.program import run_program
from peers import setup

THREADS = 2  # within a run of the model, for everybody
MODELS = {"nanodet": "astronaut", "efficientnet_lite0": "coffee"}
STOP_S = 10.0
READY_S = 60.0
ASK_S = 60.0
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    model: str
    concurrency: int
    rps: float
    p50_ms: float
    batch: float
    cpu_us: float
    in_process_cpu_us: float
    ratio: float
    fastapi_rps: float | None
    fastapi_cpu_us: float | None


@dataclass(frozen=True)
class Turn:
    """One slice of everybody."""

    ours: Burst
    batch: float
    cpu_us: float
    in_process_us: float
    fastapi: Burst | None
    fastapi_us: float | None


class Server:
    """A process with all below it, stopped at the end."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=env or None, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        self._log = log

    def wait_for(self, url: str, body: bytes) -> dict[str, object]:
        """Its first good answer."""
        give_up = time.monotonic() + READY_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                with urllib.request.urlopen(urllib.request.Request(url, body), timeout=5) as answer:
                    found: dict[str, object] = json.loads(answer.read())
                    return found
            except OSError:
                time.sleep(0.1)
        raise LoadError(f"no answer at {url}:\n{self._log.read_text(errors='replace')[-2000:]}")

    def cpu(self) -> dict[int, float]:
        return processes.tree_cpu(self._process.pid)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)


class Clients:
    """So many clients in a closed loop. Each waits for its last answer, so that all work done is counted."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._address = ("127.0.0.1", port)
        self._path = path
        self._body = body

    def __call__(self, concurrency: int, seconds: float) -> Burst:
        began = time.monotonic()
        end = began + seconds
        with ThreadPoolExecutor(concurrency) as pool:
            times = [one for some in pool.map(self._ask_until, [end] * concurrency) for one in some]
        took = time.monotonic() - began
        times.sort()
        p50, p99 = (1e3 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
        return Burst(len(times), took, p50, p99, {}, 0.0)

    def _ask_until(self, end: float) -> list[float]:
        connection = HTTPConnection(*self._address, timeout=ASK_S)
        times = []
        while time.monotonic() < end or not times:
            began = time.monotonic()
            connection.request("POST", self._path, self._body, {"Content-Type": "image/jpeg"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise LoadError(f"{self._path} answers {answer.status}")
            times.append(time.monotonic() - began)
        connection.close()
        return times


class InProcess:
    """The same functions that the front end and the engine call, without anything in between."""

    def __init__(self, entry: ModelEntry, file: Path, body: bytes) -> None:
        self._model = PictureModel(entry)
        self._body = body
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._pool = ThreadPoolExecutor(THREADS)
        cv2.setNumThreads(1)

    def cpu_us(self, batch: int, seconds: float, *, busy: bool) -> float:
        """CPU per picture. `busy`: the next batch is decoded while this one runs, as under load."""
        done, started, end = 0, process_time(), time.monotonic() + seconds
        ready = self._decoded(batch)
        while time.monotonic() < end:
            memory, geometries = ready
            if busy:
                following = [self._pool.submit(self._decoded, 1) for _ in range(batch)]
            outputs = self._run(memory)
            for number, geometry in enumerate(geometries):
                one = self._model.of_one(outputs, number)
                orjson.dumps(self._model.answers.answer(one, geometry, DEFAULT))
            done += batch
            ready = self._joined([work.result() for work in following]) if busy else self._decoded(batch)
        return 1e6 * (process_time() - started) / done

    def answer(self) -> dict[str, object]:
        memory, [geometry] = self._decoded(1)
        return self._model.answers.answer(self._model.of_one(self._run(memory), 0), geometry, DEFAULT)

    def _decoded(self, batch: int) -> tuple[bytearray, list]:
        size = self._model.bytes
        memory = bytearray(batch * size)
        view = memoryview(memory)
        return memory, [
            self._model.prepare(self._body, view[number * size : (number + 1) * size])
            for number in range(batch)
        ]

    def _joined(self, parts: list) -> tuple[bytearray, list]:
        """Side by side in one buffer: the engine gathers its slots, too."""
        memory = bytearray().join(part for part, _ in parts)
        return memory, [geometry for _, [geometry] in parts]

    def _run(self, memory: bytearray) -> list[Tensor]:
        shape = (-1, *self._model.transform.shape)
        array = np.frombuffer(memory, self._model.transform.dtype).reshape(shape)
        names = [output.name for output in self._model.outputs]
        found = self._session.run(names, {self._model.settings.input.name: array})
        return [Tensor(name, Datatype.FP32, one.shape, one) for name, one in zip(names, found, strict=True)]


class Contest:
    """One model behind everybody who serves it."""

    def __init__(self, name: str, source: Path, folder: Path, peers_dir: Path) -> None:
        self.name = name
        self.body = next(file for file in pictures() if file.stem == MODELS[name]).read_bytes()
        self._folder = folder / name
        self._file = source / "1" / "model.onnx"
        self._source = _without_promise(source, folder / "models")
        self._peers_dir = peers_dir

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._folder.mkdir()
        servers = [self._start_ours()]
        try:
            self.ours = servers[0]
            answered = self.ours.wait_for(f"http://127.0.0.1:{self._port}{self._path}", self.body)
            self.in_process = InProcess(_entry(self._source), self._file, self.body)
            if (expected := self.in_process.answer()) != {key: answered[key] for key in expected}:
                raise LoadError(f"the server answers {answered}, and in one process it is {expected}")
            self._fire = Clients(self._port, self._path, self.body)
            self.fastapi = None
            if setup.vision_python(self._peers_dir).exists():
                self.fastapi, self._fastapi_fire = self._start_fastapi()
                servers.append(self.fastapi)
            yield
        finally:
            for server in servers:
                server.stop()

    def turn(self, concurrency: int, seconds: float) -> Turn:
        before, batches = self.ours.cpu(), self._batches()
        ours = self._fire(concurrency, seconds)
        spent = processes.spent(before, self.ours.cpu())
        images, runs = (new - old for new, old in zip(self._batches(), batches, strict=True))
        batch = images / max(1.0, runs)
        alone = self.in_process.cpu_us(max(1, round(batch)), seconds, busy=concurrency > 1)
        fastapi, fastapi_us = None, None
        if self.fastapi is not None:
            before = self.fastapi.cpu()
            fastapi = self._fastapi_fire(concurrency, seconds)
            fastapi_us = 1e6 * processes.spent(before, self.fastapi.cpu()) / fastapi.requests
        return Turn(ours, batch, 1e6 * spent / ours.requests, alone, fastapi, fastapi_us)

    @property
    def _path(self) -> str:
        return f"/models/{self.name}/predict"

    def _start_ours(self) -> Server:
        self._port, self._metrics = free_port(), free_port()
        command = [str(Path(sys.executable).with_name("carpool")), "serve", str(self._source)]
        command += ["--host", "127.0.0.1", "--http-port", str(self._port)]
        command += ["--metrics-port", str(self._metrics), "--grpc-frontends", "0"]
        return Server(command, {}, self._folder / "carpool.log")

    def _start_fastapi(self) -> tuple[Server, Clients]:
        port = free_port()
        env = {
            "BENCH_PORT": str(port),
            "BENCH_MODEL": str(self._file),
            "BENCH_TASK": "detect" if self.name == "nanodet" else "classify",
            "BENCH_THREADS": str(THREADS),
            "BENCH_MAX_BATCH": "8",
            "BENCH_LABELS": str(next(self._source.glob("*labels.txt"))),
        }
        command = [str(setup.vision_python(self._peers_dir)), str(_HERE / "peers" / "fastapi_vision.py")]
        server = Server(command, env, self._folder / "fastapi.log")
        server.wait_for(f"http://127.0.0.1:{port}/predict", self.body)
        return server, Clients(port, "/predict", self.body)

    def _batches(self) -> tuple[float, float]:
        """Images and executions so far."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=5) as page:
            text = page.read().decode()
        found = [
            re.search(rf"^carpool_batch_size_{what}{{.*}} (\S+)$", text, re.MULTILINE)
            for what in ("sum", "count")
        ]
        images, runs = (float(one[1]) if one else 0.0 for one in found)
        return images, runs


def _without_promise(source: Path, folder: Path) -> Path:
    """The model with the same settings and no gate: everybody has to answer everything here."""
    copy = folder / source.name
    (copy / "1").mkdir(parents=True)
    (copy / "1" / "model.onnx").symlink_to((source / "1" / "model.onnx").resolve())
    for labels in source.glob("*labels.txt"):
        (copy / labels.name).write_bytes(labels.read_bytes())
    lines = (source / "model.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("slo_m", "max_batch", "instances"))]
    text = "\n".join(["max_batch = 8", *kept, "", "[onnxruntime]", f"intra_op_threads = {THREADS}", ""])
    (copy / "model.toml").write_text(text)
    return copy


def _entry(source: Path) -> ModelEntry:
    """As the engine would describe it, without running it."""
    from carpool import backends
    from carpool.config.repository import find_models
    from carpool.engine.loading.trial import read_labels
    from carpool.engine.run.model_inputs import signature_of
    from carpool.vision.plans.settings import describe, write

    [found], _ = find_models([source])
    config = backends.describe(found.config, found.versions[0])
    signature = signature_of(config)
    vision = describe(config, signature, read_labels(config))[0]
    assert vision is not None
    return ModelEntry(1, config.name, "1", signature, Batching("eager"), vision=write(vision))


def summarise(name: str, concurrency: int, turns: Sequence[Turn]) -> Row:
    fastapi = [turn for turn in turns if turn.fastapi is not None and turn.fastapi_us is not None]
    return Row(
        model=name,
        concurrency=concurrency,
        rps=round(median(turn.ours.rps for turn in turns), 1),
        p50_ms=round(median(turn.ours.p50_ms for turn in turns), 2),
        batch=round(median(turn.batch for turn in turns), 2),
        cpu_us=round(median(turn.cpu_us for turn in turns)),
        in_process_cpu_us=round(median(turn.in_process_us for turn in turns)),
        ratio=round(median(turn.cpu_us / turn.in_process_us for turn in turns), 3),
        fastapi_rps=round(median(turn.fastapi.rps for turn in fastapi if turn.fastapi), 1)
        if fastapi
        else None,
        fastapi_cpu_us=round(median(turn.fastapi_us for turn in fastapi if turn.fastapi_us))
        if fastapi
        else None,
    )


def show(rows: Sequence[Row]) -> None:
    print(
        f"{'model':20}{'in flight':>10}{'rps':>8}{'p50 ms':>9}{'batch':>7}{'CPU µs':>9}{'in process':>12}"
        f"{'ratio':>8}{'FastAPI rps':>13}{'CPU µs':>9}"
    )
    for row in rows:
        peer = f"{row.fastapi_rps:>13}{row.fastapi_cpu_us:>9}" if row.fastapi_rps else f"{'–':>13}{'–':>9}"
        print(
            f"{row.model:20}{row.concurrency:>10}{row.rps:>8}{row.p50_ms:>9}{row.batch:>7}{row.cpu_us:>9}"
            f"{row.in_process_cpu_us:>12}{row.ratio:>8}{peer}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter slices, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--models", default=",".join(MODELS), help="which of %(default)s")
    parser.add_argument("--setup", action="store_true", help="make FastAPI's environment and stop")
    parser.add_argument("--peers-dir", type=Path, default=setup.default_dir(), help="default: %(default)s")
    asked = parser.parse_args()
    if asked.setup:
        setup.make_vision(asked.peers_dir)
        return 0
    rounds, seconds, all_at_once = (1, 1.5, (1, 32)) if asked.quick else (7, 3.0, (1, 8, 32))
    rows = []
    with tempfile.TemporaryDirectory(prefix="carpool-vision-") as folder:
        for source in _sources(asked.models.split(",")):
            contest = Contest(source.name, source, Path(folder), asked.peers_dir)
            with contest.running():
                contest.turn(8, 0.5)  # to warm up
                turns: dict[int, list[Turn]] = {concurrency: [] for concurrency in all_at_once}
                for _ in range(rounds):
                    for concurrency, taken in turns.items():
                        taken.append(contest.turn(concurrency, seconds))
                rows += [summarise(source.name, concurrency, taken) for concurrency, taken in turns.items()]
    suppressed = nms.suppression(0.05 if asked.quick else 1.0)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows] + [asdict(row) for row in suppressed], indent=2))
    else:
        show(rows)
        nms.show(suppressed)
    return 0


def _sources(wanted: Sequence[str]) -> Iterator[Path]:
    for name in wanted:
        if name in MODELS:
            yield bundled_models() / name
        else:
            print(f"{name} is left out: only {', '.join(MODELS)} are measured", file=sys.stderr)


if __name__ == "__main__":
    run_program(main, "vision", LoadError, setup.SetupError)
