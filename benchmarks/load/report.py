"""Medians over quiet turns, ratios within a turn, and how they are printed."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Protocol

from load.slices import Plan, Turn

HEADINGS = ("server", "protocol", "concurrency", "requests/s", "p50 ms", "p99 ms", "CPU µs/request")


class Named(Protocol):
    """What a row says about its server; settings of one server share `row`."""

    @property
    def row(self) -> str: ...

    @property
    def group(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    @property
    def setting(self) -> str: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One server, asked in one way, at one concurrency. Ratios are ours to this one's, within turns."""

    server: str
    group: str
    protocol: str
    concurrency: int
    rps: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    setting: str
    rounds: int
    rps_ratio: float | None
    cpu_ratio: float | None


def summarise(turns: Sequence[Turn], servers: Sequence[Named], ours: str) -> list[Row]:
    """Rows by group and concurrency. Quiet turns count; where there was none, all do, and `rounds` is 0."""
    rows: list[Row] = []
    for group, concurrency in _cases(turns):
        here = [turn for turn in turns if (turn.group, turn.concurrency) == (group, concurrency)]
        quiet = [turn for turn in here if turn.quiet]
        chosen = [server for server in servers if server.group == group]
        rows += _name_settings(
            [_row(concurrency, quiet or here, len(quiet), server, ours) for server in chosen]
        )
    return rows


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False)


def as_text(rows: Sequence[Row]) -> str:
    """The table, then what the ratios say."""
    lines = [HEADINGS] + [
        (
            row.server + (f" [{row.setting}]" if row.setting and row.setting not in row.server else ""),
            row.protocol,
            str(row.concurrency),
            f"{row.rps:,.0f}",
            f"{row.p50_ms:.2f}",
            f"{row.p99_ms:.2f}",
            f"{row.cpu_us:.0f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    table = [
        "  ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    return "\n".join([*table, "", *_verdicts(rows)])


def short_of_quiet(turns: Sequence[Turn], plan: Plan) -> str | None:
    """A line when the machine was too busy for the rounds that were asked for."""
    counts = {case: sum(t.quiet for t in turns if (t.group, t.concurrency) == case) for case in _cases(turns)}
    if all(count >= plan.rounds for count in counts.values()):
        return None
    found = ", ".join(f"{count} with {group} at {c}" for (group, c), count in counts.items())
    return f"the machine was busy: of {plan.rounds} quiet rounds asked for, {found}; read with care"


def _row(concurrency: int, turns: Sequence[Turn], quiet: int, server: Named, ours: str) -> Row:
    slices = [turn.slices[server.name] for turn in turns]
    pairs = [
        (t.slices[ours], t.slices[server.name]) for t in turns if ours in t.slices and server.name != ours
    ]
    return Row(
        server=server.row,
        group=server.group,
        protocol=server.protocol,
        concurrency=concurrency,
        rps=round(median(one.rps for one in slices), 1),
        p50_ms=round(median(one.p50_ms for one in slices), 3),
        p99_ms=round(median(one.p99_ms for one in slices), 3),
        cpu_us=round(median(one.cpu_us for one in slices), 1),
        setting=server.setting,
        rounds=quiet,
        rps_ratio=_median_ratio((a.rps, b.rps) for a, b in pairs),
        cpu_ratio=_median_ratio((a.cpu_us, b.cpu_us) for a, b in pairs),
    )


def _cases(turns: Sequence[Turn]) -> list[tuple[str, int]]:
    """Groups in the order they were measured, concurrencies rising."""
    groups = list(dict.fromkeys(turn.group for turn in turns))
    found = {(turn.group, turn.concurrency) for turn in turns}
    return sorted(found, key=lambda case: (groups.index(case[0]), case[1]))


def _median_ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    ratios = [a / b for a, b in pairs]
    return round(median(ratios), 3) if ratios else None


def _name_settings(group: list[Row]) -> list[Row]:
    """Of several settings of one server, the fastest carries its name; the others say which they are."""
    best: dict[str, float] = {}
    for row in group:
        best[row.server] = max(row.rps, best.get(row.server, 0.0))
    return [
        row if row.rps == best[row.server] else replace(row, server=f"{row.server} ({row.setting})")
        for row in group
    ]


def _verdicts(rows: Sequence[Row]) -> Iterable[str]:
    """Per group and concurrency: against each peer, and against the best of them in each figure."""
    for case in dict.fromkeys((row.group, row.concurrency) for row in rows):
        peers = [row for row in rows if (row.group, row.concurrency) == case and row.rps_ratio is not None]
        if not peers:
            continue
        fastest = max(peers, key=lambda row: row.rps)
        thriftiest = min(peers, key=lambda row: row.cpu_us)
        yield (
            f"{case[0]}, concurrency {case[1]}, {_basis(fastest.rounds)}: "
            f"{fastest.rps_ratio:.2f}× the requests/s of {fastest.server}, "
            f"{thriftiest.cpu_ratio:.2f}× the CPU of {thriftiest.server}"
        )
        for row in peers:
            yield f"    to {row.server}: {row.rps_ratio:.2f}× requests/s, {row.cpu_ratio:.2f}× CPU"


def _basis(quiet: int) -> str:
    return f"median of {quiet} quiet rounds" if quiet else "no quiet round, all taken"


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
