"""A sweep while it goes on, for whoever watches stderr, and its points when it is over, on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from carpool.cli import show
from carpool.engine.numerals import numeral
from carpool.lab.sweep.conduct import Audience
from carpool.lab.sweep.sweep_results import Results
from carpool.lab.sweep.sweep_runs import MeasuredRun

_OVERHEAD_S = 0.5  # between two runs, until it is known better


class Lines:
    """A line for every finished run, with the time that is left."""

    def __init__(
        self, write: Callable[[str], None], bar: Callable[[int, int, str], None] | None = None
    ) -> None:
        self._write = write
        self._bar = bar or (lambda _done, _total, _text: None)
        self._done = self._total = 0
        self._left = self._made = 0
        self._each = 0.0
        self._began = 0.0

    def says(self, text: str) -> None:
        self._bar(self._done, self._total, text)

    def planned(self, left: int, done: int, seconds_each: float) -> None:
        self._done, self._total, self._left = done, left + done, left
        self._each = seconds_each + _OVERHEAD_S
        self._began = time.monotonic()
        before = f" ({done} are done already)" if done else ""
        self._write(f"{left} runs{before}, about {lasting(left * self._each)}")

    def ended(self, run: MeasuredRun) -> None:
        self._done += 1
        self._left -= 1
        self._made += 1
        self._each = (time.monotonic() - self._began) / self._made
        self._write(
            f"[{self._done}/{self._total}] {run.setting} at {run.rate:.9g}/s: "
            f"{numeral(run.goodput_rps)}/s in time, p99 {run.p99_ms:,.0f} ms{', void' if run.void else ''}; "
            f"{lasting(self._left * self._each)} left"
        )
        self._bar(self._done, self._total, "")


def lasting(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextmanager
def progress() -> Iterator[Audience]:
    """With a bar in a terminal, lines alone elsewhere."""
    if not sys.stderr.isatty():
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=None)

        def bar(done: int, total: int, text: str) -> None:
            drawn.update(task, completed=done, total=total or None, description=escape(text))

        yield Lines(lambda line: drawn.console.print(line, markup=False, highlight=False), bar)


def table(found: Results) -> None:
    best = {name: found.best(name) for name in found.names}
    rows = []
    for row in found.rows:
        chosen = best[row.setting]
        predicted = found.predicted(row.setting, row.rate)
        rows.append(
            (
                row.setting,
                "–" if row.load is None else f"{row.load:g}",
                numeral(row.offered_rps, 4),
                numeral(row.goodput_rps, 4),
                "–" if predicted is None else numeral(predicted.goodput_rps, 4),
                show.percent(row.attainment),
                f"{numeral(row.p99_ms, 4)} ms",
                f"{row.mean_batch:.1f}",
                "void" if row.void else "best" if chosen is not None and chosen.rate == row.rate else "",
            )
        )
    titles = ("setting", "load", "offered/s", "in time/s", "plan/s", "in time", "p99", "batch", "")
    show.table(titles, rows, left=("setting", ""))
