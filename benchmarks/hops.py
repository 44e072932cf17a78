"""What one warm request costs in Python: how many files it passes through, and how many calls it makes.

A whole server, with one front end and the engine in processes of their own and the link between them, is
asked by a client that is not counted: a v2 tensor, and a JPEG on a picture route. The model is the fake
device, so no runtime is in the way. Calls are counted by `sys.setprofile` in every thread of every process
of the server. Only functions in Carpool's own files count (each time that a generator goes on is a call,
too); those written in C and those of other packages do not. A move is a call that follows one in another
file, in the same thread. After each answer the server has time to finish what it does later. Figures are
lower quartiles over requests, file by file: what the server does by itself ten times a second is not in them.

    python benchmarks/hops.py            # within half a minute
    python benchmarks/hops.py --quick    # fewer requests
    python benchmarks/hops.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

import carpool
from load.burst import LoadError
from load.carpool_server import stop
from load.ports import free_port
from load.program import run_program

PACKAGE = f"{Path(carpool.__file__).parent}{os.sep}"
COUNTING = Path(__file__).resolve().parent / "hop_counting"
REQUESTS, QUICK_REQUESTS = 41, 17
WARM_UP = 60  # what is learnt from the first requests is learnt, and every cache is filled
LATER_S = 0.02  # for what the server does when the answer is away
READY_S = 90.0
REPORT_S = 30.0

MODEL = """
backend = "fake"
slo_ms = 1000
max_batch = 32
{more}
[fake]
curve = "0.001+0"
[[input]]
name = "image"
datatype = "FP32"
shape = [3, 32, 32]
[[output]]
name = "scores"
datatype = "FP32"
shape = [10]
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and the most that it may cost."""

    name: str
    path: str
    headers: Mapping[str, str]
    most_files: int
    most_calls: int


V2 = Asked("v2", "/v2/models/tensor/infer", {"Inference-Header-Content-Length": "0"}, 40, 230)
JPEG = Asked("jpeg", "/classify", {"Content-Type": "image/jpeg"}, 50, 355)


@dataclass(frozen=True, slots=True)
class Hops:
    """What one request did."""

    by_file: Counter[str]
    moves: int
    threads: int

    @property
    def calls(self) -> int:
        return self.by_file.total()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--json", action="store_true", help="print objects for machines")
    args = parser.parse_args()
    requests = QUICK_REQUESTS if args.quick else REQUESTS
    with tempfile.TemporaryDirectory(prefix="carpool-hops-") as name, counted_server(Path(name)) as server:
        found = [(asked, server.usual(asked, requests)) for asked in (V2, JPEG)]
    print(json.dumps([as_row(*one) for one in found], indent=1) if args.json else as_text(found))
    return 0


def body(asked: Asked) -> bytes:
    if asked is V2:
        return np.ones((1, 3, 32, 32), np.float32).tobytes()
    file = io.BytesIO()
    rows, columns = np.mgrid[0:240, 0:320]
    pixels = np.stack([rows, columns, rows + columns], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


class CountedServer:
    """A running server whose processes note their calls while the switch is on."""

    def __init__(self, folder: Path, connection: http.client.HTTPConnection) -> None:
        self._folder = folder
        self._window = 0
        self._connection = connection

    def usual(self, asked: Asked, requests: int) -> Hops:
        return usual(self.each(asked, requests))

    def each(self, asked: Asked, requests: int) -> list[Hops]:
        content = body(asked)
        for _ in range(WARM_UP):
            self._ask(asked, content)
        time.sleep(LATER_S)
        self._count()  # of what came before nothing is kept
        hops = []
        for _ in range(requests):
            self._set(0, 1)
            self._ask(asked, content)
            time.sleep(LATER_S)
            self._set(0, 0)
            hops.append(self._count())
        return hops

    def _ask(self, asked: Asked, content: bytes) -> None:
        self._connection.request("POST", asked.path, content, asked.headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise LoadError(f"{asked.path} was answered {answer.status}: {text[:300]!r}")

    def _set(self, byte: int, value: int) -> None:
        with (self._folder / "switch").open("r+b") as file:
            file.seek(byte)
            file.write(bytes([value]))

    def _count(self) -> Hops:
        """Close the window, and gather what all processes noted in it."""
        self._window = (self._window + 1) % 256
        self._set(1, self._window)
        by_file: Counter[str] = Counter()
        moves = 0
        threads = set()
        for counted in self._folder.glob("*.counted"):
            last: dict[int, str] = {}
            for thread, name in self._report(int(counted.stem)):
                file = name.removeprefix(PACKAGE)
                by_file[file] += 1
                moves += last.get(thread, file) != file
                last[thread] = file
            threads |= {(counted.stem, thread) for thread in last}
        return Hops(by_file, moves, len(threads))

    def _report(self, pid: int) -> list[tuple[int, str]]:
        path = self._folder / f"{self._window}.{pid}.json"
        give_up = time.monotonic() + REPORT_S
        while time.monotonic() < give_up and Path(f"/proc/{pid}").exists():
            if path.exists():
                found: list[tuple[int, str]] = json.loads(path.read_text())
                path.unlink()
                return found
            time.sleep(0.002)
        return []


@contextlib.contextmanager
def counted_server(folder: Path) -> Iterator[CountedServer]:
    for name, more in (("tensor", ""), ("picture", 'task = "classify"')):
        (folder / "models" / name).mkdir(parents=True)
        (folder / "models" / name / "model.toml").write_text(MODEL.format(more=more))
    (folder / "switch").write_bytes(bytes(2))
    port = free_port()
    command = [str(Path(sys.executable).with_name("carpool")), "serve", str(folder / "models")]
    command += ["--host", "127.0.0.1", "--http-port", str(port), "--metrics-port", str(free_port())]
    command += ["--frontends", "1", "--grpc-frontends", "0"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL_", "PYTHON"))}
    kept |= {"CARPOOL_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(COUNTING)}
    kept |= {"HOPS_FOLDER": str(folder), "HOPS_PACKAGE": PACKAGE}
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        _wait_ready(port, process, log)
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", port, timeout=REPORT_S)
        ) as connection:
            yield CountedServer(folder, connection)
    finally:
        stop(process)


def _wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + READY_S
    while time.monotonic() < give_up and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise LoadError(f"carpool serve is not ready:\n{log.read_text(errors='replace')[-2000:]}")


def usual(hops: Sequence[Hops]) -> Hops:
    return _summed_up(hops, _quartile)


def least(hops: Sequence[Hops]) -> Hops:
    """Where the machine is busy, most requests take so long that the server's own work falls into them."""
    return _summed_up(hops, min)


def _summed_up(hops: Sequence[Hops], chosen: Callable[[Iterable[int]], int]) -> Hops:
    files = {file for one in hops for file in one.by_file}
    by_file = Counter({file: chosen([one.by_file[file] for one in hops]) for file in files})
    moves, threads = chosen([one.moves for one in hops]), chosen([one.threads for one in hops])
    return Hops(+by_file, moves, threads)  # without files that have none


def _quartile(counts: Iterable[int]) -> int:
    ordered = sorted(counts)
    return ordered[len(ordered) // 4]


def as_row(asked: Asked, hops: Hops) -> dict[str, object]:
    return {
        "request": asked.name,
        "files": len(hops.by_file),
        "calls": hops.calls,
        "moves": hops.moves,
        "threads": hops.threads,
        "asked": {"files": asked.most_files, "calls": asked.most_calls},
        "by_file": dict(hops.by_file.most_common()),
    }


def as_text(found: Sequence[tuple[Asked, Hops]]) -> str:
    lines = [f"{'request':<10}{'files':>7}{'asked':>8}{'calls':>8}{'asked':>8}{'moves':>8}{'threads':>9}"]
    for asked, hops in found:
        lines.append(
            f"{asked.name:<10}{len(hops.by_file):>7}{f'≤ {asked.most_files}':>8}"
            f"{hops.calls:>8}{f'≤ {asked.most_calls}':>8}{hops.moves:>8}{hops.threads:>9}"
        )
    files = sorted(
        {file for _, hops in found for file in hops.by_file}, key=lambda file: _weight(file, found)
    )
    lines += ["", f"{'calls in':<44}" + "".join(f"{asked.name:>8}" for asked, _ in found)]
    lines += [f"{file:<44}" + "".join(f"{hops.by_file[file]:>8}" for _, hops in found) for file in files]
    return "\n".join(lines)


def _weight(file: str, found: Sequence[tuple[Asked, Hops]]) -> tuple[int, str]:
    return -max(hops.by_file[file] for _, hops in found), file


if __name__ == "__main__":
    run_program(main, "hops", LoadError)
