"""The tables of `make conformance`: for a terminal, for a page and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from conformance.examples import EXAMPLE_HEADS, ExampleRow, example_cells
from conformance.flavours import Flavour
from conformance.perf_analyzer import Point
from conformance.runs import Run
from conformance.table import Case, Server

_GOT_CHARS = 90
_TEXTS = 3  # columns of the second table that are not numbers


@dataclass(frozen=True)
class Got:
    """What came of a call with one client."""

    good: bool
    said: str


@dataclass
class CallRow:
    case: Case
    got: dict[Flavour, Got]

    @property
    def good(self) -> bool:
        return all(one.good for one in self.got.values())

    @property
    def said(self) -> str:
        """One text where all agree, as they mostly do; failures come first."""
        bad = [one.said for one in self.got.values() if not one.good]
        return (bad or [one.said for one in self.got.values()])[0]


@dataclass(frozen=True)
class RunRow:
    run: Run
    points: Sequence[Point]
    error: str = ""


CALL_HEADS = ("call", "with", "should", *(flavour.value for flavour in Flavour), "what came back")
RUN_HEADS = ("protocol", "model", "run", "load", "infer/s", "p99", "queue", "input", "infer", "output")


def call_cells(row: CallRow) -> list[str]:
    what = row.case.what + (" (default settings)" if row.case.server is Server.PLAIN else "")
    said = _short(row.said) if row.good else row.said
    return [row.case.method, what, row.case.outcome, *(_mark(row, one) for one in Flavour), said]


def _mark(row: CallRow, flavour: Flavour) -> str:
    got = row.got.get(flavour)
    if got is None:
        return "–"
    return "✓" if got.good else "NO"


def _short(text: str) -> str:
    return text if len(text) <= _GOT_CHARS else text[: _GOT_CHARS - 1] + "…"


def run_cells(row: RunRow) -> list[list[str]]:
    """A line for each load of the run."""
    head = [row.run.protocol, row.run.model, row.run.what]
    if row.error:
        return [[*head, "FAILED", *[""] * 6]]
    lines = []
    for point in row.points:
        times = (point.p99, point.queue, point.compute_input, point.compute_infer, point.compute_output)
        lines.append([*head, point.load, f"{point.per_second:,.0f}", *(f"{time:,}" for time in times)])
        head = ["", "", ""]
    return lines


def calls_table(rows: Sequence[CallRow]) -> Table:
    table = Table(title="Every method of Triton's Python clients", title_justify="left", pad_edge=False)
    for name in CALL_HEADS:
        short = name == "call" or name in {flavour.value for flavour in Flavour}
        table.add_column(name, no_wrap=short)
    for row in rows:
        table.add_row(*map(escape, call_cells(row)), style="" if row.good else "bold red")
    return table


def runs_table(rows: Sequence[RunRow]) -> Table:
    table = Table(title="perf_analyzer; times in µs", title_justify="left", pad_edge=False)
    for number, name in enumerate(RUN_HEADS):
        table.add_column(name, no_wrap=True, justify="left" if number < _TEXTS else "right")
    for row in rows:
        for line in run_cells(row):
            table.add_row(*map(escape, line), style="bold red" if row.error else "")
    return table


def examples_table(rows: Sequence[ExampleRow]) -> Table:
    table = Table(title="Triton's client examples", title_justify="left", pad_edge=False)
    for name in EXAMPLE_HEADS:
        table.add_column(name, no_wrap=name != EXAMPLE_HEADS[-1])
    for row in rows:
        table.add_row(*map(escape, example_cells(row)), style="" if row.good else "bold red")
    return table


def examples_markdown(rows: Sequence[ExampleRow]) -> str:
    return _markdown(EXAMPLE_HEADS, [example_cells(row) for row in rows], texts=len(EXAMPLE_HEADS))


def as_markdown(calls: Sequence[CallRow], runs: Sequence[RunRow]) -> str:
    parts = []
    if calls:
        parts.append(_markdown(CALL_HEADS, [call_cells(row) for row in calls], texts=len(CALL_HEADS)))
    if runs:
        lines = [line for row in runs for line in run_cells(row)]
        parts.append(_markdown(RUN_HEADS, lines, texts=_TEXTS))
    return "\n".join(parts)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], texts: int) -> str:
    """Columns from `texts` on are numbers."""
    rule = ["---" if number < texts else "--:" for number in range(len(heads))]
    rows = [[cell.replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in [list(heads), rule, *rows])


def as_document(calls: Sequence[CallRow], runs: Sequence[RunRow], about: dict[str, str]) -> dict[str, Any]:
    return {
        "about": about,
        "calls": [
            {
                "method": row.case.method,
                "with": row.case.what,
                "should": row.case.outcome,
                "server": row.case.server.value,
                "got": {flavour.value: asdict(got) for flavour, got in row.got.items()},
            }
            for row in calls
        ],
        "perf_analyzer": [
            {
                "protocol": row.run.protocol,
                "model": row.run.model,
                "run": row.run.what,
                "options": list(row.run.options),
                "points": [asdict(point) for point in row.points],
                "error": row.error,
            }
            for row in runs
        ],
    }
