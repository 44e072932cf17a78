"""`carpool serve` of this environment, for benchmarks that drive it with Carpool's own load generator."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from load.burst import LoadError
from load.ports import free_port
from load.program import tied

READY_S = 60.0
STOP_S = 15.0
_MODEL = """backend = "fake"
instances = {instances}
max_batch = {max_batch}
{mode}
[fake]
curve = "{curve}"
[[input]]
name = "x"
datatype = "UINT8"
shape = [64]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
{batching}
"""


@dataclass(frozen=True)
class FakeModel:
    """A device that only takes time: `curve` in ms, and either a promise or Triton's delay."""

    curve: str
    max_batch: int
    slo_ms: float | None = None
    max_delay_ms: float | None = None
    instances: int = 1

    def write(self, folder: Path, name: str = "fake") -> Path:
        """Into the folder of models that is returned."""
        mode = "" if self.slo_ms is None else f"slo_ms = {self.slo_ms:g}"
        batching = "" if self.max_delay_ms is None else f"[batching]\nmax_delay_ms = {self.max_delay_ms:g}"
        text = _MODEL.format(
            instances=self.instances, max_batch=self.max_batch, mode=mode, curve=self.curve, batching=batching
        )
        (folder / "models" / name).mkdir(parents=True)
        (folder / "models" / name / "model.toml").write_text(text)
        return folder / "models"


@dataclass(frozen=True)
class CarpoolServer:
    url: str
    process: subprocess.Popen[bytes]
    record: Path | None
    log: Path


@contextlib.contextmanager
def carpool_server(
    *paths: Path,
    record: bool = False,
    options: Sequence[str] = (),
    program: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> Iterator[CarpoolServer]:
    """A server with its defaults, but without gRPC, until the end of the block."""
    with starting(*paths, record=record, options=options, program=program, settings=settings) as server:
        wait_ready(server)
        yield server


@contextlib.contextmanager
def starting(
    *paths: Path,
    record: bool = False,
    options: Sequence[str] = (),
    program: Path | None = None,
    settings: Mapping[str, str] | None = None,
) -> Iterator[CarpoolServer]:
    """As `carpool_server`, but perhaps not ready yet: several can start at the same time. `program` is the
    `carpool` to start, that of this environment if there is none; `settings` are variables for it."""
    with tempfile.TemporaryDirectory(prefix="carpool-bench-") as name:
        folder = Path(name)
        arrivals = folder / "arrivals.jsonl" if record else None
        port = free_port()
        command = [str(program or Path(sys.executable).with_name("carpool")), "serve", *map(str, paths)]
        command += ["--host", "127.0.0.1", "--http-port", str(port)]
        command += ["--metrics-port", str(free_port()), "--grpc-frontends", "0", *options]
        command += [] if arrivals is None else ["--record", str(arrivals)]
        log = folder / "log.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=_environment(folder) | dict(settings or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=tied(),
            )
        try:
            yield CarpoolServer(f"http://127.0.0.1:{port}", process, arrivals, log)
        finally:
            stop(process)


def stop(*processes: subprocess.Popen[bytes]) -> None:
    """They finish what they have, and write the last of their records."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def wait_ready(server: CarpoolServer, within_s: float = READY_S) -> None:
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up and server.process.poll() is None:
        with contextlib.suppress(OSError):  # an answer that is not 200 is one, too
            urllib.request.urlopen(f"{server.url}/v2/health/ready", timeout=5).close()
            return
        time.sleep(0.05)
    raise LoadError(f"carpool serve is not ready:\n{server.log.read_text(errors='replace')[-2000:]}")


def _environment(folder: Path) -> dict[str, str]:
    """What is measured here is neither taken from nor left to other runs."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.lower().endswith("_proxy") and not key.startswith(("CARPOOL_", "PYTHON"))
    }
    return kept | {"CARPOOL_CACHE_DIR": str(folder / "cache")}
