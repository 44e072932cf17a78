"""Three servers behind real balancers, with the configurations of deploy/balancer as they are.

A fake device answers 100 images/s in each server (40 ms a batch, 8 ms an image, promise 400 ms), so that a
small machine carries three of them, a balancer and the load generator.

    goodput    answered in time at 1.5 times the load, over three times what one server without a balancer
               answers: everything is up at the same time and is measured in turn, medians of three slices
    overload   1.5 times the load for long: each server's part of what was answered; nobody is left out
    kill       one of three is killed with all its processes under 0.4 of the load, bodies of 150 KB
    restart    all three are restarted in turn under 0.4 of the load: with retries, and without them but with
               a lame duck (HAProxy)
    half       one of three at half speed at 0.8 of the load, by weights that the servers report (Envoy)

A failure is what the client hears of nobody's decision: a connection that breaks, a status that the balancer
makes up, a server that is going. Refusals for want of time are answers. The balancers come with `make fleet`;
what is not there is left out.

    python benchmarks/fleet.py                      # about ten minutes
    python benchmarks/fleet.py --quick              # HAProxy: goodput, kill; within a minute
    python benchmarks/fleet.py --only kill --kinds nginx --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from carpool.deploying.balancer_config import Address
from load.balancers import Replica, balancer, program, replicas
from load.burst import LoadError
from load.program import run_program

KINDS = ("haproxy", "envoy", "nginx")
PARTS = ("goodput", "overload", "kill", "restart", "half")
CAPACITY = 100.0  # images per second of one server
SLO_MS = 400.0
OVERLOAD, MODERATE, HALF = 1.5, 0.4, 0.8
GOODPUT_AIM = {"haproxy": 0.99, "envoy": 0.97, "nginx": 0.97}
DECIDED = {"cannot-finish", "overload", "over-share", "given-up", "deadline", "queue-full"}
MODEL = """backend = "fake"
slo_ms = {slo:g}
max_batch = 32
[fake]
curve = "{curve}"
[[input]]
name = "x"
datatype = "UINT8"
shape = [{size}]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""


@dataclass(frozen=True)
class Row:
    part: str
    balancer: str
    requests: int
    failed: int
    in_time: float  # of all requests
    goodput: float  # answered in time, per second
    of_three: float | None = None  # goodput over three times that of one
    least_part: float | None = None  # the smallest part that one of three servers has of what was answered
    counted: float | None = None  # images that the servers counted as asked for, over those that were
    why: str = ""  # the failures, by reason

    @property
    def as_wished(self) -> bool:
        if self.part == "half":
            return self.in_time >= 0.98
        uneven = self.least_part is not None and self.least_part < 0.25
        return (
            not self.failed and not uneven and (self.of_three or 1.0) >= GOODPUT_AIM.get(self.balancer, 0.97)
        )


@dataclass(frozen=True)
class Length:
    """Seconds, and slices."""

    slice: float = 8.0
    rounds: int = 3
    overload: float = 30.0
    kill: float = 10.0
    half: float = 20.0


QUICK = Length(slice=5.0, rounds=1, overload=8.0, kill=6.0, half=8.0)


def main() -> int:
    args = parse_arguments()
    kinds = [kind for kind in args.kinds if program(kind) is not None]
    for kind in sorted({*args.kinds} - {*kinds}):
        print(f"left out: no {kind} here; make fleet fetches it", file=sys.stderr)
    length = QUICK if args.quick else Length()
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="carpool-fleet-") as name:
            for part in args.only if kinds else ():
                rows += DO[part](kinds, length, Path(name) / part)
    except LoadError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else as_text(rows))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="HAProxy, two parts, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--kinds", help="balancers, like haproxy,envoy", type=_listed(KINDS))
    parser.add_argument("--only", help="parts, like goodput,kill", type=_listed(PARTS))
    args = parser.parse_args()
    args.kinds = args.kinds or (KINDS[:1] if args.quick else KINDS)
    args.only = args.only or (("goodput", "kill") if args.quick else PARTS)
    return args


def _listed(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if not {*words} <= {*known}:
            raise argparse.ArgumentTypeError(f"known are {', '.join(known)}")
        return words

    return read


# ---- what happens


def write_models(folder: Path, curve: str = "40+8", size: int = 64) -> Path:
    model = folder / "models" / "fake"
    model.mkdir(parents=True)
    (model / "model.toml").write_text(MODEL.format(slo=SLO_MS, curve=curve, size=size))
    return model.parent


class Load:
    """`carpool load` in a process of its own, for as long as a block takes, or so many seconds."""

    def __init__(self, to: Address, rate: float, seconds: float, seed: int = 1, warmup: float = 1.0) -> None:
        command = [str(Path(sys.executable).with_name("carpool")), "load", f"http://{to}", "--json"]
        command += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", "--warmup", f"{warmup:g}"]
        command += ["--slo-ms", f"{SLO_MS:g}", "--seed", str(seed), "--model", "fake"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._most = seconds + 60.0

    def result(self) -> dict[str, Any]:
        try:
            out, said = self._process.communicate(timeout=self._most)
        except subprocess.TimeoutExpired:
            self.stop()
            raise LoadError("the load generator does not come to an end") from None
        if self._process.returncode:
            raise LoadError(f"carpool load: {said.decode(errors='replace')[-2000:]}")
        found: dict[str, Any] = json.loads(out)
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def row(part: str, kind: str, counts: dict[str, Any], **more: Any) -> Row:
    undecided = {reason: n for reason, n in counts["refused"].items() if reason not in DECIDED}
    why = {**counts["failed"], **undecided}
    lost = counts["timed_out"] + counts["unanswered"]
    if lost:
        why["no answer"] = lost
    return Row(
        part,
        kind,
        counts["offered"],
        sum(why.values()),
        round(counts["good"] / max(1, counts["offered"]), 4),
        round(counts["goodput_rps"], 1),
        why=", ".join(f"{n} × {reason}" for reason, n in why.items()),
        **more,
    )


@contextlib.contextmanager
def fleet(
    folder: Path, *, options: Sequence[str] = (), size: int = 64, count: int = 3
) -> Iterator[list[Replica]]:
    with replicas(write_models(folder, size=size), folder, count, options) as made:
        yield made


def goodput(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """Slices in turn: what else the machine does falls on all alike."""
    with contextlib.ExitStack() as stack:
        *three, alone = stack.enter_context(fleet(folder, count=4))
        at = {kind: stack.enter_context(balancer(kind, three, folder / kind)) for kind in kinds}
        one: list[float] = []
        behind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for seed in range(1, length.rounds + 1):
            counts = Load(alone.address, OVERLOAD * CAPACITY, length.slice, seed).result()
            one.append(counts["goodput_rps"])
            for kind, address in at.items():
                behind[kind].append(Load(address, 3 * OVERLOAD * CAPACITY, length.slice, seed).result())
    rows = []
    for kind, slices in behind.items():
        middle = sorted(slices, key=lambda counts: float(counts["goodput_rps"]))[len(slices) // 2]
        ratio = round(middle["goodput_rps"] / (3 * statistics.median(one)), 3)
        rows.append(row("goodput", kind, middle, of_three=ratio))
    return rows


def overload(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    rows = []
    with fleet(folder) as three:
        for kind in kinds:
            with balancer(kind, three, folder / kind) as address:
                before = _did(three)
                counts = Load(address, 3 * OVERLOAD * CAPACITY, length.overload, warmup=0.0).result()
                time.sleep(1.0)  # what was asked for is counted twice a second
                parts = [now - old for now, old in zip(_did(three)[0], before[0], strict=True)]
                rows.append(
                    row(
                        "overload",
                        kind,
                        counts,
                        least_part=round(min(parts) / max(1.0, sum(parts)), 3),
                        counted=round((_did(three)[1] - before[1]) / max(1, counts["sent"]), 3),
                    )
                )
    return rows


def _did(three: Sequence[Replica]) -> tuple[list[float], float]:
    """What each has answered, and what all were asked for."""
    asked = sum(replica.metric("carpool_offered_images_total") for replica in three)
    return [replica.metric("nv_inference_count") for replica in three], asked


def kill(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    rows = []
    with fleet(folder, size=150_000) as three:
        for kind in kinds:
            with balancer(kind, three, folder / kind) as address:
                load = Load(address, 3 * MODERATE * CAPACITY, length.kill)
                time.sleep(1.0 + length.kill / 3)
                three[1].kill()
                rows.append(row("kill", kind, load.result()))
            three[1].start()
            three[1].wait_ready()
    return rows


def restart(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    rows = []
    with fleet(folder / "retries") as three:
        for kind in kinds:
            with balancer(kind, three, folder / kind) as address:
                rows.append(row("restart", kind, _in_turn(address, three, length.slice / 2)))
    if "haproxy" in kinds:
        with (
            fleet(folder / "lame", options=("--lame-duck-s", "3")) as three,
            balancer("haproxy", three, folder / "plain", retries=False) as address,
        ):
            rows.append(
                row("restart", "haproxy, no retries, lame duck", _in_turn(address, three, length.slice / 2))
            )
    return rows


def _in_turn(address: Address, three: Sequence[Replica], seconds: float) -> dict[str, Any]:
    """How long a restart takes is not known: the load is poured in pieces until all are done."""
    done = threading.Event()
    parts: list[dict[str, Any]] = []

    def pour() -> None:
        while not done.is_set():
            parts.append(Load(address, 3 * MODERATE * CAPACITY, seconds, len(parts) + 1).result())

    pouring = threading.Thread(target=pour)
    pouring.start()
    try:
        for replica in three:
            replica.begin_to_stop()
            replica.wait_stopped()
            replica.start()
            replica.wait_ready()
            time.sleep(1.5)  # for the balancer to see it
    finally:
        done.set()
        pouring.join()
    return _sum(parts)


def _sum(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"refused": {}, "failed": {}}
    for name in ("offered", "good", "timed_out", "unanswered"):
        total[name] = sum(part[name] for part in parts)
    for name in ("refused", "failed"):
        for part in parts:
            for reason, count in part[name].items():
                total[name][reason] = total[name].get(reason, 0) + count
    total["goodput_rps"] = statistics.fmean(part["goodput_rps"] for part in parts)
    return total


def half(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """Of three, two and a half are there."""
    if "envoy" not in kinds:
        return []
    options = ("--load-report", "always")
    with contextlib.ExitStack() as stack:
        quick = stack.enter_context(replicas(write_models(folder / "a"), folder / "a", 2, options))
        slow_models = write_models(folder / "b", curve="80+16")
        slow = stack.enter_context(replicas(slow_models, folder / "b", 1, options))
        address = stack.enter_context(balancer("envoy", [*quick, *slow], folder / "envoy", weighted=True))
        rate = HALF * (2 * CAPACITY + slow[0].metric("carpool_capacity_images_per_second"))
        Load(address, rate, length.half / 2).result()  # until the weights are known
        return [row("half", "envoy, weighted", Load(address, rate, length.half, 2).result())]


DO = {"goodput": goodput, "overload": overload, "kill": kill, "restart": restart, "half": half}


def as_text(rows: Sequence[Row]) -> str:
    lines = [f"{'part':<9} {'balancer':<31} {'requests':>8} {'failed':>6} {'in time':>8} {'/s':>6}  notes"]
    for each in rows:
        notes = [] if each.of_three is None else [f"{each.of_three:.3f} × three of one"]
        notes += [] if each.least_part is None else [f"least part {each.least_part:.3f}"]
        notes += [] if each.counted is None else [f"counted {each.counted:.2f} times"]
        notes += [each.why] if each.why else []
        notes += [] if each.as_wished else ["NOT as wished"]
        lines.append(
            f"{each.part:<9} {each.balancer:<31} {each.requests:>8,} {each.failed:>6} "
            f"{100 * each.in_time:>6.1f} % {each.goodput:>6.0f}  {'; '.join(notes)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main, "fleet")
