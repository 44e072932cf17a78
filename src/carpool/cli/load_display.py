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
    from rich.table import Table

    from carpool.lab.load.load_report import Counts, LoadReport

_WINDOW_S = 5.0  # what is shown is of the last seconds
_LINE_EVERY_S = 5.0  # where nobody watches a terminal

Watch = Callable[[float, Slice], None]


class Window:
    """The last seconds of a run, put together from what its processes tell. Told the time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Slice]] = deque()
        self.elapsed = 0.0

    def add(self, elapsed: float, seen: Slice) -> None:
        self._seen.append((elapsed, seen))
        self.elapsed = max(self.elapsed, elapsed)
        while self._seen[0][0] <= self.elapsed - _WINDOW_S:
            self._seen.popleft()

    def sum(self) -> tuple[float, Slice]:
        """Seconds, and what happened in them."""
        total = Slice()
        for _, seen in self._seen:
            total.merge(seen)
        return max(min(self.elapsed, _WINDOW_S), 1e-3), total


def line(window: Window, slo_ms: float | None) -> str:
    """The window in one line."""
    seconds, seen = window.sum()
    p50, p99 = (value * 1e3 for value in seen.response.percentiles((0.5, 0.99)))
    parts = [
        f"{window.elapsed:.0f} s",
        f"offered {seen.offered / seconds:,.0f}/s",
        f"answered {seen.answered / seconds:,.0f}/s",
        f"p50 {p50:,.1f} ms",
        f"p99 {p99:,.1f} ms",
    ]
    if slo_ms is not None and seen.offered:
        ended = seen.answered + seen.refused + seen.failed
        parts.append(f"within {slo_ms:g} ms {show.percent(seen.good / ended) if ended else '–'}")
    parts.append(f"refused {seen.refused / seconds:,.0f}/s")
    parts.append(f"failed {seen.failed / seconds:,.0f}/s")
    return "  ".join(parts)


@contextmanager
def progress(total_s: float | None, slo_ms: float | None) -> Iterator[Watch]:
    """Call what it yields with what happened; it draws in a terminal and writes lines elsewhere."""
    window = Window()
    if not sys.stderr.isatty():
        yield _lines(window, slo_ms)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def watch(elapsed: float, seen: Slice) -> None:
            window.add(elapsed, seen)
            live.update(_screen(window, total_s, slo_ms), refresh=True)

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


def _screen(window: Window, total_s: float | None, slo_ms: float | None) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    seconds, seen = window.sum()
    p50, p95, p99 = (value * 1e3 for value in seen.response.percentiles((0.5, 0.95, 0.99)))
    late = slo_ms is not None and p99 > slo_ms
    table = Table(box=None, show_header=False, pad_edge=False)
    if total_s is not None:
        left = max(0.0, total_s - window.elapsed)
        table.add_row(
            "progress", ProgressBar(total_s, min(window.elapsed, total_s), width=30), f"{left:.0f} s left"
        )
    table.add_row("offered", f"{seen.offered / seconds:,.0f}/s")
    table.add_row("answered", f"{seen.answered / seconds:,.0f}/s")
    slo = "" if slo_ms is None else f"of {slo_ms:g} ms"
    latency = f"p50 {p50:,.1f}  p95 {p95:,.1f}  p99 {p99:,.1f} ms"
    table.add_row("latency", f"[red]{latency}[/red]" if late else latency, slo)
    table.add_row("refused", f"{seen.refused / seconds:,.0f}/s")
    table.add_row("failed", f"{seen.failed / seconds:,.0f}/s")
    return table


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
