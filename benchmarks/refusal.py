"""What a refusal costs beside an answer: CPU of all processes of the server, per request.

One server holds models on a fake device that takes no time, and models whose device is always busy: a batch
takes almost the whole promise, so while one runs the gate is closed, as it is in any overload. Both are sent
the same 60 KB, a tensor to the v2 route and a JPEG to the picture route, over connections that are kept, in
short slices in turn; figures are medians over slices, ratios are taken within a turn. Rejections wait for
their turn, so that these clients get few of them per second, and most of what each takes is waking up: beside
them is a model that accepts as many, since its batches take 25 ms.

    python benchmarks/refusal.py            # about three minutes
    python benchmarks/refusal.py --quick    # within a minute
"""

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from load import slices, wrk
from load.burst import Burst, Fire, LoadError
from load.ports import free_port
from load.program import run_program
from load.wrk import Target
from peers.server import Recipe, Server, ServerError
from peers.ways import HttpWay

FULL = slices.Plan((32,), rounds=9, max_rounds=20, seconds=2, repeats=1, patience_s=10, limit_s=300)
QUICK = slices.Plan((32,), rounds=3, max_rounds=4, seconds=2, repeats=0, patience_s=1, limit_s=55)
TARGET = 0.6
BYTES = 60_000
ACCEPTED, SLOWLY, REFUSED = "accepted", "accepted as slowly", "refused"
TENSOR, JPEG = "tensor, v2 HTTP", "JPEG, picture route"
MOST_ACCEPTED = 0.01  # of the requests to a device that is always busy: one starts each batch
STOPPING_S = 4.0

MODEL = """
backend = "fake"
slo_ms = {slo_ms}
max_batch = {max_batch}
{more}
[fake]
curve = "{curve}"
[[input]]
name = "image"
datatype = "{datatype}"
shape = {shape}
[[output]]
name = "scores"
datatype = "FP32"
shape = [10]
"""
PICTURES = 'task = "classify"\n'
DEVICES: Mapping[str, Mapping[str, object]] = {
    ACCEPTED: {"curve": "0.001+0", "slo_ms": 1000, "max_batch": 32},
    SLOWLY: {"curve": "25+0", "slo_ms": 1000, "max_batch": 32},
    REFUSED: {"curve": "900+0", "slo_ms": 1000, "max_batch": 1},
}


@dataclass(frozen=True, slots=True)
class Lane:
    """One model asked in one way."""

    server: Server
    group: str
    name: str
    send: Fire

    def fire(self, concurrency: int, seconds: float) -> Burst:
        """As the generator saw it; what is meant to be refused is a failure when it is not."""
        burst = self.send(concurrency, seconds)
        if self.name != REFUSED:
            return burst
        others = dict(burst.failures)
        answered = burst.requests - others.pop("not_200", 0)
        if answered > MOST_ACCEPTED * burst.requests:
            others["answered"] = answered
        return replace(burst, failures=others)

    def cpu(self) -> dict[int, float]:
        return self.server.cpu()


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--frontends", type=int, help="passed on to carpool serve; its own default otherwise")
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    wrk.find()
    with tempfile.TemporaryDirectory(prefix="carpool-refusal-") as name:
        folder = Path(name)
        port = free_port()
        server = Server(recipe(folder, port, args.frontends), folder)
        try:
            server.wait_ready(np.zeros(10))
            lanes = [lane(server, folder, port, *case) for case in CASES]
            for one in lanes:
                one.fire(32, 1.0)
            turns = list(slices.measure(lanes, plan, began + plan.limit_s - STOPPING_S, tell))
        finally:
            server.ask_to_stop()
            server.wait_stopped()
    rows = summarise(turns)
    print(json.dumps(rows, indent=1) if args.json else as_text(rows))
    return 0


CASES = [(group, name) for group in (TENSOR, JPEG) for name in DEVICES]


def recipe(folder: Path, port: int, frontends: int | None) -> Recipe:
    models = folder / "models"
    for name, device in DEVICES.items():
        plain = {"more": "", "datatype": "UINT8", "shape": [BYTES], **device}
        pictures = {"more": PICTURES, "datatype": "FP32", "shape": [3, 224, 224], **device}
        for kind, settings in (("tensor", plain), ("picture", pictures)):
            at = models / _model(kind, name)
            (at / "1").mkdir(parents=True)
            (at / "model.toml").write_text(MODEL.format(**settings))
    command = [str(Path(sys.executable).with_name("carpool")), "serve", str(models), "--host", "127.0.0.1"]
    command += ["--http-port", str(port), "--metrics-port", str(free_port()), "--grpc-frontends", "0"]
    if frontends is not None:
        command += ["--frontends", str(frontends)]
    ask = HttpWay(TENSOR, "HTTP", target(port, TENSOR, ACCEPTED), lambda *_: np.zeros(10))
    return Recipe("carpool", command, {"XDG_CACHE_HOME": str(folder / "cache")}, [ask])


def lane(server: Server, folder: Path, port: int, group: str, name: str) -> Lane:
    slug = _model("tensor" if group == TENSOR else "picture", name)
    return Lane(server, group, name, target(port, group, name).loader(folder, slug))


def _model(kind: str, name: str) -> str:
    return f"{kind}-{name.replace(' ', '-')}"


def target(port: int, group: str, name: str) -> Target:
    if group == TENSOR:
        headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
        return Target(port, f"/v2/models/{_model('tensor', name)}/infer", headers, bytes(BYTES))
    return Target(port, f"/models/{_model('picture', name)}/predict", {"Content-Type": "image/jpeg"}, photo())


def photo() -> bytes:
    """A picture of noise and slopes that takes about 60 KB."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[0:427, 0:640]
    slopes = np.stack([rows / 427, columns / 640, (rows + columns) / 1067], axis=-1) * 200
    pixels = (slopes + random.normal(0, 8, slopes.shape)).clip(0, 255).astype(np.uint8)
    for quality in range(95, 5, -5):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
        if file.tell() <= BYTES:
            return file.getvalue() + bytes(BYTES - file.tell())
    raise LoadError("no picture of this size")


def summarise(turns: Sequence[slices.Turn]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for group in (TENSOR, JPEG):
        here = [turn for turn in turns if turn.group == group]
        quiet = [turn for turn in here if turn.quiet]
        used = quiet or here

        def median(of: Callable[[slices.Turn], float], used: Sequence[slices.Turn] = used) -> float:
            return round(statistics.median(map(of, used)), 3)

        rows.append(
            {
                "body": group,
                "bytes": BYTES,
                "accepted_cpu_us": median(lambda turn: turn.slices[ACCEPTED].cpu_us),
                "slowly_cpu_us": median(lambda turn: turn.slices[SLOWLY].cpu_us),
                "refused_cpu_us": median(lambda turn: turn.slices[REFUSED].cpu_us),
                "slowly_ratio": median(lambda turn: turn.slices[REFUSED].cpu_us / turn.slices[SLOWLY].cpu_us),
                "ratio": median(lambda turn: turn.slices[REFUSED].cpu_us / turn.slices[ACCEPTED].cpu_us),
                "accepted_rps": median(lambda turn: turn.slices[ACCEPTED].rps),
                "slowly_rps": median(lambda turn: turn.slices[SLOWLY].rps),
                "refused_rps": median(lambda turn: turn.slices[REFUSED].rps),
                "turns": len(used),
                "quiet_turns": len(quiet),
                "target": TARGET,
            }
        )
    return rows


def as_text(rows: Sequence[Mapping[str, object]]) -> str:
    headings = ("accepted µs", "as slowly µs", "refused µs", "ratio", "to slowly", "target", "quiet turns")
    widths = (12, 14, 12, 8, 11, 8, 14)
    lines = [f"{'60 KB as':<22}" + "".join(f"{h:>{w}}" for h, w in zip(headings, widths, strict=True))]
    for row in rows:
        turns = f"{row['quiet_turns']} of {row['turns']}"
        lines.append(
            f"{row['body']:<22}{row['accepted_cpu_us']:>12.0f}{row['slowly_cpu_us']:>14.0f}"
            f"{row['refused_cpu_us']:>12.0f}{row['ratio']:>8.2f}{row['slowly_ratio']:>11.2f}"
            f"{'≤ ' + str(TARGET):>8}{turns:>14}"
        )
    return "\n".join(lines)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main, "refusal", ServerError, LoadError)
