"""One bounded burst of closed-loop load over gRPC from h2load, and what came back.

h2load knows HTTP/2 and nothing of gRPC: the message, with gRPC's five bytes before it, is the same file again
and again, so that the generator costs as little as wrk does. It does not read trailers either; but a call
that fails has no message, so the bytes that came back tell.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from load.burst import Burst, Fire, LoadError, children_cpu

FRAME_BYTES = 5  # of gRPC, before each message: not compressed, and its length
_HEADERS = ("content-type: application/grpc", "te: trailers")
_REQUESTS = re.compile(r"^requests: .*?(\d+) done, .*?(\d+) failed, (\d+) errored, (\d+) timeout", re.M)
_STATUSES = re.compile(r"^status codes: (\d+) 2xx", re.M)
_DATA = re.compile(r"^traffic: .*\((\d+)\) data", re.M)


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send what: one method and the message that is repeated."""

    port: int
    path: str
    message: bytes

    def loader(self, folder: Path, name: str, answer_bytes: int) -> Fire:
        """`answer_bytes` is the length of a good answer's message."""
        body = folder / f"{name}.body"
        body.write_bytes(b"\0" + len(self.message).to_bytes(4, "big") + self.message)
        url = f"http://127.0.0.1:{self.port}{self.path}"
        return partial(_run, url, body, folder / f"{name}.latencies", FRAME_BYTES + answer_bytes)


def find() -> str:
    """The path of h2load, or an error that says where to get it."""
    path = shutil.which("h2load")
    if path is None:
        raise LoadError(
            "h2load is not installed: it drives gRPC (Debian, Ubuntu: apt install nghttp2-client)"
        )
    return path


def _run(url: str, body: Path, log: Path, answer_bytes: int, concurrency: int, seconds: float) -> Burst:
    """A connection for each of the requests in flight, as with wrk."""
    whole = max(1, round(seconds))
    command = [find(), "-t1", f"-c{concurrency}", "-m1", f"-D{whole}s", "-d", str(body), f"--log-file={log}"]
    for header in _HEADERS:
        command += ["-H", header]
    log.unlink(missing_ok=True)
    before = children_cpu()
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=whole + 30, check=False)
    spent = children_cpu() - before
    counts, statuses, data = (pattern.search(done.stdout) for pattern in (_REQUESTS, _STATUSES, _DATA))
    if done.returncode != 0 or not (counts and statuses and data):
        raise LoadError(f"h2load ended with {done.returncode}: {(done.stderr or done.stdout)[-400:].strip()}")
    requests, failed, errored, timeout = (int(group) for group in counts.groups())
    missing = requests - min(requests, int(data[1]) // answer_bytes)
    seen = {"failed": failed, "errored": errored, "timeout": timeout}
    seen |= {"not_200": requests - int(statuses[1]), "without_message": missing}
    latencies = sorted(int(line.split("\t")[2]) for line in log.read_text().splitlines())
    return Burst(
        requests=requests,
        seconds=float(whole),
        p50_ms=_percentile(latencies, 50),
        p99_ms=_percentile(latencies, 99),
        failures={kind: count for kind, count in seen.items() if count},
        cpu_seconds=spent,
    )


def _percentile(sorted_us: list[int], percent: int) -> float:
    return sorted_us[len(sorted_us) * percent // 100] / 1e3 if sorted_us else 0.0
