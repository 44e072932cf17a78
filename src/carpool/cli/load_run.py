"""What `carpool load` does once it knows its options."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import nullcontext

import uvloop

from carpool.cli import checks, load_display, load_given, show
from carpool.cli.load_command import Load
from carpool.errors import InvalidInput
from carpool.lab.load.aim import Aim, read_url, take_aim
from carpool.lab.load.facts import Unreachable
from carpool.lab.load.generator import LostPart, Watch, run_shared, spare_the_collector
from carpool.lab.load.generator import run as run_load
from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.load.load_report import LoadReport
from carpool.lab.load.tally import Recorder

_MOST_PROCESSES = 64


def run(given: Load) -> bool:
    """Whether there was somebody to ask."""
    plan = load_given.plan(given)
    aim = load_given.aim(given)
    processes = checks.whole("--processes", given.processes, least=1, most=_MOST_PROCESSES)
    if given.concurrency is not None and given.concurrency < processes:
        raise InvalidInput(
            f"--processes {processes} are more than the clients of --concurrency {given.concurrency}",
            field="--processes",
        )
    if given.save is not None and processes > 1:
        raise InvalidInput("--save needs --processes 1: single requests are not passed on", field="--save")
    read_url(aim.url)
    try:
        with load_display.progress(_seconds(plan), given.slo_ms) as watch:
            found = uvloop.run(_load(plan, aim, given, watch))
    except (Unreachable, LostPart) as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        return False
    _show(given, found)
    return True


async def _load(plan: Plan, aim: Aim, given: Load, watch: Watch) -> LoadReport:
    """Ctrl-C ends it early and still reports; the second one does not wait for anything."""
    stop = asyncio.Event()

    def interrupted() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted)
    if given.processes > 1:
        return await run_shared(plan, aim, given.processes, watch=watch, stop=stop)
    target = take_aim(aim)
    spare_the_collector()
    with Recorder(given.save) if given.save is not None else nullcontext() as record:
        return await run_load(plan, target, watch=watch, stop=stop, record=record)


def _seconds(plan: Plan) -> float | None:
    """How long it will take, if that is known."""
    if isinstance(plan.load, Closed) and plan.load.seconds is None:
        return None
    return sum(phase.seconds for phase in plan.load.phases)


def _show(given: Load, found: LoadReport) -> None:
    if given.as_json:
        print(json.dumps(found.as_json() | {"settings": _settings(given)}, indent=2))
        return
    g = found.generator
    early = ", ended early" if found.stopped_early else ""
    show.paragraph(f"{found.target}: {found.loop} loop, {found.total.seconds:g} s{early}.")
    load_display.report(found)
    show.paragraph(
        f"The generator used {100 * g.busiest_core_share:.0f} % of a core, "
        f"{g.processor_us_per_request:.0f} µs for a request, {g.connections} connections; "
        f"p99 of its lag was {g.send_lag_ms.p99:.1f} ms.",
        "· ",
    )
    for reason in found.late_because:
        show.paragraph(f"Doubt these numbers: {reason}.", "! ")


def _settings(given: Load) -> dict[str, object]:
    """Everything that was asked for, with the defaults filled in."""
    return {
        name: [str(entry) for entry in value] if isinstance(value, list) else _plain(value)
        for name, value in vars(given).items()
        if name != "as_json"
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
