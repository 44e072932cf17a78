"""What a request costs before the model does any work: Carpool beside FastAPI, Triton and mosec.

Every server runs the same tiny ONNX model (150,528 bytes in, ten floats out, batches of at most 32), and is
asked over HTTP and gRPC, with the image in the request and in shared memory. All are up at the same time and
are loaded in short slices in turn; figures are medians over quiet rounds, ratios are taken within a round.
CPU is the user and system time of all processes of a server, per request.

    python benchmarks/overhead.py --setup             # once: the peers' own environments
    python benchmarks/overhead.py                     # the whole comparison, about eleven minutes
    python benchmarks/overhead.py --protocols http    # HTTP only, about four
    python benchmarks/overhead.py --quick             # concurrency 32, within a minute
    python benchmarks/overhead.py --tracing 12        # what spans cost, in twelve starts, about seven minutes
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from load import h2load, report, slices, wrk
from load.burst import LoadError
from load.program import run_program
from peers import recipes, region, setup, spans, tiny
from peers.server import Lane, Recipe, Server, ServerError
from peers.ways import GRPC, HTTP, WAYS_OF

FULL = slices.Plan((1, 8, 32, 64), rounds=5, max_rounds=15, seconds=2, repeats=2, patience_s=60, limit_s=1800)
QUICK = slices.Plan((32,), rounds=2, max_rounds=3, seconds=1, repeats=0, patience_s=1, limit_s=58)
TRACING = slices.Plan((32,), rounds=4, max_rounds=4, seconds=1, repeats=0, patience_s=0.6, limit_s=1800)
WARM_UP_S = 1.0
WARM_UP = (HTTP, GRPC)  # what lies in shared memory takes the same doors
STOPPING_S = 6.0


def main() -> int:
    began = time.monotonic()
    args = parse_arguments()
    if args.setup:
        setup.make(args.peers_dir, args.peer_python)
        tell(f"peers are ready in {args.peers_dir}")
        return 0
    plan = plan_of(args)
    groups = groups_of(args)
    with tempfile.TemporaryDirectory(prefix="carpool-overhead-") as name, region.filled() as image:
        job = recipes.Job(Path(name), Path(name) / "tiny.onnx", groups, image)
        wrk.find()
        if job.over_grpc:
            h2load.find()
        tiny.write_model(job.model)
        end = began + plan.limit_s - STOPPING_S
        if args.tracing:
            found = spans.differences(trace(args, plan, job, end))
            print(json.dumps([asdict(one) for one in found]) if args.json else spans.as_text(found))
            return 0
        with running(choose(args, job), job) as lanes:
            warm_up(lanes, plan)
            turns, died = measured(lanes, plan, end)
    rows = report.summarise(turns, lanes, recipes.CARPOOL)
    print(report.as_json(rows) if args.json else report.as_text(rows))
    if short := report.short_of_quiet(turns, plan):
        tell(short)
    return int(died)


def measured(lanes: list[Lane], plan: slices.Plan, end: float) -> tuple[list[slices.Turn], bool]:
    """The turns, and whether a server died in one: those before it are worth something."""
    turns: list[slices.Turn] = []
    try:
        for turn in slices.measure(lanes, plan, end, tell):
            turns.append(turn)  # noqa: PERF402  (those before what is raised)
    except (ServerError, LoadError) as error:  # a generator may see it before the server's end is seen
        if not turns:
            raise
        tell(f"{error}\nthese are the turns before that")
        return turns, True
    return turns, False


def warm_up(lanes: list[Lane], plan: slices.Plan) -> None:
    for lane in lanes:
        if lane.group in WARM_UP or lane.group == lanes[0].group:
            slices.run_slice(lane, max(plan.concurrencies), WARM_UP_S)


def trace(
    args: argparse.Namespace, plan: slices.Plan, job: recipes.Job, end: float
) -> list[list[slices.Turn]]:
    """With spans and without, all started again each time."""
    starts = []
    with spans.collector() as url:
        for number in range(args.tracing):
            folder = job.folder / f"start-{number}"
            folder.mkdir()
            again = replace(job, folder=folder)
            with running(spans.servers(again, args.frontends, url), again) as lanes:
                warm_up(lanes, plan)
                starts.append(list(slices.measure(lanes, plan, end, tell)))
    return starts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="concurrency 32 only, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--protocols", default=",".join(WAYS_OF), help="which ways to ask (%(default)s)")
    parser.add_argument("--concurrency", help="for example 32,64")
    parser.add_argument("--rounds", type=int, help="quiet rounds to collect")
    parser.add_argument(
        "--peer-delay-ms", type=float, default=0.0, help="how long the peers may hold a batch back"
    )
    parser.add_argument("--frontends", type=int, help="passed on to carpool serve; its own default otherwise")
    parser.add_argument("--instances", type=int, default=1, help="of the model in Carpool (%(default)s)")
    parser.add_argument(
        "--servers", default="carpool,fastapi,triton,mosec", help="which to compare (%(default)s); also empty"
    )
    parser.add_argument("--tracing", type=int, default=0, metavar="STARTS", help="instead: what spans cost")
    parser.add_argument("--setup", action="store_true", help="make the peers' environments and stop")
    parser.add_argument("--peers-dir", type=Path, default=setup.default_dir(), help="default: %(default)s")
    parser.add_argument("--peer-python", type=Path, help="the interpreter for Triton's environment")
    return parser.parse_args()


def plan_of(args: argparse.Namespace) -> slices.Plan:
    plan = TRACING if args.tracing else QUICK if args.quick else FULL
    if args.concurrency:
        plan = replace(plan, concurrencies=tuple(int(one) for one in args.concurrency.split(",")))
    if args.rounds:
        plan = replace(plan, rounds=args.rounds, max_rounds=(1 if args.tracing else 3) * args.rounds)
    return plan


def groups_of(args: argparse.Namespace) -> list[str]:
    wanted = args.protocols.split(",")
    if unknown := set(wanted) - set(WAYS_OF):
        raise LoadError(f"--protocols knows {', '.join(WAYS_OF)}, and not {', '.join(sorted(unknown))}")
    return [group for protocol, groups in WAYS_OF.items() if protocol in wanted for group in groups]


def choose(args: argparse.Namespace, job: recipes.Job) -> list[Recipe]:
    """The servers asked for, less the peers that are not set up here; each of those is named."""
    wanted = set(args.servers.split(","))
    absent = wanted & set(setup.missing(args.peers_dir))
    for peer in sorted(absent):
        tell(f"{peer} is left out, it is not set up in {args.peers_dir}: python {sys.argv[0]} --setup")
    wanted -= absent
    chosen: list[Recipe] = []
    if "carpool" in wanted:
        chosen.append(recipes.carpool(job, args.frontends, args.instances))
    if "fastapi" in wanted and HTTP in job.groups:
        chosen.append(recipes.fastapi(job, args.peers_dir, args.peer_delay_ms))
    if "empty" in wanted and job.over_grpc:
        chosen.append(recipes.empty_grpc(job))
    if "triton" in wanted:
        chosen.extend(recipes.triton(job, args.peers_dir, args.peer_delay_ms))
        tell("Triton runs its Python backend; its ONNX Runtime backend is in no package, and would be faster")
    if "mosec" in wanted and HTTP in job.groups:
        chosen.extend(recipes.mosec(job, args.peers_dir, args.peer_delay_ms))
    return chosen


@contextlib.contextmanager
def running(chosen: list[Recipe], job: recipes.Job) -> Iterator[list[Lane]]:
    """All servers up and answering in every way; stopped again whatever happens."""
    expected = tiny.expected(job.model)
    servers: list[Server] = []
    try:
        for recipe in chosen:
            servers.append(Server(recipe, job.folder))  # noqa: PERF401  (started ones are stopped below)
        yield [lane for server in servers for lane in server.wait_ready(expected)]
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.wait_stopped()


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main, "overhead", ServerError, setup.SetupError, LoadError)
