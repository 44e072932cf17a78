"""What breaks, under load: every process killed, stopped and left without memory, and what clients saw of it.

One server with a model in the engine, one in Python and, where torch is installed, one in the runner; two
front ends for HTTP and one for gRPC. For each row `carpool load` asks at a steady rate, a second or two later
the fault happens, and a probe beside it looks every 50 ms whether the model is ready and answers:

    kill      SIGKILL
    stop      SIGSTOP, and nobody sends SIGCONT: only the watchdog helps (--watchdog-s 3 here)
    memory    RLIMIT_AS at what the process has, for two seconds: every allocation of more fails, and the
              machine's own memory is never touched

`lost` are the requests that got neither an answer nor a word from the server and were not the process's own:
timed out, never answered, or failed otherwise than by its death. Aim: 0. `missed` are those that were not
answered within 200 ms, for whatever reason. Aim, with --kills: 10 for a front end, 40 for the engine.
`first` is the time from the fault to the first answer of the model that was hit; `unready` for how long its
readiness said no.

    python benchmarks/faults.py                 # about five minutes
    python benchmarks/faults.py --quick         # the kills, one stop and one lack of memory, within a minute
    python benchmarks/faults.py --kills         # front ends and engine, one of each: about 120 requests a row
    python benchmarks/faults.py --gpu           # kill -9 of the runner with two compiled networks on a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

from load.ports import free_port
from load.processes import command_line, tree_cpu
from load.program import run_program, tied

CARPOOL = str(Path(sys.executable).with_name("carpool"))
RATE = 60.0
SLO_MS = 200.0
WATCHDOG_S = 3.0
READY_S = 300.0
_LOOK_S = 0.05
_WARM = 30  # answers before the fault
_OWN = {  # what the death of a process costs those whom it served, in words
    "connection-lost",
    "connection-closed",
    "connection-reset",
    "engine-restarted",
    "engine-stalled",
    "execution-timeout",
    "model-died",
    "not-serving",
    "restarting",
    "grpc-unavailable",
}
_TENSORS = """
[[input]]
name = "x"
datatype = "FP32"
shape = {shape}
[[output]]
name = "y"
datatype = "FP32"
shape = {shape}
"""
PYTHON = """
import time

def predict(x):
    time.sleep(0.002)
    return 2 * x
"""
NETWORK = """
import torch


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return 2 * x * self.gain


def build():
    return Network()
"""
COMPILED = """
import torch


class Network(torch.nn.Module):
    '''Deep enough that compiling it takes as long as it does for a real one.'''

    def __init__(self, width={width}, depth={depth}):
        super().__init__()
        nn = torch.nn
        layers = [nn.Conv2d(3, width, 3, stride=4, padding=1)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = torch.nn.Linear(width, 10)

    def forward(self, x):
        return self.last(self.body(x))


def build():
    return Network()
"""


class FaultError(Exception):
    """The benchmark cannot go on; the text says why."""


@dataclass
class Row:
    fault: str
    process: str
    model: str
    offered: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    no_answer: int = 0
    lost: int = 0
    missed: int = 0
    p99_ms: float = 0.0
    unready_s: float | None = None  # None: it was ready all the time
    first_s: float | None = None  # None: never within the row
    reasons: dict[str, int] = field(default_factory=dict)


# ---- models


def write_models(folder: Path, *, torch: bool) -> Path:
    models = folder / "models"
    shape = _TENSORS.format(shape="[4]")
    fake = 'backend = "fake"\nmax_batch = 8\nslo_ms = 250\n[fake]\ncurve = "2+0.5"\n'
    _write(models / "steady", fake + shape, {})
    _write(models / "worker", f"max_batch = 8\nslo_ms = 1000\n{shape}", {"model.py": PYTHON})
    if torch:
        given = '[pytorch]\ndevice = "cpu"\nmodule = "model.py:build"\nweights = "model.pt"\n'
        _write(models / "network", f"max_batch = 8\nslo_ms = 1000\n{given}{shape}", {"model.py": NETWORK})
        _save_weights(models / "network")
    return models


def write_gpu_models(folder: Path) -> Path:
    models = folder / "models"
    image = _TENSORS.format(shape="[3, 224, 224]").replace(
        'name = "y"\ndatatype = "FP32"\nshape = [3, 224, 224]', 'name = "y"\ndatatype = "FP32"\nshape = [10]'
    )
    given = (
        '[pytorch]\ndevice = "cuda"\ncompile = "default"\nbuckets = [1, 2, 4, 8, 16]\n'
        'module = "model.py:build"\nweights = "model.pt"\nprecision = "fp16"\n'
    )
    for name, width, depth in (("first", 128, 24), ("second", 192, 32)):
        code = {"model.py": COMPILED.replace("{width}", str(width)).replace("{depth}", str(depth))}
        _write(models / name, f"max_batch = 16\nslo_ms = 100\n{given}{image}", code)
        _save_weights(models / name)
    fake = 'backend = "fake"\nmax_batch = 8\nslo_ms = 250\n[fake]\ncurve = "2+0.5"\n'
    _write(models / "steady", fake + _TENSORS.format(shape="[4]"), {})
    return models


def _write(folder: Path, settings: str, files: dict[str, str]) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "model.toml").write_text(settings)
    for name, text in files.items():
        (folder / "1" / name).write_text(dedent(text))


def _save_weights(folder: Path) -> None:
    """In a process of its own: this one need not import torch."""
    code = "import torch, model; torch.save(model.build().state_dict(), 'model.pt')"
    subprocess.run([sys.executable, "-c", code], cwd=folder / "1", check=True, timeout=READY_S)


# ---- the server, which never outlives us


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    http: int
    grpc: int
    log: Path

    def descendants(self) -> list[int]:
        return [pid for pid in tree_cpu(self.process.pid) if pid != self.process.pid]

    def pids(self, role: str) -> list[int]:
        found = [(pid, command_line(pid)) for pid in self.descendants()]
        if role in ("http", "grpc"):
            ups = {one["child"] for one in self.events("process-up") if one["role"] == role}
            return [pid for pid, _ in found if pid in ups]
        if role == "runner":
            return [pid for pid, words in found if _serves_network(pid, words)]
        word = {"engine": "engine", "worker": "carpool.backends.python.python_worker"}[role]
        return [pid for pid, words in found if word in words]

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.log.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if event.get("event") == name]

    def get(self, path: str, timeout: float = 1.0) -> int:
        return self._ask("GET", path, None, timeout)

    def infer(self, model: str, timeout: float = 5.0) -> int:
        shape = [1, 3, 224, 224] if model in ("first", "second") else [1, 4]
        count = 1
        for length in shape:
            count *= length
        tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [0.0] * count}
        return self._ask("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}), timeout)

    def answered(self, model: str) -> int:
        """Inferences of this model so far, as its statistics have it."""
        _, body = self._talk("GET", f"/v2/models/{model}/stats", None, 1.0)
        return int(json.loads(body)["model_stats"][0]["inference_count"]) if body else 0

    def _ask(self, method: str, path: str, body: str | None, timeout: float) -> int:
        return self._talk(method, path, body, timeout)[0]

    def _talk(self, method: str, path: str, body: str | None, timeout: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=timeout)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            found = answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()
        return answer.status, found

    def until(self, condition: Callable[[], object], what: str, seconds: float = READY_S) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise FaultError(f"{what}: not within {seconds:g} s\n{self.log.read_text()[-4000:]}")
            time.sleep(_LOOK_S)


def _serves_network(pid: int, words: Sequence[str]) -> bool:
    """A runner, and not the one that stands by: it has mapped the front ends' memory."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
    return "carpool.extensions.torch.runner_process" in words and "carpool-slots" in mapped


@contextlib.contextmanager
def serving(models: Path, folder: Path, *options: str) -> Iterator[Server]:
    ports = [free_port() for _ in range(3)]
    log = folder / "server.log"
    words = [CARPOOL, "serve", str(models), "--host", "127.0.0.1", "--frontends", "2"]
    names = ("--http-port", "--grpc-port", "--metrics-port")
    words += [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]
    words += ["--log-format", "json", "--drain-s", "5", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, preexec_fn=tied())
    server = Server(process, ports[0], ports[1], log)
    try:
        server.until(lambda: server.get("/v2/health/ready") == 200, "ready")
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- a fault, under load


class Probe:
    """Looks again and again whether a model is ready and answers, from when the fault happened."""

    def __init__(self, server: Server, model: str, *, over_grpc: bool) -> None:
        self._server = server
        self._model = model
        self._is_ready = self._grpc_ready if over_grpc else self._http_ready
        self._answers = self._grpc_ready if over_grpc else lambda: server.infer(model) == 200
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._watch, self._ask)]
        self._began = 0.0
        self.unready: tuple[float, float] | None = None  # seconds after the fault: from, to
        self.first: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _http_ready(self) -> bool:
        return self._server.get(f"/v2/models/{self._model}/ready") == 200

    def _grpc_ready(self) -> bool:
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{self._server.grpc}") as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
            try:
                return bool(ask(b"", timeout=1.0) == b"\x08\x01")
            except grpc.RpcError:
                return False

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_S):
            ready, at = self._is_ready(), time.monotonic() - self._began
            if not ready:
                self.unready = (self.unready[0] if self.unready else at, at)

    def _ask(self) -> None:
        """The first answer after it was seen that there is none, or at all."""
        time.sleep(2 * _LOOK_S)
        while not self._stop.wait(_LOOK_S):
            if self._answers():
                self.first = time.monotonic() - self._began
                return


def strike(server: Server, role: str, fault: str) -> Callable[[], None]:
    """Do it to the first process of that role; returns what undoes it."""
    pid = server.pids(role)[0]
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, hard))

        def lift() -> None:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))

        return lift
    return lambda: None


def start_load(
    server: Server, model: str, seconds: float, rate: float, *, over_grpc: bool = False
) -> subprocess.Popen[bytes]:
    url = f"grpc://127.0.0.1:{server.grpc}" if over_grpc else f"http://127.0.0.1:{server.http}"
    words = [CARPOOL, "load", url, "--model", model, "--rate", f"{rate:g}", "--json"]
    words += ["--duration", f"{seconds:g}", "--timeout", "10", "--drain", "12"]
    words += ["--slo-ms", f"{SLO_MS:g}"]
    before = server.answered(model)
    load = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=tied())
    server.until(lambda: server.answered(model) >= before + _WARM, f"{model} under load", 60.0)
    return load


def measure(server: Server, role: str, model: str, fault: str, seconds: float, rate: float = RATE) -> Row:
    role, _, protocol = role.partition(" over ")
    over_grpc = "grpc" in (role, protocol)
    load = start_load(server, model, seconds, rate, over_grpc=over_grpc)
    probe = Probe(server, model, over_grpc=over_grpc)
    called = f"{role} over {protocol}" if protocol else role
    try:
        undo = strike(server, role, fault)
        probe.begin()
        if fault == "memory":
            time.sleep(2.0)
        undo()
        found = json.loads(load.communicate(timeout=seconds + 60)[0])
        with contextlib.suppress(FaultError):
            server.until(lambda: probe.first is not None, "an answer", 30.0)
    finally:
        probe.end()
        load.kill()
        load.wait()
    return _row(fault, called, model, found, probe)


def _row(fault: str, role: str, model: str, found: dict[str, Any], probe: Probe) -> Row:
    refused, failed = found["refused"], found["failed"]
    own = sum(count for word, count in failed.items() if word in _OWN or _is_broken(word))
    silent = found["timed_out"] + found["unanswered"]
    unready = None if probe.unready is None else round(probe.unready[1] - probe.unready[0] + _LOOK_S, 2)
    return Row(
        fault,
        role,
        model,
        offered=found["offered"],
        answered=found["answered"],
        refused=sum(refused.values()),
        failed=sum(failed.values()),
        no_answer=silent,
        lost=silent + sum(failed.values()) - own,
        missed=found["offered"] - found["good"],
        p99_ms=round(found["response_ms"]["p99"] or 0.0, 1),
        unready_s=unready,
        first_s=None if probe.first is None else round(probe.first, 2),
        reasons={**refused, **failed},
    )


def _is_broken(word: str) -> bool:
    """A connection that ended with the process that held it."""
    return any(part in word.lower() for part in ("connection", "closed", "reset", "broken"))


# ---- all of it


def plan(*, quick: bool, torch: bool, kills: bool = False) -> list[tuple[str, str, str]]:
    """Role, model, fault."""
    if kills:
        return [(role, "steady", "kill") for role in ("http", "grpc", "engine", "engine over grpc")]
    roles = [("http", "steady"), ("grpc", "steady"), ("engine", "steady"), ("worker", "worker")]
    if torch:
        roles.append(("runner", "network"))
    if quick:
        return [(*one, "kill") for one in roles[:4]] + [
            ("engine", "steady", "stop"),
            ("worker", "worker", "memory"),
        ]
    return [(*one, fault) for fault in ("kill", "stop", "memory") for one in roles]


def run(args: argparse.Namespace, folder: Path) -> list[Row]:
    torch = find_spec("torch") is not None and not (args.quick or args.kills)
    seconds = 2.5 if args.kills else 4.0 if args.quick else 12.0
    rows = []
    options = ["--watchdog-s", f"{WATCHDOG_S:g}", *(("--frontends", "1") if args.kills else ())]
    with serving(write_models(folder, torch=torch), folder, *options) as server:
        for role, model, fault in plan(quick=args.quick, torch=torch, kills=args.kills):
            server.until(lambda model=model: server.infer(model) == 200, f"{model} before {role} {fault}")
            server.until(lambda role=role: server.pids(role.split()[0]), f"a process of {role}")
            if role == "runner":
                time.sleep(0.0 if args.quick else 15.0)  # until one stands by
            rows.append(measure(server, role, model, fault, seconds))
            tell(rows[-1])
    return rows


def run_gpu(folder: Path, rate: float) -> list[Row]:
    """Kill -9 of the runner under load, twice. The other two models are loaded as well, and have rows too."""
    rows: list[Row] = []
    with serving(write_gpu_models(folder), folder) as server:
        for killed in range(2):
            server.until(lambda: server.infer("first") == server.infer("second") == 200, "both answer")
            server.until(lambda n=killed: len(server.events("runner-stands-by")) > n, "one stands by")  # type: ignore[misc]
            time.sleep(30.0)  # it imports
            rows += _kill_runner(server, rate)
    return rows


def _kill_runner(server: Server, rate: float) -> list[Row]:
    seconds = 25.0
    lost, whole = len(server.events("instance-lost")), len(server.events("instance-whole"))
    beside = [start_load(server, name, seconds, rate) for name in ("second", "steady")]
    probe = Probe(server, "second", over_grpc=False)
    watching = threading.Timer(2.0, probe.begin)
    watching.start()
    try:
        row = measure(server, "runner", "first", "kill", seconds, rate)
        found = [json.loads(load.communicate(timeout=60)[0]) for load in beside]
    finally:
        watching.join()
        probe.end()
        for load in beside:
            load.kill()
            load.wait()
    lost = len(server.events("instance-lost")) - lost
    server.until(lambda: len(server.events("instance-whole")) - whole >= lost, "all batch sizes of both")
    row.reasons["ms until every instance answered"] = _ms_after_death(server, "instance-replaced")
    row.reasons["ms until all batch sizes had graphs"] = _ms_after_death(server, "instance-captured")
    row.reasons["ms until all batch sizes were there"] = _ms_after_death(server, "instance-whole")
    rows = [row, _row("kill", "runner", "second", found[0], probe)]
    rows.append(_row("kill", "runner", "steady", found[1], Probe(server, "steady", over_grpc=False)))
    for one in rows:
        tell(one)
    return rows


def _ms_after_death(server: Server, event: str) -> int:
    """From the runner's last death to the last event of this kind, by the log's own times."""
    ends = [server.events(name)[-1]["time"].replace("Z", "+00:00") for name in ("runner-died", event)]
    died, last = map(datetime.fromisoformat, ends)
    return round((last - died).total_seconds() * 1e3)


def tell(row: Row) -> None:
    print(f"{row.process} {row.fault}: {row.answered} of {row.offered}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row]) -> None:
    heads = (
        "fault",
        "process",
        "model",
        "offered",
        "answered",
        "refused",
        "failed",
        "silent",
        "lost",
        "missed",
    )
    print("".join(_cells((*heads, "p99 ms", "unready s", "first s"))))
    for row in rows:
        counts = (row.offered, row.answered, row.refused, row.failed, row.no_answer, row.lost, row.missed)
        times = (f"{row.p99_ms:.0f}", _number(row.unready_s, "0"), _number(row.first_s, "never"))
        print("".join(_cells((row.fault, row.process, row.model, *map(str, counts), *times))))
    print()
    for row in rows:
        if row.reasons:
            said = ", ".join(f"{count} {word}" for word, count in row.reasons.items())
            print(f"{row.process} {row.fault}: {said}")


def _number(value: float | None, absent: str) -> str:
    return absent if value is None else f"{value:.2f}"


def _cells(cells: Sequence[str]) -> list[str]:
    widths = (8, 17, 10, 9, 10, 9, 8, 8, 6, 8, 9, 11, 9)
    return [c.ljust(w) if n < 3 else c.rjust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", action="store_true", help="kill front ends and engine, one of each")
    parser.add_argument("--gpu", action="store_true", help="kill the runner with two compiled networks")
    parser.add_argument("--gpu-rate", type=float, default=300.0, help="requests a second with --gpu")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="carpool-faults-") as name:
        os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME") or f"{name}/cache"
        rows = run_gpu(Path(name), args.gpu_rate) if args.gpu else run(args, Path(name))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    run_program(main, "faults")
