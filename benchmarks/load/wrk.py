"""One bounded burst of closed-loop load from wrk, and what came back."""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("post.lua")


class LoadError(Exception):
    """The load generator is missing or could not finish."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send what: one URL and the request that is repeated."""

    port: int
    path: str
    headers: Mapping[str, str]
    body: bytes

    def write(self, folder: Path, name: str) -> dict[str, str]:
        """Put the request where the wrk script finds it; returns the script's environment."""
        body, headers = folder / f"{name}.body", folder / f"{name}.headers"
        body.write_bytes(self.body)
        headers.write_text("".join(f"{key}: {value}\n" for key, value in self.headers.items()))
        return {"BODY_FILE": str(body), "HEADERS_FILE": str(headers), "URL_PATH": self.path}


@dataclass(frozen=True, slots=True)
class Burst:
    """What wrk saw: answers, how long they took, and everything that was not a good answer."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failures: dict[str, int]
    cpu_seconds: float

    @property
    def rps(self) -> float:
        return self.requests / self.seconds


def find() -> str:
    """The path of wrk, or an error that says where to get it."""
    path = shutil.which("wrk")
    if path is None:
        raise LoadError("wrk is not installed: it drives the load (Debian and Ubuntu: apt install wrk)")
    return path


def run(port: int, script_env: Mapping[str, str], concurrency: int, seconds: float) -> Burst:
    """Keep `concurrency` requests in flight on the loopback port for `seconds`."""
    whole = max(1, round(seconds))  # wrk counts in whole seconds
    command = [find(), "-t1", f"-c{concurrency}", f"-d{whole}s", "--timeout", "20s", "-s", str(SCRIPT)]
    before = _children_cpu()
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
        cpu_seconds=_children_cpu() - before,
    )


def _children_cpu() -> float:
    """CPU of the children that have ended; servers are still running, so a difference is wrk's alone."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
