"""The metrics page: Prometheus' text format 0.0.4, written by hand.

prometheus-client shares numbers between processes through files of its own; ours already lie in one table,
and only the text is missing.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from carpool.observe.columns import Histogram
from carpool.observe.counters import Cells, Table
from carpool.observe.families import FAMILIES, Family, Scope
from carpool.observe.host_facts import Host

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labelled: TypeAlias = tuple[str, Cells]


class Exposition:
    """What a scrape answers. One per process that can be scraped."""

    def __init__(
        self, table: Table, version: str, host: Host | None = None, families: Sequence[Family] = FAMILIES
    ) -> None:
        self._table = table
        self._families = families
        self._host = Host() if host is None else host
        self._build = _labels(version=version, python=platform.python_version())

    def page(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The page in parts that each take little time; all of its numbers are read for the first."""
        rows: Mapping[Scope, Sequence[_Labelled]] = {
            Scope.MODEL: [
                (_labels(model=row.model, version=row.version), row.cells) for row in self._table.models()
            ],
            Scope.SERVER: [("", self._table.server())],
            Scope.HOST: [("", self._host.read())],
            Scope.BUILD: [(self._build, ())],
        }
        for family in self._families:
            for lines in _family(family, rows[family.scope]):
                yield ("\n".join(lines) + "\n").encode()


def _family(family: Family, rows: Sequence[_Labelled]) -> Iterator[list[str]]:
    if not rows:
        return
    yield [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
    histogram = family.histogram
    if histogram is not None and family.milliseconds:
        for labels, cells in rows:
            yield list(_coarser(family.name, labels, histogram, family.milliseconds, cells))
        return
    if histogram is not None:
        ends = [f',le="{bound}"}} ' for bound in (*histogram.bounds, "+Inf")]
        for labels, cells in rows:
            yield _histogram(family.name, labels, ends, cells[histogram.buckets], cells[histogram.sum])
        return
    for labels, cells in rows:
        yield [_line(family.name, labels, more, value(cells)) for more, value in family.values.items()]


def _line(name: str, labels: str, more: str, value: float) -> str:
    both = f"{labels},{more}" if labels and more else labels or more
    series = f"{name}{{{both}}}" if both else name
    return f"{series} {_number(value)}"


def _histogram(name: str, labels: str, ends: Sequence[str], counts: Cells, total: float) -> list[str]:
    """Buckets are kept apart in the table and cumulative on the page."""
    start = f"{name}_bucket{{{labels}"
    cumulative = list(accumulate(map(int, counts)))
    return [
        *[f"{start}{end}{count}" for end, count in zip(ends, cumulative, strict=True)],
        f"{name}_sum{{{labels}}} {_number(total)}",
        f"{name}_count{{{labels}}} {cumulative[-1]}",
    ]


def _coarser(
    name: str, labels: str, histogram: Histogram, bounds_ms: Sequence[float], cells: Cells
) -> Iterator[str]:
    """A histogram in milliseconds with some of the bounds of one in seconds."""
    cumulative = list(accumulate(map(int, cells[histogram.buckets])))
    for bound in bounds_ms:
        count = cumulative[histogram.bounds.index(bound / 1e3)]
        yield f'{name}_bucket{{{labels},le="{bound:g}"}} {count}'
    yield f'{name}_bucket{{{labels},le="+Inf"}} {cumulative[-1]}'
    yield f"{name}_sum{{{labels}}} {_number(round(cells[histogram.sum] * 1e3, 3))}"
    yield f"{name}_count{{{labels}}} {cumulative[-1]}"


def _labels(**values: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
