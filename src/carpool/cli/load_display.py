"""A run while it goes on, for whoever watches stderr, and when it is over, on stdout."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from carpool.cli import show
from carpool.lab.load.tally import Slice, Spread

if TYPE_CHECKING:
    from carpool.lab.load.load_report import Counts, LoadReport

_WINDOW_S = 5.0  # what is shown is of the last seconds
_LINE_EVERY_S = 5.0  # where nobody watches a terminal

_COUNTED = ("offered", "answered", "refused", "failed")
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

Watch = Callable[[float, Slice], None]


class Window:
    """The last seconds of a run, put together from what its processes tell. Told the time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Slice]] = deque()
        self.elapsed = 0.0
        self.p99_ms = 0.0

    def add(self, elapsed: float, seen: Slice) -> None:
        self._seen.append((elapsed, seen))
        self.elapsed = max(self.elapsed, elapsed)
        while self._seen[0][0] <= self.elapsed - _WINDOW_S:
            self._seen.popleft()

    def facts(self, slo_ms: float | None) -> dict[str, str]:
        total = Slice()
        for _, seen in self._seen:
            total.merge(seen)
        seconds = max(min(self.elapsed, _WINDOW_S), 1e-3)
        counted = {name: f"{getattr(total, name) / seconds:,.0f}/s" for name in _COUNTED}
        percentiles = [seconds * 1e3 for seconds in total.response.percentiles(_SHARES.values())]
        self.p99_ms = percentiles[-1]
        found = {name: counted.pop(name) for name in ("offered", "answered")}
        found |= {name: f"{ms:,.1f} ms" for name, ms in zip(_SHARES, percentiles, strict=True)}
        if slo_ms is not None and total.offered:
            ended = total.answered + total.refused + total.failed
            found[f"within {slo_ms:g} ms"] = show.percent(total.good / ended) if ended else "–"
        return found | counted


def line(window: Window, slo_ms: float | None) -> str:
    """The window in one line."""
    facts = (f"{label} {fact}" for label, fact in window.facts(slo_ms).items())
    return "  ".join((f"{window.elapsed:.0f} s", *facts))


@contextmanager
def progress(total_s: float | None, slo_ms: float | None) -> Iterator[Watch]:
    """Call what it yields with what happened; it draws in a terminal and writes lines elsewhere."""
    window = Window()
    if not sys.stderr.isatty():
        yield _lines(window, slo_ms)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def watch(elapsed: float, seen: Slice) -> None:
            window.add(elapsed, seen)
            table = Table(box=None, show_header=False, pad_edge=False)
            if total_s is not None:
                done = min(window.elapsed, total_s)
                bar = ProgressBar(total_s, done, width=30)
                table.add_row("progress", bar, f"{total_s - done:.0f} s left")
            for label, fact in window.facts(slo_ms).items():
                late = label == "p99" and slo_ms is not None and window.p99_ms > slo_ms
                table.add_row(label, fact, style="red" if late else "")
            live.update(table, refresh=True)

        yield watch


def _lines(window: Window, slo_ms: float | None) -> Watch:
    last = time.monotonic()

    def watch(elapsed: float, seen: Slice) -> None:
        nonlocal last
        window.add(elapsed, seen)
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            print(line(window, slo_ms), file=sys.stderr, flush=True)

    return watch


# ---- the end


def show_report(report: LoadReport) -> None:
    g = report.generator
    early = ", ended early" if report.stopped_early else ""
    show.paragraph(f"{report.target}: {report.loop} loop, {report.total.seconds:g} s{early}.")
    columns = [report.total] if len(report.phases) == 1 else [*report.phases, report.total]
    titles = ["", *(" " if len(columns) == 1 else counts.name for counts in columns)]
    rows = [(label, *cells) for label, cells in _rows(columns, report.slo_ms)]
    show.table(titles, rows, left=("",))
    show.paragraph(
        f"The generator used {100 * g.busiest_core_share:.0f} % of a core, "
        f"{g.processor_us_per_request:.0f} µs for a request, {g.connections} connections; "
        f"p99 of its lag was {g.send_lag_ms.p99:.1f} ms.",
        "· ",
    )
    for reason in report.late_because:
        show.paragraph(f"Doubt these numbers: {reason}.", "! ")


def _rows(columns: list[Counts], slo_ms: float | None) -> Iterator[tuple[str, list[str]]]:
    def row(label: str, of: Callable[[Counts], str]) -> tuple[str, list[str]]:
        return label, [of(counts) for counts in columns]

    yield row("offered", lambda c: f"{c.offered:,}  ({c.offered_rps:,.1f}/s)")
    yield row("answered", lambda c: f"{c.answered:,}  ({c.answered_rps:,.1f}/s)")
    if slo_ms is not None:
        yield row(f"… within {slo_ms:g} ms (goodput)", lambda c: f"{c.good:,}  ({c.goodput_rps:,.1f}/s)")
        yield row("… of offered (attainment)", lambda c: show.percent(c.attainment))
    for kind in ("refused", "failed"):
        for reason in sorted({reason for counts in columns for reason in getattr(counts, kind)}):
            yield f"{kind}: {reason}", [f"{getattr(counts, kind).get(reason, 0):,}" for counts in columns]
    for label, name in (("given up by this client", "timed_out"), ("unanswered at the end", "unanswered")):
        if any(getattr(counts, name) for counts in columns):
            yield label, [f"{getattr(counts, name):,}" for counts in columns]
    yield row("response p50 / p95", lambda c: _pair(c.response_ms, "p50", "p95"))
    yield row("response p99 / p99.9", lambda c: _pair(c.response_ms, "p99", "p99_9"))
    yield row("response max", lambda c: f"{c.response_ms.max:,.1f} ms")
    yield row("service p50 / p99", lambda c: _pair(c.service_ms, "p50", "p99"))
    if any(counts.refusal_ms.count for counts in columns):
        yield row("refusal p50 / p99", lambda c: _pair(c.refusal_ms, "p50", "p99"))
    if any(counts.batch.count for counts in columns):
        yield row("batch mean / p99", lambda c: f"{c.batch.mean:.1f} / {round(c.batch.p99)}")
        yield row("queue p50 / p99", lambda c: _pair(c.queue_ms, "p50", "p99"))
        yield row("infer p50 / p99", lambda c: _pair(c.infer_ms, "p50", "p99"))
    if any(counts.outside_ms.count for counts in columns):
        yield row("outside p50 / p99", lambda c: _pair(c.outside_ms, "p50", "p99"))


def _pair(spread: Spread, first: str, second: str) -> str:
    return f"{getattr(spread, first):,.1f} / {getattr(spread, second):,.1f} ms"
