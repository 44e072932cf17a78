"""`carpool serve` as real processes on free loopback ports, seen from outside: sockets, /proc, log."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from frontend.http.harness import Client, Response
from waiting import until

READY_S = 120.0  # far more than it takes, also on a machine that is busy with other tests
PATIENCE_S = 40.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LOG_SHOWN = 12_000
ONE_PROCESS = pytest.param(0, id="one process", marks=pytest.mark.conformance)
LAYOUTS = [ONE_PROCESS, pytest.param(1, id="one front end")]  # what is asked of one is asked of the other
NEEDS_CURL = pytest.mark.skipif(
    shutil.which("curl") is None and not os.environ.get("CI"), reason="curl is not installed"
)  # where it belongs to what is tested, a test without it fails
_PORTS = random.Random(os.getpid())
_TAKEN: list[socket.socket] = []  # one for each port that this process has chosen


def free_ports(count: int) -> list[int]:
    """Below the range from which the kernel takes ports for outgoing connections.

    It takes seconds until the server has them. Until then a name in the kernel keeps other tests off, also
    those of other processes: it goes with this one.
    """
    found: list[int] = []
    while len(found) < count:
        port = _PORTS.randrange(20_000, 32_000)
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0carpool-tests-port-{port}")
            with socket.socket() as trial:
                trial.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _TAKEN.append(name)
        found.append(port)
    return found


# ---- processes, as the kernel shows them


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def resident_bytes(pid: int) -> int:
    """What the process has for itself: shared memory, which the slots are, is not counted."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


# ---- the server


@dataclass
class Live:
    """One server. Everything that waits has a bound; its log is shown when a test fails."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    log_file: Path
    frontends: int
    arguments: list[str]  # its command line
    grpc_port: int = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self) -> Client:
        return Client("127.0.0.1", self.port)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the log with this event."""
        lines = [line for line in self.log().splitlines() if line.startswith("{")]
        return [event for event in map(orjson.loads, lines) if event["event"] == name]

    # Its processes.

    def _of(self, role: str) -> list[int]:
        return [
            pid
            for pid in children(self.pid)
            if command(pid)[3:5] == ["carpool.process.children", role] and is_alive(pid)
        ]

    @property
    def engine_pid(self) -> int:
        """The process that has the engine: the only one, where there are no front ends."""
        if not self.frontends:
            return self.pid
        (pid,) = self._of("engine")
        return pid

    @property
    def frontend_pids(self) -> list[int]:
        return self._of("frontend") if self.frontends else [self.pid]

    @property
    def grpc_pids(self) -> list[int]:
        """Of those front ends, the ones for gRPC."""
        ups = {event["child"] for event in self.events("process-up") if event["role"] == "grpc"}
        return [pid for pid in self.frontend_pids if pid in ups]

    @property
    def worker_pids(self) -> list[int]:
        """Of Python models."""
        below = descendants(self.pid)
        return [
            pid for pid in below if "carpool.backends.python.python_worker" in command(pid) and is_alive(pid)
        ]

    def all_pids(self) -> list[int]:
        return [self.pid, *descendants(self.pid)]

    # What it says.

    def get(self, path: str) -> Response:
        with self.connect() as client:
            return client.get(path)

    def get_json(self, path: str) -> Any:
        response = self.get(path)
        assert response.status == 200, response
        return orjson.loads(response.body)

    def is_ready(self) -> bool:
        return self._says_yes("/v2/health/ready")

    def is_live(self) -> bool:
        return self._says_yes("/v2/health/live")

    def _says_yes(self, path: str) -> bool:
        """Not while nobody listens, either."""
        try:
            return self.get(path).status == 200
        except (OSError, AssertionError):
            return False

    def until_ready(self, seconds: float = READY_S) -> None:
        """Every front end: the kernel spreads connections over them, so a run of answers is from all."""
        looks = 1 if self.frontends < 2 else 16

        def settled() -> bool:
            return self.process.poll() is not None or all(self.is_ready() for _ in range(looks))

        until(settled, "ready", seconds)
        assert self.process.poll() is None, f"it ended with {self.process.returncode}"

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all series with these labels."""
        with Client("127.0.0.1", self.metrics_port) as client:
            page = client.get("/metrics").body.decode()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = [
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name and all(text in line for text in wanted)
        ]
        assert values, f"{name} {labels} is not on the page"
        return sum(values)

    def until_metric(self, value: float, name: str, **labels: str) -> None:
        until(lambda: self.metric(name, **labels) == value, f"{name} {labels} = {value:g}")

    # Its end.

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Its exit code."""
        return self.process.wait(seconds)

    def end(self) -> list[int]:
        """Stop it, politely and then not; returns processes of its own that outlived it."""
        below = descendants(self.pid) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE_S)
        return until_gone(below)


def until_gone(pids: Sequence[int], seconds: float = PATIENCE_S) -> list[int]:
    """Those that are still there after a while; they are killed, being ours."""
    give_up = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < give_up:
        left = [pid for pid in left if is_alive(pid)]
        time.sleep(0.005)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def start(
    *models: Path,
    frontends: int = 1,
    grpc: int = 0,
    folder: Path,
    drain_s: float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> Live:
    port, grpc_port, metrics_port = free_ports(3)
    log_file = folder / f"server-{port}.log"
    code = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
    arguments = [
        *(sys.executable, "-P", "-c", code, "serve", *map(str, models)),
        *("--host", "127.0.0.1", "--http-port", str(port), "--metrics-port", str(metrics_port)),
        *("--frontends", str(frontends), "--drain-s", str(drain_s), "--log-format", "json"),
        *("--grpc-frontends", str(grpc), "--grpc-port", str(grpc_port)),
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    # What one test measures or decides is no business of another.
    own |= {"CARPOOL_CACHE_DIR": str(folder / "cache"), "CARPOOL_STATE_DIR": str(folder / "state")}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=own | dict(environment or {}),
        )
    return Live(process, port, metrics_port, log_file, frontends, arguments, grpc_port)


@contextlib.contextmanager
def serving(
    *models: Path,
    frontends: int = 1,
    grpc: int = 0,
    folder: Path,
    drain_s: float = 10.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Live]:
    """A server that is ready; stopped at the end, and nothing of it may be left."""
    server = start(
        *models, frontends=frontends, grpc=grpc, folder=folder, drain_s=drain_s, environment=environment
    )
    left: list[int] = []
    try:
        server.until_ready()
        yield server
    finally:
        left = server.end()
        sys.stdout.write(f"\n---- {server.log_file.name}\n{server.log()[-_LOG_SHOWN:]}")
    assert not left, f"processes outlived the server: {left}"


# ---- requests


def infer_path(model: str) -> str:
    return f"/v2/models/{model}/infer"


def json_request(values: Sequence[Any], shape: Sequence[int], datatype: str = "FP32", **rest: Any) -> bytes:
    """The body of a request for a model with one input `x`, all in JSON."""
    tensor = {"name": "x", "datatype": datatype, "shape": list(shape), "data": list(values)}
    return orjson.dumps({**rest, "inputs": [tensor]})


def outputs_of(response: Response) -> dict[str, Any]:
    assert response.status == 200, response
    return {output["name"]: output["data"] for output in orjson.loads(response.body)["outputs"]}


def error_of(response: Response, status: int, reason: str | None = None) -> dict[str, Any]:
    """The one form that all errors have."""
    assert response.status == status, response
    document: dict[str, Any] = orjson.loads(response.body)
    assert document["error"]
    assert isinstance(document["error"], str)
    if reason is not None:
        assert document["reason"] == reason, document
    return document
