"""What `carpool sweep` does once it knows its options."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from datetime import datetime
from pathlib import Path

import uvloop

from carpool.cli import show, sweep_given, sweep_show
from carpool.cli.sweep_command import Sweep
from carpool.errors import InvalidInput
from carpool.lab.load.facts import Unreachable
from carpool.lab.load.generator import spare_the_collector
from carpool.lab.sweep.conduct import Audience, conduct
from carpool.lab.sweep.own_server import NoServer
from carpool.lab.sweep.sweep_order import SweepOrder
from carpool.lab.sweep.sweep_report import check_drawing, write_report
from carpool.lab.sweep.sweep_results import Results


def run(given: Sweep) -> int:
    """Returns the exit code."""
    check_drawing()
    order = sweep_given.order(given)
    folder = given.out or _folder(order)
    try:
        with sweep_show.progress() as audience:
            found = uvloop.run(_sweep(order, folder, audience))
    except (Unreachable, NoServer) as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        if (folder / "sweep.json").exists():
            print(f"What is done is kept: go on with --out {folder}", file=sys.stderr)
        return 1
    except OSError as error:
        raise InvalidInput(f"--out: {folder}: {error.strerror or error}", field="--out") from None
    except asyncio.CancelledError:
        return 130
    if found is None:
        print("carpool: stopped before the first run was over", file=sys.stderr)
        return 1
    page = write_report(found, folder)
    if given.as_json:
        print(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        _print(found, page)
    return 0


def _folder(order: SweepOrder) -> Path:
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", order.model or "server")[:64]
    return Path(f"carpool-sweep-{name}-{datetime.now():%Y%m%d-%H%M%S}")


async def _sweep(order: SweepOrder, folder: Path, audience: Audience) -> Results | None:
    """Ctrl-C ends it and still reports; the second one does not."""
    stop = asyncio.Event()
    task = asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if stop.is_set():
            task.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted)
    spare_the_collector()
    return await conduct(order, folder, audience, stop)


def _print(found: Results, page: Path) -> None:
    sweep_show.table(found)
    show.paragraph("")
    for sentence in (*found.words(), found.noise_words()):
        show.paragraph(sentence, "· ")
    show.paragraph("")
    show.paragraph(f"Report: {page}")
