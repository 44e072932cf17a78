"""Triton's own clients and its load generator against a Carpool server that is started here; the long tests.

Every method of tritonclient's four Python clients is called, and what comes back is held against the table;
then perf_analyzer makes load over HTTP and gRPC in each of its ways; then the tests that are marked
`conformance` run, which take too long for `make test`; some of them need an MLflow server, Ray, or balancers
and what checks manifests, which are fetched for them; then each extension is removed by itself, by
tools/without.py. Exit status 1 if anything differs.

    make conformance                        all of it
    make conformance ARGS=--ci              what comes out the same each time, and fetches nothing
    make conformance ARGS=--json            one document instead of tables; --markdown: tables for a page
    make conformance ARGS='--only calls'    or --only load, --only tests, --only extensions
    make conformance ARGS='--examples PATH' Triton's client examples in that folder, and nothing else
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tritonclient.utils import InferenceServerException

from carpool import __version__
from conformance import (
    api_clients_venv,
    environment,
    examples,
    fleet_engines,
    mlflow_venv,
    perf_analyzer,
    ray_venv,
    s3_servers,
    sahi_venv,
    tool_sources,
    trocr_models,
)
from conformance.flavours import Flavour
from conformance.runs import Run, every_run
from conformance.servers import outcome, running
from conformance.show import (
    CallRow,
    Got,
    RunRow,
    as_document,
    as_markdown,
    calls_table,
    examples_markdown,
    examples_table,
    runs_table,
)
from conformance.table import Case, Server, every_case, missing
from later import THOROUGH
from live.server import Live

LIMIT_S = 540.0  # for the calls and the load: what is not done by then counts as failed
TESTS_LIMIT_S = 3000  # on two slow cores
_TOO_LATE = 124  # what `timeout` ends with
ROOT = Path(__file__).parents[2]
FOLDER = environment.FOLDER
_WIDTH = 180  # where there is no terminal to ask
_TELL = Console(stderr=True)


def main() -> int:
    arguments = _arguments()
    give_up = time.monotonic() + LIMIT_S
    if arguments.examples is not None:
        return _examples(arguments.examples, arguments.format, give_up)
    wanted = _wanted(arguments)
    bad = 0
    if wanted & {"calls", "load"}:
        calls, runs = _asked(wanted, give_up)
        _show(calls, runs, arguments.format)
        bad = _verdict(calls, runs)
    if "tests" in wanted:
        bad = _long_tests(fetch=not arguments.ci) or bad
    if "extensions" in wanted:
        command = [sys.executable, str(ROOT / "tools" / "without.py"), "--all"]
        bad = subprocess.run(command, stdout=sys.stderr, check=False).returncode or bad
    return bad


def _wanted(arguments: argparse.Namespace) -> set[str]:
    if arguments.only is not None:
        return {arguments.only}
    return {"calls", "tests"} if arguments.ci else {"calls", "load", "tests", "extensions"}


def _asked(wanted: set[str], give_up: float) -> tuple[list[CallRow], list[RunRow]]:
    """What the clients and perf_analyzer got."""
    calls: list[CallRow] = []
    runs: list[RunRow] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="carpool-conformance-")))
        if "load" in wanted:
            _TELL.print("perf_analyzer: looking for it, or fetching it …")
            binary = perf_analyzer.install(FOLDER)
        _TELL.print("Starting servers …")
        opened = stack.enter_context(running(Server.OPEN, folder / "open"))
        if "calls" in wanted:
            plain = stack.enter_context(running(Server.PLAIN, folder / "plain"))
            runner = stack.enter_context(asyncio.Runner())
            calls = _every_call({Server.OPEN: opened, Server.PLAIN: plain}, runner, give_up)
        if "load" in wanted:
            runs = _every_run(binary, opened, folder, give_up)
    return calls, runs


def _long_tests(*, fetch: bool) -> int:
    """Those of `make test` that take examples run again, with more of them.

    One process for each core; what they say goes to standard error, which leaves the other for tables.
    """
    jobs = str(len(os.sched_getaffinity(0)))
    marked = "conformance or hypothesis" if fetch else "(conformance or hypothesis) and not exhaustive"
    command = ["timeout", "--signal=INT", "--kill-after=60", str(TESTS_LIMIT_S)]  # it then says what failed
    command += [sys.executable, "-m", "pytest", "-m", marked, "-n", jobs, "--dist", "worksteal"]
    given = os.environ | {THOROUGH: "1"}
    without_sources = ""
    if fetch:
        _TELL.print(
            "Clients of other tools, sahi, MLflow, Ray, transformers, balancers, kubectl, promtool, "
            "S3 servers: looking for them, or fetching them …"
        )
        given[api_clients_venv.VARIABLE] = str(api_clients_venv.install())
        try:
            given[tool_sources.VARIABLE] = str(tool_sources.install())
        except OSError as error:  # their host is none of the package index
            given.pop(tool_sources.VARIABLE, None)
            without_sources = f"NOT RUN: tests with the code of Frigate, CVAT and Label Studio: {error}"
            _TELL.print(without_sources, markup=False)
        given[mlflow_venv.VARIABLE] = str(mlflow_venv.install())
        given[fleet_engines.VARIABLE] = str(fleet_engines.install())
        given[ray_venv.VARIABLE] = str(ray_venv.install())
        given[sahi_venv.VARIABLE] = str(sahi_venv.install())
        given[s3_servers.VARIABLE] = str(s3_servers.install())
        given[trocr_models.VARIABLE] = str(trocr_models.install())
    else:
        _TELL.print(
            "--ci: without the tests that need an MLflow server, Ray or balancers, and without what is "
            "exhaustive: make conformance runs them"
        )
    done = subprocess.run(command, cwd=ROOT, env=given, stdout=sys.stderr, check=False)
    if done.returncode == _TOO_LATE:
        _TELL.print(f"the long tests took more than {TESTS_LIMIT_S} s")
    if without_sources:
        _TELL.print(without_sources, markup=False)
    return int(done.returncode != 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="one document")
    parser.add_argument(
        "--markdown", dest="format", action="store_const", const="markdown", help="for a page"
    )
    parser.add_argument(
        "--examples",
        type=Path,
        metavar="PATH",
        help="run src/python/examples of a checkout of Triton's client",
    )
    parser.add_argument("--ci", action="store_true", help="only what comes out the same each time")
    parts = ("calls", "load", "tests", "extensions")
    parser.add_argument(
        "--only",
        choices=parts,
        help="the clients' calls, perf_analyzer, the long tests, or removing extensions",
    )
    return parser.parse_args()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """On standard error: standard output can be piped."""
    text = TextColumn("{task.description:<70.70}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_TELL, transient=True) as progress:
        progress.add_task("", total=total)
        yield progress


# ---- the calls


def _every_call(servers: dict[Server, Live], runner: asyncio.Runner, give_up: float) -> list[CallRow]:
    rows = []
    cases = every_case()
    with _progress(len(cases)) as progress:
        for case in cases:
            progress.update(progress.task_ids[0], description=case.name.replace("[", "\\["))
            flavours = [flavour for flavour in Flavour if flavour in case.flavours]
            server = servers[case.server]
            got = {flavour: _call(case, server, flavour, runner, give_up) for flavour in flavours}
            rows.append(CallRow(case, got))
            progress.advance(progress.task_ids[0])
    return rows


def _call(case: Case, server: Live, flavour: Flavour, runner: asyncio.Runner, give_up: float) -> Got:
    if time.monotonic() > give_up:
        return Got(False, "no time was left for it")
    try:
        return Got(True, outcome(case, server, flavour, runner))
    except (AssertionError, InferenceServerException, OSError, KeyError, ValueError, TimeoutError) as error:
        return Got(False, f"{type(error).__name__}: {error}")


# ---- the load


def _every_run(binary: Path, server: Live, folder: Path, give_up: float) -> list[RunRow]:
    rows = []
    runs = every_run()
    with _progress(len(runs)) as progress:
        for number, run in enumerate(runs):
            description = f"perf_analyzer: {run.protocol} {run.model}, {run.what}"
            progress.update(progress.task_ids[0], description=description)
            rows.append(_run(binary, run, server, folder / f"report-{number}.csv", give_up))
            progress.advance(progress.task_ids[0])
    return rows


def _run(binary: Path, run: Run, server: Live, report: Path, give_up: float) -> RunRow:
    if time.monotonic() > give_up:
        return RunRow(run, (), "no time was left for it")
    try:
        return RunRow(run, perf_analyzer.run(binary, run.arguments(server), report))
    except perf_analyzer.RunError as error:
        return RunRow(run, (), str(error))


# ---- the examples


def _examples(folder: Path, form: str | None, give_up: float) -> int:
    found = examples.find(folder)
    rows: list[examples.ExampleRow] = []
    with TemporaryDirectory(prefix="carpool-examples-") as place, _progress(len(found)) as progress:
        for row in examples.run_examples(found, Path(place), give_up):
            progress.update(progress.task_ids[0], description=row.name, advance=1)
            rows.append(row)
    rows.sort(key=lambda row: row.name)
    if form == "json":
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n")
    elif form == "markdown":
        sys.stdout.write(examples_markdown(rows))
    else:
        (Console() if sys.stdout.isatty() else Console(width=_WIDTH)).print(examples_table(rows))
    bad = [row for row in rows if not row.good]
    _TELL.print(f"{len(rows) - len(bad)} of {len(rows)} examples as documented")
    return 1 if bad else 0


# ---- the report


def _show(calls: Sequence[CallRow], runs: Sequence[RunRow], form: str | None) -> None:
    if form == "json":
        document = as_document(calls, runs, _about())
        sys.stdout.write(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    elif form == "markdown":
        sys.stdout.write(as_markdown(calls, runs))
    else:
        _show_tables(calls, runs)


def _show_tables(calls: Sequence[CallRow], runs: Sequence[RunRow]) -> None:
    out = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    for name, value in _about().items():
        out.print(f"{name:<14} {value}", highlight=False)
    if calls:
        out.print(calls_table(calls))
    if runs:
        out.print(runs_table(runs))


def _about() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "carpool": __version__,
        "tritonclient": importlib.metadata.version("tritonclient"),
        "perf_analyzer": f"of {perf_analyzer.CLIENT}",
        "processor": f"{os.cpu_count()} × {names[0] if names else 'unknown'}",
        "date": datetime.now(UTC).date().isoformat(),
    }


def _verdict(calls: Sequence[CallRow], runs: Sequence[RunRow]) -> int:
    """The summary, on standard error, and the exit status."""
    answers = [(row, flavour, got) for row in calls for flavour, got in row.got.items()]
    bad_calls = [(row, flavour, got) for row, flavour, got in answers if not got.good]
    bad_runs = [row for row in runs if row.error]
    absent = {flavour: missing(flavour) for flavour in Flavour} if calls else {}
    for row, flavour, got in bad_calls:
        _TELL.print(f"NOT AS DOCUMENTED  {flavour.value} {row.case.name}\n    {got.said}", markup=False)
    for run in bad_runs:
        _TELL.print(
            f"FAILED  {run.run.protocol} {run.run.model} {run.run.what}\n    {run.error}", markup=False
        )
    for flavour, methods in absent.items():
        if methods:
            _TELL.print(f"NOT IN THE TABLE  {flavour.value}: {', '.join(sorted(methods))}", markup=False)
    if calls:
        _TELL.print(f"{len(answers) - len(bad_calls)} of {len(answers)} calls as documented")
    if runs:
        _TELL.print(f"{len(runs) - len(bad_runs)} of {len(runs)} runs of perf_analyzer completed")
    return 1 if bad_calls or bad_runs or any(absent.values()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except perf_analyzer.SetupError as error:
        sys.exit(f"conformance: {error}\n(make conformance ARGS='--only calls' does without perf_analyzer)")
