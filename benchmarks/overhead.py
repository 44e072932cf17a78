"""What a request costs before the model does any work: Carpool beside FastAPI and Triton.

Every server runs the same tiny ONNX model (150,528 bytes in, ten floats out, batches of at most 32). All are
up at the same time and are loaded in short slices in turn; figures are medians over quiet rounds, ratios are
taken within a round. CPU is the user and system time of all processes of a server, per request.

    python benchmarks/overhead.py --setup     # once: the peers' own environments
    python benchmarks/overhead.py             # the whole comparison, about four minutes
    python benchmarks/overhead.py --quick     # concurrency 32, within a minute
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from load import report, slices, wrk
from peers import recipes, setup, tiny
from peers.server import Recipe, Server, ServerError

FULL = slices.Plan((1, 8, 32, 64), rounds=5, max_rounds=15, seconds=2, repeats=2, patience_s=60, limit_s=1800)
QUICK = slices.Plan((32,), rounds=3, max_rounds=5, seconds=2, repeats=1, patience_s=1, limit_s=60)
WARM_UP_S = 1.0
STOPPING_S = 6.0


def main() -> int:
    began = time.monotonic()
    args = parse_arguments()
    if args.setup:
        setup.make(args.peers_dir, args.peer_python)
        tell(f"peers are ready in {args.peers_dir}")
        return 0
    wrk.find()
    plan = plan_of(args)
    with tempfile.TemporaryDirectory(prefix="carpool-overhead-") as name:
        folder = Path(name)
        model = folder / "tiny.onnx"
        tiny.write_model(model)
        with running(choose(args, folder, model), folder, tiny.expected(model)) as servers:
            for server in servers:
                slices.run_slice(server, max(plan.concurrencies), WARM_UP_S)
            turns = slices.measure(servers, plan, began + plan.limit_s - STOPPING_S, tell)
    rows = report.summarise(turns, [server.recipe for server in servers], recipes.CARPOOL)
    print(report.as_json(rows) if args.json else report.as_text(rows))
    if short := report.short_of_quiet(turns, plan):
        tell(short)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="concurrency 32 only, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--concurrency", help="for example 32,64")
    parser.add_argument("--rounds", type=int, help="quiet rounds to collect")
    parser.add_argument(
        "--peer-delay-ms", type=float, default=0.0, help="how long the peers may hold a batch back"
    )
    parser.add_argument("--frontends", type=int, help="passed on to carpool serve; its own default otherwise")
    parser.add_argument("--servers", default="carpool,fastapi,triton", help="which to compare")
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and stop")
    parser.add_argument("--peers-dir", type=Path, default=setup.default_dir(), help="default: %(default)s")
    parser.add_argument("--peer-python", type=Path, help="the interpreter for Triton's environment")
    return parser.parse_args()


def plan_of(args: argparse.Namespace) -> slices.Plan:
    plan = QUICK if args.quick else FULL
    if args.concurrency:
        plan = replace(plan, concurrencies=tuple(int(one) for one in args.concurrency.split(",")))
    if args.rounds:
        plan = replace(plan, rounds=args.rounds, max_rounds=3 * args.rounds)
    return plan


def choose(args: argparse.Namespace, folder: Path, model: Path) -> list[Recipe]:
    """The servers asked for, less the peers that are not set up here; each of those is named."""
    wanted = set(args.servers.split(","))
    absent = wanted & set(setup.missing(args.peers_dir))
    for peer in sorted(absent):
        tell(f"{peer} is left out, it is not set up in {args.peers_dir}: python {sys.argv[0]} --setup")
    wanted -= absent
    chosen: list[Recipe] = []
    if "carpool" in wanted:
        chosen.append(recipes.carpool(folder, model, args.frontends))
    if "fastapi" in wanted:
        chosen.append(recipes.fastapi(args.peers_dir, model, args.peer_delay_ms))
    if "triton" in wanted:
        chosen.extend(recipes.triton(folder, args.peers_dir, model, args.peer_delay_ms))
    return chosen


@contextlib.contextmanager
def running(chosen: list[Recipe], folder: Path, expected: np.ndarray) -> Iterator[list[Server]]:
    """All servers up and answering; stopped again whatever happens."""
    servers: list[Server] = []
    try:
        for recipe in chosen:
            servers.append(Server(recipe, folder))  # noqa: PERF401  (started ones are stopped below)
        for server in servers:
            server.wait_ready(expected)
        yield servers
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.wait_stopped()


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ServerError, setup.SetupError, wrk.LoadError) as error:
        sys.exit(f"overhead: {error}")
