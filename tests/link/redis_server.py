"""A real redis-server on a free loopback port, and a plain connection to it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from live.server import PATIENCE_S, free_ports
from waiting import until

CERTIFICATES = Path(__file__).parents[1] / "frontend" / "access" / "certificates"


def find_redis() -> str:
    """Never skipped unseen: a machine without one has to say that it does without."""
    found = shutil.which("redis-server")
    if found:
        return found
    if os.environ.get("CARPOOL_NO_REDIS") == "1":
        pytest.skip("CARPOOL_NO_REDIS=1: the shared cache is not tested")
    pytest.fail(
        "no redis-server found: install one (Debian: apt-get install redis-server) or set CARPOOL_NO_REDIS=1"
    )


@dataclass
class RedisServer:
    """It keeps its port over restarts, and nothing else."""

    folder: Path
    port: int
    settings: str
    password: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}"

    @property
    def socket_file(self) -> Path:
        return self.folder / "redis.sock"

    def start(self) -> None:
        file = self.folder / "redis.conf"
        own = f'bind 127.0.0.1\nport {self.port}\nunixsocket {self.socket_file}\ndir {self.folder}\nsave ""\n'
        file.write_text(own + self.settings + (f"\nrequirepass {self.password}\n" if self.password else ""))
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                [find_redis(), str(file)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until(self.answers, "a Redis server")

    def answers(self) -> bool:
        try:
            return self.ask("PING") == b"PONG"
        except OSError:
            return False

    def ask(self, *words: str | bytes) -> Any:
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(PATIENCE_S)
            plain.connect(str(self.socket_file))
            replies = plain.makefile("rb")
            if self.password:
                plain.sendall(packed("AUTH", self.password))
                read_reply(replies)
            plain.sendall(packed(*words))
            return read_reply(replies)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()  # also one that is stopped
            self.process.wait(PATIENCE_S)
            self.process = None


def packed(*words: str | bytes) -> bytes:
    """Written apart from the client's own, which it checks."""
    command = b"*%d\r\n" % len(words)
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        command += b"$%d\r\n" % len(data) + data + b"\r\n"
    return command


def read_reply(replies: BinaryIO) -> Any:
    line = replies.readline()
    kind, rest = line[:1], line[1:].rstrip()
    if not line:
        raise ConnectionResetError(0, "the server is gone")
    if kind == b"-":
        return RuntimeError(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else replies.read(int(rest) + 2)[:-2]
    return [read_reply(replies) for _ in range(int(rest))] if kind == b"*" else rest


@contextmanager
def redis_server(folder: Path, settings: str = "", password: str = "") -> Iterator[RedisServer]:
    server = RedisServer(folder, free_ports(1)[0], settings, password)
    server.start()
    try:
        yield server
    finally:
        server.end()
