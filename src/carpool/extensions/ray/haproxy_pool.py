"""HAProxy whose servers come and go while it runs, through its runtime socket: never by a reload, which would
leave an old process behind for as long as a client keeps its connection.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from carpool.errors import CarpoolError
from carpool.extensions.deploy.balancer_config import Address
from carpool.extensions.deploy.haproxy_runtime import PoolConfig, RuntimeConfig, runtime_config
from carpool.extensions.ray.leash import start_on_leash

_PATIENCE_S = 5.0
_LONGEST_ANSWER = 4 << 20
_STOP_S = 5.0
_SERVER = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_PORT_TRIES = 5


class BalancerError(CarpoolError):
    reason = "balancer"


class RuntimeSocket:
    """One command a connection, as HAProxy has it unless it is asked for more."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def say(self, command: str) -> str:
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(_PATIENCE_S)
                line.connect(str(self._path))
                line.sendall(f"{command}\n".encode())
                heard = bytearray()
                while (more := line.recv(1 << 16)) and len(heard) < _LONGEST_ANSWER:
                    heard += more
        except OSError as error:
            raise BalancerError(f"HAProxy does not answer on its socket: {error}") from None
        return heard.decode("ascii", "replace").strip()


class ServerPool:
    """Brings the servers of one backend to what is wanted. What HAProxy itself says is the truth: nothing is
    lost when it, or who speaks to it, begins again."""

    def __init__(
        self,
        say: Callable[[str], str],
        config: PoolConfig,
        *,
        drain_s: float = 60.0,
    ) -> None:
        self._say, (self._backend, self._server) = say, config
        self._drain_s = drain_s
        self._leaving: dict[str, float] = {}  # since when

    def bring(self, wanted: Mapping[str, Address | str], now: float) -> int:
        """Takes one step; returns how many servers are still to be taken out. Call it again while there are
        any. Behind an address may stand what is said of that server alone."""
        busy = self._busy()
        for name in wanted.keys() - busy.keys():
            self._add(name, wanted[name])
        for name in self._leaving.keys() & wanted.keys():  # it was silent for a while
            self._told(f"set server {self._at(name)} state ready")
            del self._leaving[name]
        for name in busy.keys() - wanted.keys():
            self._take_out(name, busy[name], now)
        for name in self._leaving.keys() - busy.keys():
            del self._leaving[name]
        return len(self._leaving)

    def _busy(self) -> dict[str, int]:
        """Returns the servers that it has, with the connections on which an answer is awaited."""
        found = {}
        for line in self._say(f"show servers conn {self._backend}").splitlines():
            words = line.split()
            if len(words) > 6 and words[0].startswith(f"{self._backend}/") and words[6].isdigit():
                found[words[0].partition("/")[2]] = int(words[6])
        return found

    def _add(self, name: str, address: Address | str) -> None:
        if not _SERVER.fullmatch(name):
            raise BalancerError(f"{name[:80]!r} cannot be the name of a server")
        self._told(f"add server {self._at(name)} {address} {self._server}", "New server registered.")
        self._told(f"enable health {self._at(name)}")
        self._told(f"enable server {self._at(name)}")

    def _take_out(self, name: str, busy: int, now: float) -> None:
        """No new requests; when those that it has are answered, it is removed."""
        if name not in self._leaving:
            self._told(f"set server {self._at(name)} state drain")
            self._leaving[name] = now
        elif not busy or now - self._leaving[name] > self._drain_s:
            self._told(f"disable server {self._at(name)}")
            # Refused while connections are still being closed: it is asked again the next time.
            self._say(f"del server {self._at(name)}")

    def _at(self, name: str) -> str:
        return f"{self._backend}/{name}"

    def _told(self, command: str, expected: str = "") -> None:
        answer = self._say(command)
        if answer != expected:
            raise BalancerError(f"HAProxy, asked to {command!r}: {answer[:500]}")


class HaproxyProcess:
    """Represents one HAProxy with a folder of its own. It ends with the process that started it."""

    def __init__(self, program: str, host: str, port: int, grpc_port: int | None = None) -> None:
        """Port 0 takes a free one."""
        self._program, self._host = program, host
        self._wanted = (port, grpc_port)
        self.folder = Path(tempfile.mkdtemp(prefix="carpool-haproxy-"))
        self.address = Address(host, port)
        self.grpc = None if grpc_port is None else Address(host, grpc_port)
        self.config: RuntimeConfig | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> RuntimeSocket:
        """Starts it, also again when it has ended: at the port that it had. Call it from a thread that
        stays."""
        for trial in range(_PORT_TRIES):
            self.address = self._with_port(self.address)
            self.grpc = None if self.grpc is None else self._with_port(self.grpc)
            try:
                return self._start()
            except BalancerError:
                self.stop()
                if 0 not in self._wanted or trial == _PORT_TRIES - 1:
                    raise
                http, grpc = self._wanted
                self.address = Address(self._host, http)
                self.grpc = None if grpc is None else Address(self._host, grpc)
        raise AssertionError("a loop that returns or raises")

    def _with_port(self, address: Address) -> Address:
        return address if address.port else Address(self._host, _free_port(self._host))

    def _start(self) -> RuntimeSocket:
        path, log = self.folder / "s", self.folder / "haproxy.log"
        self.config = runtime_config(self.address, path, self.grpc)
        file = self.folder / "haproxy.cfg"
        file.write_text(self.config.text, "utf-8")
        libraries = Path(self._program).parent / "lib"
        environment = {"PATH": os.environ.get("PATH", ""), "LD_LIBRARY_PATH": str(libraries)}
        with log.open("wb") as output:
            self._process = start_on_leash([self._program, "-db", "-f", str(file)], environment, output)
        line = RuntimeSocket(path)
        give_up = time.monotonic() + _PATIENCE_S
        while time.monotonic() < give_up and self._process.poll() is None:
            with contextlib.suppress(BalancerError):
                if line.say("show info").startswith("Name: HAProxy"):
                    return line
            time.sleep(0.02)
        said = [line for line in log.read_text("utf-8", "replace").splitlines() if "[ALERT]" in line]
        raise BalancerError(f"HAProxy does not start at {self.address}: {' '.join(said[:3])[:1000]}")

    def wait(self) -> None:
        """Waits for its end."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def serves(self) -> bool:
        """Returns whether a request finds a replica."""
        host = "127.0.0.1" if self.address.host in ("0.0.0.0", "::") else self.address.host
        connection = http.client.HTTPConnection(host, self.address.port, timeout=_PATIENCE_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/-/healthz")
            return connection.getresponse().status == 200
        return False


def _free_port(host: str) -> int:
    with socket.socket() as trial:
        trial.bind((host, 0))
        port: int = trial.getsockname()[1]
        return port
