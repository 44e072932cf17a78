"""More traffic than a device can carry: Carpool's promise beside FastAPI, Triton, BentoML and LitServe.

Every server stands before the same pretended device: a batch takes 16 ms + 4 ms per image and no CPU. The
promise is 200 ms, within which the device carries 210 images/s. Requests come in an open loop at random
(Poisson), at 0.9, 1.3, 2 and 3 times that. Clients give up after 2 s. One in four requests comes on a
connection of its own; one client in twenty hangs up, half of them before the request is whole. A server is
started afresh for each load. What counts is the answers within the promise, as a share of what anybody
could have given: the bound of `carpool plan`, less who left.

    python benchmarks/overload.py --setup     # once: the peers' own environments
    python benchmarks/overload.py             # about seven minutes
    python benchmarks/overload.py --quick     # Carpool and FastAPI at 0.9 and 3, within a minute
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from carpool.core.curve import BatchCurve, fluid_bound, slo_capacity
from carpool.lab.load.load_report import LoadReport
from load.disturbance import Disturbance, is_quiet
from load.offer import broken, gave_up, left, offer
from load.overload_plot import draw
from load.program import run_program, tell
from load.slices import wait_for_quiet
from peers import pretended, setup
from peers.server import Server, ServerError

SLO = pretended.SLO_MS / 1e3
CURVE = BatchCurve.parse(f"{pretended.FIXED_MS:g}+{pretended.PER_IMAGE_MS:g}", pretended.ROOMY)
CAPACITY = slo_capacity(CURVE, SLO)
LOADS = "0.9,1.3,2,3"


@dataclass(frozen=True, slots=True)
class Row:
    """One server at one load. Rates are per second; `fraction` is good answers of the bound."""

    server: str
    setting: str
    load: float
    offered_rps: float
    bound_rps: float
    goodput_rps: float
    fraction: float
    p50_ms: float
    p99_ms: float
    refused: int
    gave_up: int  # after two seconds
    failed: int  # an error, or broken off
    left: int
    server_cpu: float  # shares of all cores
    generator_cpu: float
    others_cpu: float
    generator_late: bool
    rounds: int = 1


def main() -> int:
    args = parse_arguments()
    if args.setup:
        setup.make_overload(args.peers_dir, args.peer_python)
        return 0
    if args.draw:
        draw(args.draw, json.loads(args.rows.read_text())["rows"], CAPACITY)
        return 0
    seconds, warmup = (args.seconds or (5.0 if args.quick else 10.0)), (1.0 if args.quick else 2.0)
    patience = args.patience if args.patience is not None else (0.0 if args.quick else 20.0)
    chosen, absent = choose(args)
    taken: dict[tuple[float, str], list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="carpool-overload-") as name:
        for number, load in product(range(args.rounds), args.loads):
            for one in random.sample(chosen, len(chosen)):
                wait_for_quiet(patience)
                folder = Path(name) / f"{one.key}-{load:g}-{number}"
                try:
                    row = measure(one, load, folder, args.peers_dir, seconds, warmup, seed=number + 1)
                except ServerError as error:
                    if one.peer is None:
                        raise
                    absent[one.name] = f"it did not start: {error}"
                    chosen.remove(one)
                    continue
                tell(f"{row.server}, {load:g}×: {row.goodput_rps:.0f}/s in time, {row.fraction:.2f}")
                taken.setdefault((load, one.key), []).append(row)
    order = {one.name: place for place, one in enumerate(pretended.contenders())}
    rows = sorted(map(middle, taken.values()), key=lambda row: (row.load, order[row.server]))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "left_out": absent}, indent=2))
    else:
        show(rows, absent)
    return 0


def measure(
    one: pretended.Contender,
    load: float,
    folder: Path,
    peers_dir: Path,
    seconds: float,
    warmup: float,
    seed: int,
) -> Row:
    """A fresh server, asked until its answer is right, then loaded."""
    folder.mkdir()
    recipe = one.start(folder, peers_dir)
    server = Server(recipe, folder)
    try:
        server.wait_ready(pretended.expected())
        watched = Disturbance(server.cpu)
        target = recipe.ways[0].target
        found = offer(target, load * CAPACITY, seconds, warmup=warmup, slo=SLO, seed=seed)
        return row_of(one, load, found, watched.read())
    finally:
        server.ask_to_stop()
        server.wait_stopped()


def row_of(
    one: pretended.Contender, load: float, found: LoadReport, shares: tuple[float, float, float]
) -> Row:
    total = found.total
    server, generator, others = shares
    stayed = (total.offered - left(found)) / total.seconds
    bound = min(stayed, fluid_bound(CURVE, SLO, total.offered_rps))
    return Row(
        server=one.name,
        setting=one.setting,
        load=load,
        offered_rps=round(total.offered_rps, 1),
        bound_rps=round(bound, 1),
        goodput_rps=round(total.goodput_rps, 1),
        fraction=round(total.goodput_rps / bound, 3),
        p50_ms=round(total.response_ms.p50, 1),
        p99_ms=round(total.response_ms.p99, 1),
        refused=sum(total.refused.values()),
        gave_up=gave_up(found),
        failed=broken(found),
        left=left(found),
        server_cpu=round(server, 3),
        generator_cpu=round(generator, 3),
        others_cpu=round(others, 3),
        generator_late=found.generator_late,
    )


def middle(rows: Sequence[Row]) -> Row:
    """Of the rounds that nobody disturbed, or of all if there is none, the one in the middle."""
    quiet = [row for row in rows if is_quiet(row.others_cpu)] or rows
    chosen = sorted(quiet, key=lambda row: row.fraction)[(len(quiet) - 1) // 2]
    return replace(chosen, rounds=len(quiet))


def choose(args: argparse.Namespace) -> tuple[list[pretended.Contender], dict[str, str]]:
    """Those that were asked for, and of those that are not set up here, why."""
    there = {one.key: one for one in pretended.contenders()}
    wanted = args.peers.split(",") if args.peers else (["fastapi"] if args.quick else list(there)[1:])
    chosen, absent = [there["carpool"]], {}
    for key in wanted:
        if key == "carpool" or key == "none":
            continue
        if key not in there:
            raise setup.SetupError(f"--peers knows {', '.join(list(there)[1:])} and none, not {key}")
        reason = setup.why_missing(args.peers_dir, there[key].peer or "")
        if reason is None:
            chosen.append(there[key])
        else:
            absent[there[key].name] = reason
    return chosen, absent


def show(rows: Sequence[Row], absent: dict[str, str]) -> None:
    print(f"16 ms + 4 ms per image, SLO {pretended.SLO_MS:g} ms, capacity {CAPACITY:.0f}/s\n")
    heads = ("load", "server", "offered/s", "bound/s", "in time/s", "of bound", "p50 ms", "p99 ms")
    print("".join(_cells((*heads, "refused", "gave up", "failed", "left"))))
    for row in rows:
        figures = (row.offered_rps, row.bound_rps, row.goodput_rps)
        counts = (row.refused, row.gave_up, row.failed, row.left)
        cells = [f"{row.load:g}×", row.server, *(f"{one:.0f}" for one in figures), f"{row.fraction:.2f}"]
        cells += [f"{row.p50_ms:.0f}", f"{row.p99_ms:.0f}", *(f"{one:,}" for one in counts)]
        late = "  the generator was late" if row.generator_late else ""
        busy = "" if is_quiet(row.others_cpu) else f"  others took {row.others_cpu:.0%} of the machine"
        print("".join(_cells(cells)) + late + busy)
    print()
    for name, setting in dict.fromkeys((row.server, row.setting) for row in rows):
        print(f"{name}: {setting}")
    for name, reason in absent.items():
        print(f"{name} is left out: {reason}")


def _cells(cells: Sequence[str]) -> list[str]:
    widths = (6, 27, 11, 9, 11, 10, 8, 8, 9, 9, 8, 6)
    return [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="Carpool and FastAPI at 0.9 and 3")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--loads", help=f"in multiples of the capacity ({LOADS})")
    parser.add_argument("--peers", help="which to compare with; none for Carpool alone")
    parser.add_argument("--rounds", type=int, default=1, help="the middle quiet one is shown (%(default)s)")
    parser.add_argument("--seconds", type=float, help="per server and load, after a short warm-up")
    parser.add_argument(
        "--patience", type=float, help="seconds to wait for a quiet machine before a turn (20)"
    )
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and stop")
    parser.add_argument("--peers-dir", type=Path, default=setup.default_dir(), help="default: %(default)s")
    parser.add_argument("--peer-python", type=Path, help="the interpreter for Triton's environment")
    parser.add_argument("--draw", type=Path, help="only draw this picture, of the rows in --rows")
    parser.add_argument("--rows", type=Path, help="a file with what --json printed")
    args = parser.parse_args()
    args.loads = [float(one) for one in (args.loads or ("0.9,3" if args.quick else LOADS)).split(",")]
    if args.draw and not args.rows:
        parser.error("--draw needs --rows")
    return args


if __name__ == "__main__":
    run_program(main, "overload", ServerError, setup.SetupError)
