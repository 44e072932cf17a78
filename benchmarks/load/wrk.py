"""One bounded burst of closed-loop load over HTTP/1.1 from wrk, and what came back."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load.burst import Burst, Fire, LoadError, children_cpu

SCRIPT = Path(__file__).with_name("post.lua")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send what: one URL and the request that is repeated."""

    port: int
    path: str
    headers: Mapping[str, str]
    body: bytes

    def loader(self, folder: Path, name: str) -> Fire:
        """Put the request where the wrk script finds it."""
        body, headers = folder / f"{name}.body", folder / f"{name}.headers"
        body.write_bytes(self.body)
        headers.write_text("".join(f"{key}: {value}\n" for key, value in self.headers.items()))
        env = {"BODY_FILE": str(body), "HEADERS_FILE": str(headers), "URL_PATH": self.path}
        return partial(_run, self.port, env)


def find() -> str:
    """The path of wrk, or an error that says where to get it."""
    path = shutil.which("wrk")
    if path is None:
        raise LoadError("wrk is not installed: it drives HTTP (Debian and Ubuntu: apt install wrk)")
    return path


def _run(port: int, script_env: Mapping[str, str], concurrency: int, seconds: float) -> Burst:
    """A connection for each of the requests in flight."""
    whole = max(1, round(seconds))  # wrk counts in whole seconds
    command = [find(), "-t1", f"-c{concurrency}", f"-d{whole}s", "--timeout", "20s", "-s", str(SCRIPT)]
    before = children_cpu()
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{port}"],
        env={**os.environ, **script_env},
        capture_output=True,
        text=True,
        timeout=whole + 30,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not lines:
        raise LoadError(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout)[-400:].strip()}")
    seen = json.loads(lines[0].removeprefix("RESULT "))
    failures = {kind: seen[kind] for kind in ("connect", "read", "write", "not_200", "timeout") if seen[kind]}
    return Burst(
        requests=seen["requests"],
        seconds=seen["duration_us"] / 1e6,
        p50_ms=seen["p50_us"] / 1e3,
        p99_ms=seen["p99_us"] / 1e3,
        failures=failures,
        cpu_seconds=children_cpu() - before,
    )
