"""Large images in tiles: Carpool's rate beside sahi's, and what a client with plain images has of it.

    rate      the same images, model, tiles and merging: sahi's sliced prediction in one process on all cores,
              one tile at a time, and a server that gets the images from some clients. One after the other, in
              turn; the ratio is taken within each round (aim: 1.3 on two cores, 5 on an H200)
    beside    eight clients with tiles, each as soon as it has its answer, beside one that sends plain images
              at a steady rate: how many of its answers were late or rejected (aim: at most 5 %), with and
              without the others

sahi comes in an environment of its own, which is installed once (tests/conformance/sahi_venv.py); --sahi
names another interpreter, such as one with onnxruntime-gpu.

    python benchmarks/tiles.py                # about five minutes
    python benchmarks/tiles.py --quick        # a minute on a quiet machine
    python benchmarks/tiles.py --cuda --sahi PYTHON --clients 16
    python benchmarks/tiles.py --url http://HOST:8000 --no-sahi    # a server that runs already
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from carpool.demo import bundled_models
from conformance import sahi_venv
from extensions.tiles.photo_boards import board, photos
from load.burst import LoadError
from load.carpool_server import carpool_server
from load.program import run_program, tell

TILE, SIZE = 416, (2400, 1800)
SLO_MS = 500.0
QUERY = f"/detect?model=nanodet&tile={TILE}&overlap=0.2"
PLAIN = "/detect?model=nanodet&tile=0"
AIM, AIM_ON_CUDA, MOST_LATE = 1.3, 5.0, 0.05
_CUDA = 'backend = "onnx_torch"', '[[instances]]\nkind = "gpu"\n'
_WITH_TILES, _PER_SECOND = 8, 4.0
_REQUEST_S = 120.0


@dataclass(frozen=True)
class Rate:
    images: int
    clients: int
    carpool_per_s: float
    sahi_per_s: float | None
    ratio: float | None
    rounds: list[float]


@dataclass(frozen=True)
class Beside:
    tile_clients: int
    plain: int
    late: int
    rejected: int
    share: float
    p50_ms: float
    p95_ms: float
    tiled: int
    tiled_rejected: int


class Client:
    """A client with its own source, on one connection."""

    def __init__(self, url: str, source: str) -> None:
        split = urlsplit(url)
        self._made = lambda: http.client.HTTPConnection(split.hostname or "", split.port, timeout=_REQUEST_S)
        self._connection = self._made()
        self._fields = {"Content-Type": "image/jpeg", "X-Carpool-Source": source}

    def post(self, path: str, image: bytes) -> int:
        """Returns the status; 0 where there is none."""
        try:
            self._connection.request("POST", path, image, self._fields)
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self._connection = self._made()
            return 0
        if response.status not in (200, 429, 503, 504):
            raise LoadError(f"{path}: {response.status} {body[:200]!r}")
        return response.status

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def served(given: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The address of the server: `given.url`, or of one with the demo's detector."""
    if given.url:
        yield given.url
        return
    model = folder / "models" / "nanodet"
    shutil.copytree(bundled_models() / "nanodet", model)
    settings = model / "model.toml"
    top, sep, tables = settings.read_text().partition("[image]")
    lines = [line for line in top.splitlines() if not line.startswith("slo")]
    backend, instances = _CUDA if given.cuda else ("", "")
    text = "\n".join([*lines, f"slo_ms = {SLO_MS:g}", backend, sep + tables, instances])
    settings.write_text(text)
    with carpool_server(folder / "models") as server:
        yield server.url


def write_images(folder: Path, count: int) -> list[Path]:
    files = []
    for number in range(count):
        file = folder / f"{number}.jpg"
        board(number, SIZE).save(file, "JPEG", quality=92)
        files.append(file)
    return files


def answered(url: str, images: Sequence[bytes], clients: int) -> float:
    """Returns the seconds until all of them are answered, by so many clients at once."""
    waiting, lock, failed = list(images), threading.Lock(), []

    def live(number: int) -> None:
        client = Client(url, f"rate-{number}")
        while True:
            with lock:
                if not waiting or failed:
                    break
                image = waiting.pop()
            status = client.post(QUERY, image)
            while status in (429, 503, 504):  # of a machine that others load
                time.sleep(0.1)
                status = client.post(QUERY, image)
            if status != 200:
                failed.append(status)
        client.close()

    started = time.perf_counter()
    threads = [threading.Thread(target=live, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise LoadError(f"an image in tiles was answered with {failed[0]}")
    return time.perf_counter() - started


def rate(given: argparse.Namespace, url: str, folder: Path) -> Rate:
    count, rounds = (3, 2) if given.quick else (8, 5)
    files = write_images(folder, count)
    images = [file.read_bytes() for file in files]
    arguments: dict[str, Any] = {"slice_height": TILE, "slice_width": TILE}
    ours, theirs, ratios = [], [], []
    with contextlib.ExitStack() as stack:
        sahi = None
        if given.sahi:
            more = ("--provider", "CUDAExecutionProvider") if given.cuda else ()
            model = bundled_models() / "nanodet" / "1" / "model.onnx"
            sahi = stack.enter_context(sahi_venv.Sahi(given.sahi, model, *more))
            sahi.ask(images=[str(files[0])], **arguments)
        answered(url, images[:1], 1)
        for number in range(rounds):
            ours.append(count / answered(url, images, given.clients))
            if sahi is not None:
                theirs.append(count / sahi.ask(images=list(map(str, files)), **arguments)["seconds"])
                ratios.append(ours[-1] / theirs[-1])
            beside_sahi = f", ×{ratios[-1]:.2f}" if ratios else ""
            tell(f"round {number + 1} of {rounds}: {ours[-1]:.3f} images/s{beside_sahi}")
    known = bool(ratios)
    return Rate(
        count,
        given.clients,
        round(median(ours), 4),
        round(median(theirs), 4) if known else None,
        round(median(ratios), 3) if known else None,
        [round(one, 3) for one in ratios],
    )


def beside(given: argparse.Namespace, url: str, folder: Path, tile_clients: int) -> Beside:
    seconds = 10.0 if given.quick else 40.0
    large = [file.read_bytes() for file in write_images(folder, 2)]
    file = folder / "plain.jpg"
    photos()["coffee"].save(file, "JPEG", quality=92)
    small = file.read_bytes()
    over, tiled = threading.Event(), [0, 0]

    def live(number: int) -> None:
        client = Client(url, f"tiles-{number}")
        while not over.is_set():
            status = client.post(QUERY, large[number % len(large)])
            tiled[0 if status == 200 else 1] += 1
            if status != 200:
                over.wait(0.5)
        client.close()

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(tile_clients)]
    client = Client(url, "plain")
    for _ in range(5):
        client.post(PLAIN, small)
    for thread in threads:
        thread.start()
    time.sleep(2.0 if tile_clients else 0.0)
    took, rejected = [], 0
    began = time.perf_counter()
    for number in range(int(seconds * _PER_SECOND)):
        time.sleep(max(0.0, began + number / _PER_SECOND - time.perf_counter()))
        started = time.perf_counter()
        status = client.post(PLAIN, small)
        took.append(1e3 * (time.perf_counter() - started))
        rejected += status != 200
    over.set()
    for thread in threads:
        thread.join(_REQUEST_S)
    late = sum(one > SLO_MS for one in took)
    ordered = sorted(took)
    return Beside(
        tile_clients,
        len(took),
        late,
        rejected,
        round((late + rejected) / len(took), 4),
        round(median(took), 1),
        round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        *tiled,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument(
        "--url", default="", help="a server with the demo's nanodet, in place of one of its own"
    )
    parser.add_argument("--cuda", action="store_true", help="the model on a GPU, on both sides")
    parser.add_argument(
        "--sahi", default="", metavar="PYTHON", help="an interpreter with sahi and onnxruntime"
    )
    parser.add_argument("--no-sahi", action="store_true", help="without sahi beside")
    parser.add_argument("--clients", type=int, default=4, help="that send images in tiles at once")
    parser.add_argument("--only", choices=("rate", "beside"))
    given = parser.parse_args()
    if not (given.no_sahi or given.sahi or given.only == "beside"):
        given.sahi = str(sahi_venv.install())
    found: dict[str, Any] = {}
    good = True
    with tempfile.TemporaryDirectory(prefix="carpool-tiles-") as name, served(given, Path(name)) as url:
        if given.only != "beside":
            measured = rate(given, url, Path(name))
            found["rate"] = asdict(measured)
            aim = AIM_ON_CUDA if given.cuda else AIM
            good = measured.ratio is None or measured.ratio >= aim
        if given.only != "rate":
            rows = [beside(given, url, Path(name), clients) for clients in (0, _WITH_TILES)]
            found["beside"] = [asdict(row) for row in rows]
            good = good and rows[-1].share <= MOST_LATE
    found["good"] = good
    print(json.dumps(found, indent=None if given.json else 2))
    return 0 if good else 1


if __name__ == "__main__":
    run_program(main, "tiles", LoadError)
