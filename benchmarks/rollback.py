"""How soon a bad candidate is back, live: a canary of 10 % at 100 requests a second from 100 sources.

A real server with two front ends; version 2 raises, sleeps or answers nonsense. Told are the seconds from the
first bad answer (for nonsense: the first difference) to the rollback, how long the change took to the last
front end, and what clients were answered.

    python benchmarks/rollback.py            # within a minute
    python benchmarks/rollback.py --quick    # the same
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from load.program import run_program

RATE, SOURCES, SLO_MS = 100.0, 100, 200
LONGEST_S, READY_S = 25.0, 120.0
SERVE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
CODE = {
    "raises": "def predict(x):\n    if (x == 5).any():\n        raise ValueError('no')\n    return x * 2\n",
    "sleeps": "import time\ndef predict(x):\n    time.sleep(3 * (x == 5).any())\n    return x * 2\n",
    "answers nonsense": "def predict(x): return x * 3\n",
}
MODEL = f"""backend = "python"
max_batch = 8
slo_ms = {SLO_MS}
[rollout]
shadow = 0
canary = [0.1]
[[input]]
name = "x"
datatype = "FP32"
shape = [2]
[[output]]
name = "y"
datatype = "FP32"
shape = [2]
"""
BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [5.0, 1.0]}]}
).encode()


def repository(home: Path, candidate: str) -> Path:
    for version, code in (("1", "def predict(x): return x * 2\n"), ("2", CODE[candidate])):
        folder = home / "models" / "m" / version
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(code)
    (home / "models" / "m" / "model.toml").write_text(MODEL)
    return home / "models"


class Run:
    def __init__(self, port: int, candidate: str) -> None:
        self._port = port
        self._candidate = candidate
        self._statuses: Counter[int] = Counter()
        self._seconds: list[float] = []

    async def measure(self) -> dict[str, Any]:
        give_up = time.monotonic() + READY_S
        while (await self._status())["state"] != "canary":
            if time.monotonic() > give_up:
                raise SystemExit("the rollout did not come to its canary")
            await asyncio.sleep(0.1)
        began, sent, bad_at, tasks = time.monotonic(), 0, 0.0, set()
        found: dict[str, Any] = {}
        while time.monotonic() < began + LONGEST_S:
            tasks.add(asyncio.create_task(self._infer(sent)))
            sent += 1
            found = await self._status()
            counts = found.get("counts", {})
            if not bad_at and (counts.get("fallbacks") or counts.get("differ")):
                bad_at = time.monotonic()
            if found["state"] == "rolled-back":
                break
            await asyncio.sleep(max(0.0, began + sent / RATE - time.monotonic()))
        back_at = time.monotonic()
        await asyncio.gather(*tasks)
        found = await self._status()
        self._seconds.sort()
        return {
            "candidate": self._candidate,
            "state": found["state"],
            "seconds": round(back_at - (bad_at or back_at), 3),
            "why": found["why"],
            "seen_ms": round(found["seen_ms"] or 0.0, 1),
            "sent": sent,
            "statuses": dict(self._statuses),
            "p99_ms": round(self._seconds[int(0.99 * len(self._seconds))] * 1e3),
        }

    async def _infer(self, number: int) -> None:
        began = time.monotonic()
        source = f"X-Carpool-Source: camera-{number % SOURCES}\r\n"
        status, _ = await self._ask("POST", "/v2/models/m/infer", BODY, source)
        self._statuses[status] += 1
        self._seconds.append(time.monotonic() - began)

    async def _status(self) -> dict[str, Any]:
        try:
            status, body = await self._ask("GET", "/v2/models/m/rollout")
        except OSError:
            status, body = 0, b""
        return dict(json.loads(body)) if status == 200 else {"state": "not there"}

    async def _ask(self, method: str, path: str, body: bytes = b"", more: str = "") -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{more}"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        fields, _, rest = answer.partition(b"\r\n\r\n")
        return int(fields.split()[1]), rest


def measure(candidate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rollback-") as folder:
        home = Path(folder)
        ports = random.sample(range(20_000, 32_000), 3)  # below those of outgoing connections
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")},
            "CARPOOL_STATE_DIR": str(home / "state"),
            "CARPOOL_CACHE_DIR": str(home / "cache"),
        }
        options = zip(("--http-port", "--grpc-port", "--metrics-port"), map(str, ports), strict=True)
        server = subprocess.Popen(
            [
                *(sys.executable, "-c", SERVE, "serve", str(repository(home, candidate))),
                *(word for option in options for word in option),
                *("--host", "127.0.0.1", "--frontends", "2"),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return asyncio.run(Run(ports[0], candidate).measure())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: it is short")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [measure(candidate) for candidate in CODE]
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'candidate':18}{'state':13}{'back after s':>13}{'seen ms':>9}{'sent':>6}{'p99 ms':>8}  answers")
    for row in rows:
        figures = f"{row['seconds']:>13.2f}{row['seen_ms']:>9.1f}{row['sent']:>6}{row['p99_ms']:>8}"
        print(f"{row['candidate']:18}{row['state']:13}{figures}  {row['statuses']}")


if __name__ == "__main__":
    run_program(main, "rollback")
