"""Three times what a real model can carry: a promise, knobs, and FastAPI, side by side on these cores.

EfficientNet-Lite0 from the demo, asked for the classes of a JPEG, with a promise of 250 ms. The same server
runs with the promise, with Triton's knobs, and with knobs and a bounded wait; beside it, what a team writes
with FastAPI, opencv and onnxruntime. What the model carries is measured first, in a closed loop with the
knobs; then three times that is offered at random (Poisson) by clients that come and go and give up after 2 s.
Each server is started afresh for its turn, one at a time, in random order. The generator runs on the same
cores; what it took is in the table. Pictures, not tensors: they are an eighth of the bytes, so that the
generator takes less of the cores, and what is decoded for nothing is part of the question.

    python benchmarks/overload_peers.py --setup     # once: FastAPI's own environment
    python benchmarks/overload_peers.py             # about eight minutes
    python benchmarks/overload_peers.py --quick     # within a minute
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from carpool.demo import bundled_models, pictures
from load.disturbance import Disturbance, is_quiet
from load.offer import broken, gave_up, most, offer
from load.ports import free_port
from load.program import run_program, tell
from load.slices import wait_for_quiet
from load.wrk import Target
from peers import setup
from peers.pretended import carpool_command, carpool_env
from peers.server import Recipe, Server, ServerError
from peers.ways import HTTP, HttpWay

MODEL, PICTURE, LABEL = "efficientnet_lite0", "coffee", "espresso"
SLO_MS = 250.0
MAX_BATCH, HOLD_MS = 8, 5.0  # what `carpool plan` says for this promise, and a usual delay
THREADS = os.cpu_count() or 1
CLIENTS = 16  # of the closed loop: two full batches
_HERE = Path(__file__).parent
_FIXED = f"[batching]\nmax_delay_ms = {HOLD_MS:g}\n"
_BOUND = f"timeout_ms = {SLO_MS / 2:g}\ntimeout_action = 'reject'\n"
_THREADS = f"[onnxruntime]\nintra_op_threads = {THREADS}\n"


@dataclass(frozen=True, slots=True)
class Turn:
    """One server for some seconds. CPU shares are of all cores."""

    goodput_rps: float
    answered_rps: float
    p50_ms: float
    p99_ms: float
    refused: int
    failed: int
    server_cpu: float
    generator_cpu: float
    others_cpu: float
    generator_late: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the turns of one server; `ratio` is the promise's goodput over this one's, in a round."""

    server: str
    setting: str
    rounds: int
    offered_rps: float
    goodput_rps: float
    answered_rps: float
    p50_ms: float
    p99_ms: float
    refused: float
    failed: float
    server_cpu: float
    generator_cpu: float
    others_cpu: float
    ratio: float | None
    late_rounds: int


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    setting: str
    start: Callable[[Path], Recipe]


class Contest:
    """The model behind each server in turn."""

    def __init__(self, source: Path, folder: Path, peers_dir: Path) -> None:
        self._source = source
        self._folder = folder
        self._peers_dir = peers_dir
        self._picture = next(file for file in pictures() if file.stem == PICTURE).read_bytes()
        self._turns = 0

    def contenders(self) -> list[Contender]:
        fixed = f"max batch {MAX_BATCH}, held back {HOLD_MS:g} ms, 1 × {THREADS} threads"
        bounded = f"the same, and nobody waits over {SLO_MS / 2:g} ms"
        found = [
            Contender("promise", f"slo_ms = {SLO_MS:g}", lambda f: self._ours(f, f"slo_ms = {SLO_MS:g}")),
            Contender("knobs", fixed, lambda f: self._ours(f, "instances = 1", _FIXED, _THREADS)),
            Contender(
                "knobs, bounded", bounded, lambda f: self._ours(f, "instances = 1", _FIXED + _BOUND, _THREADS)
            ),
        ]
        if setup.vision_python(self._peers_dir).exists():
            found.append(Contender("FastAPI", f"max batch {MAX_BATCH}, {THREADS} threads", self._fastapi))
        return found

    def capacity(self, one: Contender, seconds: float) -> float:
        return self._with(one, lambda _, target: most(target, CLIENTS, seconds, warmup=1.0))

    def turn(self, one: Contender, rate: float, seconds: float, warmup: float, seed: int) -> Turn:
        def load(server: Server, target: Target) -> Turn:
            watched = Disturbance(server.cpu)
            found = offer(target, rate, seconds, warmup=warmup, slo=SLO_MS / 1e3, seed=seed)
            total = found.total
            ours, generator, others = watched.read()
            return Turn(
                goodput_rps=total.goodput_rps,
                answered_rps=total.answered_rps,
                p50_ms=total.response_ms.p50,
                p99_ms=total.response_ms.p99,
                refused=sum(total.refused.values()),
                failed=broken(found) + gave_up(found),
                server_cpu=ours,
                generator_cpu=generator,
                others_cpu=others,
                generator_late=found.generator_late,
            )

        return self._with(one, load)

    def _with(self, one: Contender, do: Callable[[Server, Target], object]) -> object:
        """A fresh server, which has said what is in the picture."""
        self._turns += 1
        folder = self._folder / str(self._turns)
        folder.mkdir()
        recipe = one.start(folder)
        server = Server(recipe, folder)
        try:
            server.wait_ready(np.ones(1))
            return do(server, recipe.ways[0].target)
        finally:
            server.ask_to_stop()
            server.wait_stopped()

    def _ours(self, folder: Path, line: str, *tables: str) -> Recipe:
        """The demo's model with other settings at the top, and tables at the end."""
        copy = folder / MODEL
        (copy / "1").mkdir(parents=True)
        (copy / "1" / "model.onnx").symlink_to((self._source / "1" / "model.onnx").resolve())
        for labels in self._source.glob("*labels.txt"):
            (copy / labels.name).write_bytes(labels.read_bytes())
        lines = (self._source / "model.toml").read_text().splitlines()
        kept = [one for one in lines if not one.startswith(("slo_ms", "max_batch", "instances"))]
        text = "\n".join([line, f"max_batch = {MAX_BATCH}", *kept, "", *tables])
        (copy / "model.toml").write_text(text)
        port = free_port()
        way = self._way(port, f"/models/{MODEL}/predict", _our_label)
        return Recipe("carpool", carpool_command(copy, port), carpool_env(self._folder / "cache"), [way])

    def _fastapi(self, _folder: Path) -> Recipe:
        port = free_port()
        env = {
            "BENCH_PORT": str(port),
            "BENCH_MODEL": str(self._source / "1" / "model.onnx"),
            "BENCH_TASK": "classify",
            "BENCH_THREADS": str(THREADS),
            "BENCH_MAX_BATCH": str(MAX_BATCH),
            "BENCH_LABELS": str(next(self._source.glob("*labels.txt"))),
        }
        command = [str(setup.vision_python(self._peers_dir)), str(_HERE / "peers" / "fastapi_vision.py")]
        return Recipe("fastapi", command, env, [self._way(port, "/predict", _their_label)])

    def _way(self, port: int, path: str, read: Callable[[Mapping[str, str], bytes], np.ndarray]) -> HttpWay:
        return HttpWay(HTTP, "JPEG", Target(port, path, {"Content-Type": "image/jpeg"}, self._picture), read)


def _our_label(_headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.array([float(json.loads(body)["classes"][0]["label"] == LABEL)])


def _their_label(_headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.array([float(json.loads(body)["results"][0]["label"] == LABEL)])


def summarise(one: Contender, turns: Sequence[Turn], promise: Sequence[Turn], offered: float) -> Row:
    ratios = [
        ours.goodput_rps / max(turn.goodput_rps, 0.1) for ours, turn in zip(promise, turns, strict=True)
    ]
    return Row(
        server=one.name,
        setting=one.setting,
        rounds=len(turns),
        offered_rps=round(offered, 1),
        goodput_rps=round(median(turn.goodput_rps for turn in turns), 1),
        answered_rps=round(median(turn.answered_rps for turn in turns), 1),
        p50_ms=round(median(turn.p50_ms for turn in turns), 1),
        p99_ms=round(median(turn.p99_ms for turn in turns), 1),
        refused=median(turn.refused for turn in turns),
        failed=median(turn.failed for turn in turns),
        server_cpu=round(median(turn.server_cpu for turn in turns), 3),
        generator_cpu=round(median(turn.generator_cpu for turn in turns), 3),
        others_cpu=round(median(turn.others_cpu for turn in turns), 3),
        ratio=None if one.name == "promise" else round(median(ratios), 2),
        late_rounds=sum(turn.generator_late for turn in turns),
    )


def show(rows: Sequence[Row], capacity: float) -> None:
    print(f"{MODEL}, JPEGs, SLO {SLO_MS:g} ms, {THREADS} cores; a closed loop carries {capacity:.0f}/s\n")
    print(
        f"{'server':16}{'offered/s':>10}{'in time/s':>11}{'answered/s':>12}{'p50 ms':>8}{'p99 ms':>8}"
        f"{'refused':>9}{'failed':>8}{'CPU':>7}{'generator':>11}{'promise is':>12}"
    )
    for row in rows:
        ratio = f"{row.ratio:.2f}×" if row.ratio is not None else ""
        busy = "" if is_quiet(row.others_cpu) else f"  others took {row.others_cpu:.0%}"
        late = f"  late in {row.late_rounds} of {row.rounds}" if row.late_rounds else ""
        print(
            f"{row.server:16}{row.offered_rps:>10.0f}{row.goodput_rps:>11.1f}{row.answered_rps:>12.1f}"
            f"{row.p50_ms:>8.0f}{row.p99_ms:>8.0f}{row.refused:>9,.0f}{row.failed:>8,.0f}"
            f"{row.server_cpu:>7.0%}{row.generator_cpu:>11.0%}{ratio:>12}{late}{busy}"
        )
    print()
    for row in rows:
        print(f"{row.server}: {row.setting}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument(
        "--load", type=float, default=3.0, help="in multiples of what it carries (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="turns of each server")
    parser.add_argument(
        "--patience", type=float, help="seconds to wait for a quiet machine before a turn (20)"
    )
    parser.add_argument("--setup", action="store_true", help="make FastAPI's environment and stop")
    parser.add_argument("--peers-dir", type=Path, default=setup.default_dir(), help="default: %(default)s")
    asked = parser.parse_args()
    if asked.setup:
        setup.make_vision(asked.peers_dir)
        return 0
    rounds, seconds, warmup = (1, 3.0, 1.0) if asked.quick else (5, 8.0, 2.0)
    patience = asked.patience if asked.patience is not None else (0.0 if asked.quick else 20.0)
    with tempfile.TemporaryDirectory(prefix="carpool-overload-") as folder:
        contest = Contest(bundled_models() / MODEL, Path(folder), asked.peers_dir)
        servers = contest.contenders()
        if len(servers) == 3:
            tell(f"FastAPI is left out, it is not set up in {asked.peers_dir}: --setup")
        if asked.quick:
            servers = [one for one in servers if one.name != "knobs, bounded"]
        capacity = contest.capacity(servers[1], seconds)
        tell(f"a closed loop carries {capacity:.0f}/s")
        turns: dict[str, list[Turn]] = {one.name: [] for one in servers}
        for number in range(asked.rounds or rounds):
            for one in random.sample(servers, len(servers)):
                wait_for_quiet(patience)
                turn = contest.turn(one, asked.load * capacity, seconds, warmup, seed=number + 1)
                tell(f"round {number + 1}, {one.name}: {turn.goodput_rps:.1f}/s in time")
                turns[one.name].append(turn)
    offered = asked.load * capacity
    rows = [summarise(one, turns[one.name], turns["promise"], offered) for one in servers]
    if asked.json:
        print(
            json.dumps({"capacity_rps": round(capacity, 1), "rows": [asdict(row) for row in rows]}, indent=2)
        )
    else:
        show(rows, capacity)
    return 0


if __name__ == "__main__":
    run_program(main, "overload_peers", ServerError, setup.SetupError)
