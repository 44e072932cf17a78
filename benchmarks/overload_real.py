"""More JPEGs than the cores can carry: does the promise hold, on a real model and on a pretended device?

Two servers, one after the other, asked for the classes of JPEGs over HTTP by Carpool's own load generator on
the same cores:

    efficientnet_lite0   the demo's model on the CPU, promise 250 ms
    pretended            a device that takes 120 ms and 2 ms for each picture, batches of 8, promise 300 ms

A round first finds what the server carries, by bisection: the highest rate at random (Poisson) of which 99 %
are answered in time; and the same with a neighbour that keeps half of the cores busy. Then, in random order:

    0.9 1.5 3 12   times that rate
    clients        40 clients that ask again at once, whatever they were told
    neighbour      1.5 times that rate; the neighbour comes in the middle of the run and leaves again

Every row is to show: in time at least 0.90 of what is carried (or of what was offered, if that is less); p99
of what is answered at most 1.05 of the promise; at most 5 % of the decoded pictures refused afterwards; half
of the refusals told within a fifth of the promise. Medians over the rounds that nothing else disturbed.

    python benchmarks/overload_real.py                                  # about twenty minutes
    python benchmarks/overload_real.py --model pretended --only 12,clients
    python benchmarks/overload_real.py --quick                          # pretended only, within a minute
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import median

from carpool.demo import bundled_models, pictures
from carpool.errors import CarpoolError
from carpool.lab.load.load_report import Counts
from load import processes
from load.burst import LoadError
from load.carpool_server import carpool_server
from load.neighbour import Neighbour
from load.program import run_program, tell
from load.slices import QUIET_PROBE_S, wait_for_quiet
from load.uploads import Seen, Uploads

ENOUGH = 0.99  # in time, of a rate that is carried
GOODPUT, P99, WASTE, TOLD = 0.90, 1.05, 0.05, 0.20  # what must be shown
TIMES = {"0.9": 0.9, "1.5": 1.5, "3": 3.0, "12": 12.0}
CLIENTS, BESIDE = "clients", "neighbour"
ROWS = (*TIMES, CLIENTS, BESIDE)
ASKING_AGAIN, NEIGHBOUR_LOAD, FIRST_CLIENTS = 40, 1.5, 16
REAL, PRETENDED = "efficientnet_lite0", "pretended"
_PRETENDED = """backend = "fake"
task = "classify"
max_batch = 8
[fake]
curve = "120+2"
[image]
size = 224
layout = "nchw"
[[input]]
name = "x"
datatype = "FP32"
shape = [3, 224, 224]
[[output]]
name = "y"
datatype = "FP32"
shape = [10]
"""


@dataclass(frozen=True)
class Effort:
    rounds: int
    probe_s: float  # of one rate while looking for the capacity
    row_s: float
    warmup_s: float
    halvings: int  # of the last bracket
    repeats: int  # of what was disturbed
    patience_s: float  # for quiet moments, in a round


FULL = Effort(rounds=3, probe_s=8.0, row_s=8.0, warmup_s=1.5, halvings=2, repeats=2, patience_s=60.0)
QUICK = Effort(rounds=1, probe_s=2.0, row_s=2.5, warmup_s=0.5, halvings=1, repeats=0, patience_s=0.0)


@dataclass(frozen=True)
class Subject:
    """A model, what it promises, and how its folder is written. `on_cores`: it shares those of the client."""

    name: str
    slo_ms: float
    on_cores: bool
    write: Callable[[Path], Path]


@dataclass(frozen=True)
class Capacity:
    rps: float
    generator_cpu: float
    quiet: bool


@dataclass(frozen=True)
class Turn:
    """One row in one round."""

    order: int
    row: str
    offered_rps: float
    goodput_rps: float
    of_capacity: float
    of_left: float
    p50_ms: float
    p99_ms: float
    refused: float
    told_ms: float
    failed: float
    wasted: float
    server_cpu: float
    generator_cpu: float
    neighbour_cpu: float
    others_cpu: float
    late: float
    quiet: bool


@dataclass(frozen=True)
class Row:
    """Medians of the quiet turns, or of all if none was; `ok` by what must be shown."""

    row: str
    turns: int
    quiet_turns: int
    figures: dict[str, float]
    ok: dict[str, bool]


class Trial:
    """One server that is loaded in all the ways, round after round."""

    def __init__(
        self,
        subject: Subject,
        uploads: Uploads,
        neighbour: Neighbour,
        effort: Effort,
        known: tuple[float, ...] = (),
    ) -> None:
        """`known`: what is carried, alone and beside the neighbour, where that need not be found."""
        self._subject, self._uploads, self._neighbour, self._effort = subject, uploads, neighbour, effort
        self._known = known
        self._patience = 0.0  # seconds that may still be waited in this round
        self.alone: list[Capacity] = []
        self.beside: list[Capacity] = []
        self.turns: list[Turn] = []

    def round(self, rows: Sequence[str]) -> None:
        self._patience = self._effort.patience_s
        if self._known:
            self.alone.append(Capacity(self._known[0], 0.0, quiet=True))
        else:
            self.alone.append(self._capacity(self.alone, self._guess(), beside=False))
        tell(f"carries {self.alone[-1].rps:.1f}/s")
        if BESIDE in rows and self._known[1:]:
            self.beside.append(Capacity(self._known[1], 0.0, quiet=True))
        elif BESIDE in rows:
            self.beside.append(self._capacity(self.beside, self.alone[-1].rps, beside=True))
        if self.beside:
            tell(f"carries {self.beside[-1].rps:.1f}/s with the neighbour")
        for row in random.sample(list(rows), len(rows)):
            found = self._repeat(lambda row=row: self._row(row))
            turns = self._turns_of(row, found)
            for turn in turns:
                tell(f"{turn.row}: {turn.of_left:.2f}, p99 {turn.p99_ms:.0f} ms{marked(turn.quiet)}")
            self.turns += turns

    # ---- what it carries

    def _guess(self) -> float:
        if self.alone:
            return self.alone[-1].rps
        found = self._uploads.closed_loop(FIRST_CLIENTS, self._effort.probe_s / 2, warmup=0.5, counted=False)
        return max(1.0, found.phases[0].goodput_rps)

    def _capacity(self, before: Sequence[Capacity], guess: float, *, beside: bool) -> Capacity:
        """Up or down until the rate lies between one that is carried and one that is not, then halve that."""
        step = 1.1 if before else 1.25
        rate, low, high = (before[-1].rps if before else guess), 0.0, 0.0
        generator, quiet = 0.0, True
        for _ in range(12):  # from a bad guess to far away
            seen = self._repeat(lambda rate=rate: self._probe(rate, beside))
            quiet = quiet and seen.quiet
            if is_carried(seen.phases[0]):
                low, generator = rate, seen.generator_cpu
            else:
                high = rate
            if low and high and high / low <= 1 + (step - 1) / 2**self._effort.halvings + 0.005:
                break
            rate = low * step if not high else high / step if not low else (low + high) / 2
        return Capacity(low or rate, generator, quiet)

    def _probe(self, rate: float, beside: bool) -> Seen:
        effort = self._effort
        try:
            if beside:
                self._neighbour.go()
            return self._uploads.open_loop(rate, effort.probe_s, warmup=effort.warmup_s, counted=False)
        finally:
            if beside:
                self._neighbour.rest()

    # ---- what it does with more

    def _row(self, row: str) -> Seen:
        effort = self._effort
        if row == CLIENTS:
            return self._uploads.closed_loop(ASKING_AGAIN, effort.row_s, warmup=effort.warmup_s)
        rate = TIMES.get(row, NEIGHBOUR_LOAD) * self.alone[-1].rps
        if row != BESIDE:
            return self._uploads.open_loop(rate, effort.row_s, warmup=effort.warmup_s)
        comes, leaves = effort.row_s / 4, effort.row_s * 5 / 4
        return self._uploads.open_loop(
            rate, effort.row_s * 2, warmup=effort.warmup_s, neighbour=(comes, leaves)
        )

    def _turns_of(self, row: str, seen: Seen) -> list[Turn]:
        if row != BESIDE:
            name = f"{row}×" if row in TIMES else f"{ASKING_AGAIN} clients"
            return [self._turn(ROWS.index(row), name, seen, 0, self.alone[-1])]
        return [
            self._turn(len(ROWS), "1.5×, neighbour there", seen, 1, self.beside[-1]),
            self._turn(len(ROWS) + 1, "1.5×, neighbour gone", seen, 2, self.alone[-1]),
        ]

    def _turn(self, order: int, name: str, seen: Seen, phase: int, capacity: Capacity) -> Turn:
        """What the client took, beyond what it took while the capacity was measured, was not the server's."""
        counts = seen.phases[phase]
        left = (1 - seen.generator_cpu) / (1 - capacity.generator_cpu) if self._subject.on_cores else 1.0
        return Turn(
            order=order,
            row=name,
            offered_rps=counts.offered_rps,
            goodput_rps=counts.goodput_rps,
            of_capacity=counts.goodput_rps / max(0.1, min(capacity.rps, counts.offered_rps)),
            of_left=counts.goodput_rps / max(0.1, min(capacity.rps * min(1.0, left), counts.offered_rps)),
            p50_ms=counts.response_ms.p50,
            p99_ms=counts.response_ms.p99,
            refused=sum(counts.refused.values()) / max(1, counts.offered),
            told_ms=counts.refusal_ms.p50,
            failed=float(sum(counts.failed.values()) + counts.timed_out + counts.unanswered),
            wasted=seen.decoded_for_nothing,
            server_cpu=seen.server_cpu,
            generator_cpu=seen.generator_cpu,
            neighbour_cpu=seen.neighbour_cpu,
            others_cpu=seen.others_cpu,
            late=float(bool(seen.late_because)),
            quiet=seen.quiet and capacity.quiet,
        )

    def _repeat(self, measure: Callable[[], Seen]) -> Seen:
        """Again while something else on the machine got in the way, a few times."""
        self._wait()
        seen = measure()
        for _ in range(self._effort.repeats):
            if seen.quiet or self._patience <= 0:
                break
            self._wait()
            seen = measure()
        return seen

    def _wait(self) -> None:
        began = time.monotonic()
        wait_for_quiet(self._patience)
        self._patience -= max(0.0, time.monotonic() - began - QUIET_PROBE_S)


def is_carried(counts: Counts) -> bool:
    """99 % in time; of a few requests, all but one."""
    return counts.offered - counts.good <= ceil((1 - ENOUGH) * counts.offered)


def summarise(trial: Trial, slo_ms: float) -> list[Row]:
    """In the order of their load, whatever the order of the turns was."""
    names = sorted({(turn.order, turn.row) for turn in trial.turns})
    return [summarise_row(name, trial.turns, slo_ms) for _, name in names]


def summarise_row(name: str, turns: Sequence[Turn], slo_ms: float) -> Row:
    all_turns = [turn for turn in turns if turn.row == name]
    quiet = [turn for turn in all_turns if turn.quiet]
    counted = [asdict(turn) for turn in quiet or all_turns]
    figures = {
        key: round(median(turn[key] for turn in counted), 4)
        for key, value in counted[0].items()
        if isinstance(value, float)
    }
    ok = {
        "goodput": figures["of_left"] >= GOODPUT,
        "p99": figures["p99_ms"] <= P99 * slo_ms,
        "wasted": figures["wasted"] <= WASTE,
        "told": figures["told_ms"] <= TOLD * slo_ms,
    }
    return Row(name, len(all_turns), len(quiet), figures, ok)


def show(subject: Subject, found: dict[str, object], rows: Sequence[Row]) -> None:
    beside = f", {found['beside_rps']:.1f}/s with the neighbour" if found["beside_rps"] else ""
    print(f"\n{subject.name}, JPEGs, promise {subject.slo_ms:g} ms, {processes.cores()} cores; ", end="")
    print(f"carries {found['capacity_rps']:.1f}/s{beside}\n")
    print(
        f"{'':23}{'offered/s':>10}{'in time/s':>11}{'of carried':>12}{'of left':>9}{'p99 ms':>9}"
        f"{'wasted':>9}{'refused':>9}{'told ms':>9}{'failed':>8}{'server':>8}{'client':>8}  shows"
    )
    for row in rows:
        f, ok = row.figures, row.ok
        print(
            f"{row.row:23}{f['offered_rps']:>10.0f}{f['goodput_rps']:>11.1f}{f['of_capacity']:>12.2f}"
            f"{f['of_left']:>8.2f}{said(ok['goodput'])}{f['p99_ms']:>8.0f}{said(ok['p99'])}"
            f"{f['wasted']:>8.1%}{said(ok['wasted'])}{f['refused']:>9.0%}{f['told_ms']:>8.1f}{said(ok['told'])}"
            f"{f['failed']:>8.0f}{f['server_cpu']:>8.0%}{f['generator_cpu']:>8.0%}"
            f"  {'yes' if all(ok.values()) else 'NO'}{doubt(row)}"
        )


def doubt(row: Row) -> str:
    found = "" if row.quiet_turns else f"  disturbed: others took {row.figures['others_cpu']:.0%}"
    return f"{found}  the generator was late" if row.figures["late"] else found


def said(ok: bool) -> str:
    return " " if ok else "!"


def marked(quiet: bool) -> str:
    return "" if quiet else ", disturbed"


# ---- the two models


def subjects() -> list[Subject]:
    return [Subject(REAL, 250.0, True, write_real), Subject(PRETENDED, 300.0, False, write_pretended)]


def write_real(folder: Path) -> Path:
    """The demo's folder, without the leave to promise more where a machine is slow."""
    copy = folder / REAL
    shutil.copytree(bundled_models() / REAL, copy)
    lines = (copy / "model.toml").read_text().splitlines()
    (copy / "model.toml").write_text("\n".join(one for one in lines if not one.startswith("slo_")) + "\n")
    return copy


def write_pretended(folder: Path) -> Path:
    (folder / PRETENDED).mkdir()
    (folder / PRETENDED / "model.toml").write_text(_PRETENDED)
    return folder / PRETENDED


@contextmanager
def served(
    subject: Subject, program: Path | None, neighbour: Neighbour, options: Sequence[str]
) -> Iterator[Uploads]:
    with tempfile.TemporaryDirectory(prefix="carpool-overload-") as folder:
        path = subject.write(Path(folder))
        promise = ["--slo-ms", f"{subject.slo_ms:g}", "--log-level", "warning", *options]
        with carpool_server(path, options=promise, program=program) as server:
            yield Uploads(server, subject.name, subject.slo_ms / 1e3, pictures(), neighbour)


def run(subject: Subject, asked: argparse.Namespace, effort: Effort) -> dict[str, object]:
    with (
        closing(Neighbour()) as neighbour,
        served(subject, asked.carpool, neighbour, asked.serve_option) as uploads,
    ):
        trial = Trial(subject, uploads, neighbour, effort, asked.capacity)
        try:
            for number in range(asked.rounds or effort.rounds):
                tell(f"{subject.name}, round {number + 1}")
                trial.round(asked.only)
        except KeyboardInterrupt:
            tell("interrupted: these are the turns so far")
    found: dict[str, object] = {
        "model": subject.name,
        "slo_ms": subject.slo_ms,
        "cores": processes.cores(),
        "capacity_rps": carried(trial.alone),
        "beside_rps": carried(trial.beside),
        "capacities": [asdict(one) for one in trial.alone],
        "beside": [asdict(one) for one in trial.beside],
    }
    rows = summarise(trial, subject.slo_ms)
    if not asked.json:
        show(subject, found, rows)
    return found | {"rows": [asdict(row) for row in rows], "turns": [asdict(turn) for turn in trial.turns]}


def carried(found: Sequence[Capacity]) -> float:
    counted = [one.rps for one in found if one.quiet] or [one.rps for one in found]
    return round(median(counted), 2) if counted else 0.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round on the pretended device")
    parser.add_argument("--json", action="store_true", help="print one object for machines")
    parser.add_argument("--model", choices=(REAL, PRETENDED), help="only this one")
    parser.add_argument("--only", type=row_names, default=ROWS, help=f"rows, of {','.join(ROWS)}")
    parser.add_argument(
        "--capacity",
        type=lambda text: tuple(map(float, text.split(","))),
        default=(),
        metavar="RPS[,RPS]",
        help="what is carried, and beside the neighbour, instead of finding out; with --model",
    )
    parser.add_argument("--rounds", type=int, help="so many, instead of 3")
    parser.add_argument("--carpool", type=Path, help="the program to serve with; that of this environment")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="for carpool serve; again for more"
    )
    return parser.parse_args()


def row_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().removesuffix("×").removesuffix("x") for name in text.split(","))
    for name in names:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"no row {name!r}: there are {', '.join(ROWS)}")
    return names


def main() -> int:
    asked = parse_arguments()
    effort = QUICK if asked.quick else FULL
    if asked.capacity and not (asked.model or asked.quick):
        sys.exit("overload_real: --capacity is that of one model: say which with --model")
    chosen = asked.model or (PRETENDED if asked.quick else None)
    found = [run(subject, asked, effort) for subject in subjects() if chosen in (None, subject.name)]
    if asked.json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    run_program(main, "overload_real", LoadError, CarpoolError)
