"""Servers that share answers through a Redis server which fails, beside one that shares none.

Both are asked the same, in turn: pictures and tensors that nobody has asked for before, so that each is a
question to Redis. What counts is how much later the one with Redis answers, and whether it fails.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from load.carpool_server import CarpoolServer, carpool_server
from load.ports import free_port

Row = dict[str, Any]
Ask = Callable[[int], bytes]
PASSWORD = "right"
UP = "carpool_cache_shared_up"


class Redis:
    def __init__(self, program: str) -> None:
        self._program = program
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, password: str = PASSWORD) -> None:
        said = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "requirepass": password}
        command = [self._program]
        for name, value in said.items():
            command += [f"--{name}", value]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def say(self, *words: str) -> None:
        import redis

        client = redis.Redis(port=self.port, password=PASSWORD)
        client.execute_command(*words)  # type: ignore[no-untyped-call]
        client.close()

    def fill_with_garbage(self) -> None:
        import redis

        client = redis.Redis(port=self.port, password=PASSWORD)
        for key in client.keys("carpool:*"):
            client.set(key, bytes(range(256)))
        client.close()


@contextlib.contextmanager
def two_servers(model: str, redis: Redis) -> Iterator[tuple[CarpoolServer, CarpoolServer]]:
    """Without Redis and with it."""
    with tempfile.TemporaryDirectory(prefix="carpool-cache-") as name:
        folder = Path(name) / "models" / "kept"
        folder.mkdir(parents=True)
        (folder / "model.toml").write_text(model)
        shared = {
            "CARPOOL_CACHE_URL": f"redis://:{PASSWORD}@127.0.0.1:{redis.port}",
            "CARPOOL_CACHE_SECRET": "the same for all that share",
        }
        one = ("--frontends", "1")
        with (
            carpool_server(folder.parent, options=one) as without,
            carpool_server(folder.parent, options=one, settings=shared) as sharing,
        ):
            yield without, sharing


def faults(redis: Redis) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """How each begins, and how it ends."""

    def restart(password: str = PASSWORD) -> None:
        redis.end()
        redis.start(password)

    def memory(most: str) -> Callable[[], object]:
        return lambda: redis.say("CONFIG", "SET", "maxmemory", most)

    def nothing() -> None: ...

    return {
        "all is well": (nothing, nothing),
        "killed": (redis.end, redis.start),
        "SIGSTOP": (lambda: redis.signal(signal.SIGSTOP), lambda: redis.signal(signal.SIGCONT)),
        "maxmemory 1 MB": (memory("1mb"), memory("0")),
        "wrong password": (lambda: restart("wrong"), restart),
        "garbage in every value": (redis.fill_with_garbage, nothing),
        "restarted": (restart, nothing),
    }


def rows(model: str, asking: Callable[[CarpoolServer], Ask], seconds: float) -> list[Row]:
    program = shutil.which("redis-server")
    if program is None:
        return [{"part": "redis", "what": "there is no redis-server"}]
    redis = Redis(program)
    redis.start()
    found = []
    try:
        with two_servers(model, redis) as servers:
            asks = [asking(server) for server in servers]
            number = 0
            for _ in range(200):
                number += 1
                for ask in asks:
                    ask(number)
            until_up(servers[1])
            for what, (begin, end) in faults(redis).items():
                begin()
                times, failed, number = in_turn(asks, number, seconds)
                end()
                mended = time.monotonic()
                back = until_up(servers[1]) - mended
                found.append(row_of(what, times, failed, back))
    finally:
        redis.end()
    return found


def in_turn(asks: list[Ask], number: int, seconds: float) -> tuple[list[list[float]], int, int]:
    times: list[list[float]] = [[], []]
    failed = 0
    over = time.monotonic() + seconds
    while time.monotonic() < over:
        number += 1
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.monotonic()
            try:
                asks[which](number)
            except (OSError, SystemExit):
                failed += 1
            times[which].append(time.monotonic() - began)
    return times, failed, number


def row_of(what: str, times: list[list[float]], failed: int, back: float) -> Row:
    without, sharing = (sorted(one) for one in times)
    return {
        "part": "redis",
        "what": what,
        "requests": len(sharing),
        "failed": failed,
        "p50_ms_without": 1e3 * without[len(without) // 2],
        "p50_ms": 1e3 * sharing[len(sharing) // 2],
        "p99_ms_without": 1e3 * without[len(without) * 99 // 100],
        "p99_ms": 1e3 * sharing[len(sharing) * 99 // 100],
        "back_after_s": back,
    }


def until_up(server: CarpoolServer) -> float:
    """When it reaches Redis."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
            if f"\n{UP} 1".encode() in reply.read():
                return time.monotonic()
        time.sleep(0.05)
    raise SystemExit("Redis is not reached any more")
