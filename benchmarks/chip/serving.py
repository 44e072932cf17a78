"""A server on the GPU under load, and what its clients saw."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from carpool.lab.load.aim import Aim
from carpool.lab.load.generator import run_shared
from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.load_report import LoadReport
from chip.account import Account
from chip.cores import Cores, placed
from chip.watching import Seen, Watch
from load.ports import free_port

READY_S = 400.0
STOP_S = 30.0
_SERVE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"


class NotReady(Exception):
    """A server did not come up; the message has the end of its log."""


@dataclass(frozen=True)
class Running:
    pid: int
    url: str
    log: Path
    ready_after_s: float
    cores: Cores
    began: float = 0.0


@contextlib.contextmanager
def running(
    command: list[str], port: int, log: Path, cores: Cores, environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    began = time.monotonic()
    with log.open("wb") as output, placed(cores.server):
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, f"{url}/v2/health/ready", log)
        yield Running(process.pid, url, log, round(time.monotonic() - began, 1), cores, began)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the session that was begun here
            process.wait(STOP_S)


@contextlib.contextmanager
def carpool(
    repository: Path,
    log: Path,
    cores: Cores,
    *,
    frontends: int,
    slo_ms: float | None = None,
    environment: Mapping[str, str] | None = None,
    compiled: bool = True,
) -> Iterator[Running]:
    """`compiled`: it is waited for until all that is compiled behind its traffic is."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-P", "-c", _SERVE, "serve", str(repository), "--http-port", str(port)]
    command += ["--grpc-port", "0", "--grpc-frontends", "0", "--metrics-port", str(metrics)]
    command += ["--frontends", str(frontends), "--allow-client-shm", "--log-format", "json"]
    if slo_ms is not None:
        command += ["--slo-ms", f"{slo_ms:g}"]
    with running(command, port, log, cores, environment) as server:
        if compiled:
            _wait_compiled(f"http://127.0.0.1:{metrics}/metrics")
        yield server


@contextlib.contextmanager
def fastapi(network: str, log: Path, cores: Cores, *, workers: int, max_batch: int) -> Iterator[Running]:
    port = free_port()
    folder = Path(__file__).parents[1] / "peers"
    command = [sys.executable, str(folder / "fastapi_torch.py")]
    environment = {
        "BENCH_PORT": str(port),
        "BENCH_NETWORK": network,
        "BENCH_MAX_BATCH": str(max_batch),
        "BENCH_WAIT_MS": "10",
        "BENCH_WORKERS": str(workers),
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
    }
    with running(command, port, log, cores, environment) as server:
        yield server


def _wait_compiled(url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        told = [line for line in lines if line.startswith("carpool_batch_sizes{") and 'state="plain"' in line]
        if all(float(line.rpartition(" ")[2]) == 0 for line in told):
            return
        time.sleep(0.2)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2.0) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise NotReady(f"{url} did not come up:\n{log.read_text(errors='replace')[-3000:]}")


@dataclass(frozen=True)
class Load:
    """Tensors, tensors in shared memory, or pictures; a closed loop of clients or a rate."""

    aim: Aim
    seconds: float
    processes: int
    concurrency: int | None = None
    rate: float | None = None
    slo: float | None = None
    warmup: float = 1.0

    def plan(self) -> Plan:
        if self.concurrency is not None:
            clients = Closed(self.concurrency, self.seconds, warmup=self.warmup)
            return Plan(clients, slo=self.slo, timeout=5.0, drain=5.0)
        assert self.rate is not None
        phases = (Phase(self.rate, self.warmup, warmup=True), Phase(self.rate, self.seconds))
        return Plan(Open(phases), slo=self.slo, timeout=5.0, drain=5.0)


def drive(server: Running, load: Load) -> tuple[LoadReport, Seen]:
    """Who is busy is looked at while the load counts, and not while it begins or ends."""
    watch = Watch(server.pid, server.cores)
    account = Account(server.url, load.slo)
    seen: list[Seen] = []

    def stop() -> None:
        seen.append(watch.stop())
        account.look()

    def look(elapsed: float, _: object) -> None:
        if not watch.started and elapsed >= load.warmup:
            watch.start()
            account.look()
        elif watch.started and not seen and elapsed >= load.warmup + 0.9 * load.seconds:
            stop()

    try:
        report = uvloop.run(run_shared(load.plan(), load.aim, load.processes, watch=look))
    finally:
        if watch.started and not seen:
            stop()
        in_time = account.share()
    found = seen[0] if seen else Seen()
    found.in_time = in_time
    return report, found


def row(what: str, load: Load, report: LoadReport, seen: Seen) -> dict[str, Any]:
    """What is kept of a run. `in_time_of_answered` is what clients saw, `server_in_time` what it says."""
    counted = report.phases[-1] if report.phases else report.total
    generator, shares = report.generator, seen.parts()
    per_request = 1e6 / counted.answered_rps if counted.answered_rps else 0.0
    return {
        "what": what,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "offered_rps": counted.offered_rps,
        "images_per_s": counted.answered_rps,
        "goodput_rps": counted.goodput_rps,
        "attainment": counted.attainment,
        "in_time_of_answered": round(counted.good / counted.answered, 4) if counted.answered else None,
        "server_in_time": seen.in_time,
        "p50_ms": counted.response_ms.p50,
        "p99_ms": counted.response_ms.p99,
        "infer_p50_ms": counted.infer_ms.p50,
        "queue_p50_ms": counted.queue_ms.p50,
        "batch_mean": counted.batch.mean,
        "refused": dict(counted.refused),
        "failed": dict(counted.failed),
        "generator_late": report.generator_late,
        "generator_late_because": list(report.late_because),
        "generator_start_lag_p99_ms": generator.start_lag_ms.p99,
        "generator_send_lag_p99_ms": generator.send_lag_ms.p99,
        "generator_busiest_core": generator.busiest_core_share,
        "generator_us_per_request": generator.processor_us_per_request,
        "processes": seen.processes,
        "engine_threads": seen.engine_threads,
        "runner_threads": seen.runner_threads,
        "shares": shares,
        "us_per_request": {name: round(share * per_request, 2) for name, share in shares.items()},
        "device": seen.device,
        "machine": seen.machine,
    }
