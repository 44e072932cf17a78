"""Writes what a sweep leaves behind: charts as PNG and SVG, and one HTML page without script or network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from carpool.core.numerals import numeral
from carpool.errors import InvalidInput
from carpool.lab.plots import FAINT, INK, beside_capacity, beside_level, figure
from carpool.lab.sweep.sweep_results import PointRow, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0b7a75", "#d1603d", "#c99012", "#6a4c93", "#3a6ea5", "#b5446e", "#7a5c3e", "#75757f")
PAPER = "#fefefe"
_THEMED = {  # what Matplotlib writes, and its name in the style sheet, which has the colours by night as well
    INK: "--ink",
    PAPER: "--paper",
    FAINT: "--faint",
    "#e6eaee": "--grid",
    **{colour: f"--c{number}" for number, colour in enumerate(PALETTE)},
}
_LOADS_SHOWN = 3
_AROUND_SLO = 3  # times above and below it are shown at least
_FEW_POINTS = 8
_REASONS = 3  # why runs were void: the rest would say the same with other numbers
_STYLE = (Path(__file__).parent / "sweep_report.css").read_text("utf-8")
_PAGE = Template((Path(__file__).parent / "sweep_report.html").read_text("utf-8"))

Draw = Callable[[list["Axes"], Results], None]
Place = Callable[[PointRow], tuple[float, float]]


def check_drawing() -> None:
    """Say so before the minutes of work, not after them."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidInput("the report needs matplotlib: pip install 'carpool[plot]'") from None


def write_report(results: Results, folder: Path) -> Path:
    """The page; everything else lies beside it, but it needs none of that."""
    found = folder / "report.html"
    try:
        document = json.dumps(results.as_json(), indent=1, ensure_ascii=False)
        (folder / "results.json").write_text(document, "utf-8")
        found.write_text(page(results, draw_charts(results, folder)), "utf-8")
    except OSError as error:
        raise InvalidInput(f"--out: cannot write to {folder}: {error.strerror or error}") from None
    return found


# ---- the page


def page(results: Results, charts: Mapping[str, str]) -> str:
    """`charts` are SVG documents by name, as Matplotlib writes them."""
    many = "setting" if len(results.settings) == 1 else "settings"
    instances = "1 instance" if results.instances == 1 else f"{results.instances} instances"
    void = sorted({reason for run in results.runs for reason in run.void})
    reasons = [("void because", reason) for reason in void[:_REASONS]]
    if len(void) > _REASONS:
        reasons.append(("", f"and {len(void) - _REASONS} more like these"))
    texts = {
        "model": results.model,
        "lead": f"{len(results.runs)} runs of {results.seconds:g} s each, {len(results.settings)} {many}, "
        f"SLO {results.slo_ms:g} ms, {results.date}.",
        "noise": results.noise_words(),
        "command": results.command,
        "asked": f"{results.target}; {results.requests}; arrivals at random times (Poisson)",
        "machine": results.machine,
        "date": results.date,
        "versions": ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        "curve": f"{results.curve} (batch:ms, {results.curve_from}), {instances}",
        "capacity": f"{numeral(results.capacity_rps)}/s within {results.slo_ms:g} ms: load 1",
    }
    drawings = {
        name.replace("-", "_"): themed(charts[name], title) if name in charts else ""
        for name, (title, _, _) in _CHARTS.items()
    }
    return _PAGE.substitute(
        drawings,
        **{name: escape(text) for name, text in texts.items()},
        style=_STYLE,
        findings="".join(f"<li>{escape(sentence)}</li>" for sentence in results.words()),
        titles="".join(f"<th>{escape(title)}</th>" for title in results.cells(results.rows[0])),
        points="".join(_row(results, row) for row in results.rows),
        reasons="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in reasons),
    )


def themed(svg: str, title: str) -> str:
    """The drawing alone, without its background, in colours that follow the reader's."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"fill: #ffffff(; opacity: 0\.\d+)?", "fill: none", drawing)
    for colour, name in _THEMED.items():
        drawing = drawing.replace(colour, f"var({name})")
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _row(results: Results, row: PointRow) -> str:
    """Figures stay on one line; reasons may take several."""
    best = results.is_best(row)
    kind = "void" if row.void else "best" if best else ""
    void = "void" if row.void else f"{row.void_runs} of {row.runs} void" if row.void_runs else ""
    marks = "".join(f"<b>{mark}</b>" for mark in ("best" if best else "", void) if mark)
    name, *cells = map(escape, results.cells(row).values())
    dot = f'<span class="dot" style="background:var({_THEMED[colour(results, row.setting)]})"></span>'
    rest = "".join(f"<td{' class=words' if ' ' in cell[8:] else ''}>{cell}</td>" for cell in cells)
    return f'<tr class="{kind}"><td>{dot}{name}{marks}</td>{rest}</tr>'


# ---- the charts


def draw_charts(results: Results, folder: Path) -> dict[str, str]:
    """Draws all of them; returns the SVG documents by the name of the chart."""
    panels = max(1, len(shown_rates(results)))
    found = {}
    for name, (_, draw, height) in _CHARTS.items():
        split = draw in (_latency, _batches)
        columns, width = (panels, 2.4 + 3.0 * panels) if split else (1, 7.6)
        for suffix in (".png", ".svg"):
            with figure(folder / (name + suffix), columns, width, height) as axes:
                draw(axes, results)
        found[name] = (folder / f"{name}.svg").read_text("utf-8")
    return found


def colour(results: Results, setting: str) -> str:
    """The promise has the first colour; settings keep theirs through all charts."""
    return PALETTE[results.names.index(setting) % len(PALETTE)]


def shown_rates(results: Results) -> list[float]:
    """Returns, for charts with room for a few, the lowest rate, the one nearest to 0.9 of capacity, the
    highest."""
    rates = sorted({row.rate for row in results.rows})
    if len(rates) <= _LOADS_SHOWN:
        return rates
    middle = min(rates[1:-1], key=lambda rate: abs(rate - 0.9 * results.capacity_rps))
    return [rates[0], middle, rates[-1]]


def _plain(text: str) -> str:
    """Matplotlib reads formulas between dollars."""
    return text.replace("$", r"\$")


def _operating_curve(axes: list[Axes], results: Results) -> None:
    """Draws goodput against p99."""
    (ax,) = axes
    answered = [row for row in results.rows if row.answered]
    _measured(ax, results, answered, lambda row: (row.goodput_rps, row.p99_ms))
    ax.set_yscale("log")
    low, high = ax.get_ylim()  # a few points alone would have no number beside them
    ax.set_ylim(min(low, results.slo_ms / _AROUND_SLO), max(high, results.slo_ms * _AROUND_SLO))
    _plain_numbers(ax)
    _name_rates(ax, results)
    ax.axhline(results.slo_ms, color=INK, linestyle="--", linewidth=1.4, gid="operating-curve-slo")
    beside_level(ax, f"SLO {results.slo_ms:g} ms", results.slo_ms, left=True)
    _ring_best(ax, results)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"answered within {results.slo_ms:g} ms, per second (goodput)")
    ax.set_ylabel("p99 of responses, ms")
    ax.set_title(_plain(f"{results.model}: operating curve"))
    _legend(ax, len(results.names))


def _measured(ax: Axes, results: Results, rows: Sequence[PointRow], point: Place) -> None:
    """Draws each setting's points: a line through those that count, hollow ones where the generator was
    late."""
    for name in results.names:
        shade = colour(results, name)
        valid = [point(row) for row in rows if row.setting == name and not row.void]
        late = [point(row) for row in rows if row.setting == name and row.void]
        ax.plot(*_columns(valid), color=shade, marker="o", markersize=5, label=_plain(name))
        ax.plot(*_columns(late), "o", markersize=6, markerfacecolor="none", color=shade)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _name_rates(ax: Axes, results: Results) -> None:
    """Where points are few, what was offered at each; among many the line shows the way."""
    if len(results.rows) > _FEW_POINTS:
        return
    for row in results.rows:
        if row.answered:
            words, place = f"{numeral(row.rate)}/s offered", (row.goodput_rps, row.p99_ms)
            ax.annotate(words, place, xytext=(7, 5), textcoords="offset points", color=INK, fontsize=8)


def _ring_best(ax: Axes, results: Results) -> None:
    """Each setting's best point has a ring, and the best of all its numbers."""
    found = [row for row in results.rows if results.is_best(row)]
    chosen = max(found, key=lambda row: row.goodput_rps, default=None)
    for row in found:
        at, shade = ([row.goodput_rps], [row.p99_ms]), colour(results, row.setting)
        (ring,) = ax.plot(*at, "o", markersize=13, markerfacecolor="none", markeredgewidth=1.6, color=shade)
        ring.set_gid("chosen-point" if row is chosen else None)
    if chosen is not None:
        left = chosen.goodput_rps > 0.5 * ax.get_xlim()[1]
        ax.annotate(
            f"{numeral(chosen.goodput_rps)}/s, p99 {numeral(chosen.p99_ms)} ms",
            (chosen.goodput_rps, chosen.p99_ms),
            xytext=(-12 if left else 12, -20),
            textcoords="offset points",
            ha="right" if left else "left",
            color=INK,
            fontweight="bold",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.85},
        )


def _plain_numbers(ax: Axes) -> None:
    """Writes milliseconds as people write them, also between the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_ylim()
    steps = (1.0, 2.0, 5.0) if high / max(low, 1e-9) < 300 else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=steps))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(ax: Axes, entries: int) -> None:
    """Draws a legend below the picture, where it hides nothing."""
    columns = 3 if entries > 4 else max(1, entries)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, fontsize=9)


def _goodput(axes: list[Axes], results: Results) -> None:
    """Draws goodput against the offered rate, with the prediction."""
    (ax,) = axes
    top = max([row.offered_rps for row in results.rows] + [one.offered_rps for one in results.prediction])
    ax.plot([0, top], [0, top], color=FAINT, linestyle=":", linewidth=1.4, label="all requests offered")
    for number, name in enumerate(results.names):
        expected = sorted(
            (one.offered_rps, one.goodput_rps) for one in results.prediction if one.setting == name
        )
        (line,) = ax.plot(*_columns(expected), color=colour(results, name), linestyle="--", linewidth=1.3)
        line.set_gid(f"prediction-{number}")
    _measured(ax, results, results.rows, lambda row: (row.offered_rps, row.goodput_rps))
    ax.plot([], [], color=INK, linestyle="--", linewidth=1.3, label="as carpool plan predicts")
    if 0 < results.capacity_rps < top:
        ax.axvline(results.capacity_rps, color=FAINT, linewidth=1)
        beside_capacity(ax, f"planned capacity {numeral(results.capacity_rps)}/s", results.capacity_rps)
    ax.set_xlim(0, 1.02 * top)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("offered, per second")
    ax.set_ylabel("within the SLO, per second")
    ax.set_title(_plain(f"{results.model}: answered within {results.slo_ms:g} ms"))
    _legend(ax, len(results.names) + 2)


def _latency(axes: list[Axes], results: Results) -> None:
    """Draws, at a few rates, what was answered within so many ms, as a share of what was offered."""
    top = 2.5 * results.slo_ms
    shares = [share / 200 for share in range(1, 201)]
    for ax, rate in zip(axes, shown_rates(results), strict=True):
        for row in (row for row in results.rows if row.rate == rate):
            reached = row.answered / max(row.offered, 1)  # who was refused never gets there
            times = [seconds * 1e3 for seconds in row.response.percentiles(shares)] if row.answered else []
            xs, ys = [0.0, *times], [0.0, *(100 * reached * share for share in shares[: len(times)])]
            xs, ys = [*xs, max(top, xs[-1])], [*ys, ys[-1]]
            shade, style = colour(results, row.setting), ":" if row.void else "-"
            ax.step(xs, ys, where="post", color=shade, linestyle=style, label=_plain(row.setting))
        ax.axvline(results.slo_ms, color=INK, linestyle="--", linewidth=1.2)
        ax.set_xlim(0, top)
        ax.set_ylim(0, 103)
    _name_panels(axes, results, "ms", "% of offered requests")


def _batches(axes: list[Axes], results: Results) -> None:
    """Draws, at a few rates, how many answers rode in batches of which size."""
    rows = results.rows
    sizes = sorted({size for row in rows for size in row.batches})
    place = {size: number for number, size in enumerate(sizes)}
    width = 0.84 / len(results.names)
    shown = sizes[:: len(sizes) // 12 + 1]
    for ax, rate in zip(axes, shown_rates(results), strict=True):
        for row in (row for row in rows if row.rate == rate):
            number = results.names.index(row.setting)
            total = max(1, sum(row.batches.values()))
            at = [place[size] + (number - (len(results.names) - 1) / 2) * width for size in row.batches]
            heights = [100 * count / total for count in row.batches.values()]
            ax.bar(at, heights, width, color=colour(results, row.setting), label=_plain(row.setting))
        ax.set_xticks([place[size] for size in shown], [str(size) for size in shown])
        ax.set_xlim(-0.6, max(len(sizes), 1) - 0.4)
        ax.grid(visible=False, axis="x")
    _name_panels(axes, results, "images per batch", "% of answers")


def _name_panels(axes: list[Axes], results: Results, below: str, beside: str) -> None:
    """Names each by its rate, with one legend for all of them."""
    loads = {row.rate: row.load for row in results.rows}
    for ax, rate in zip(axes, shown_rates(results), strict=True):
        load = loads[rate]
        ax.set_title(f"{numeral(rate)}/s" if load is None else f"load {load:g} ({numeral(rate)}/s)")
        ax.set_xlabel(below)
    axes[0].set_ylabel(beside)
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(len(results.names), 4)
    axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


_CHARTS: dict[str, tuple[str, Draw, float]] = {  # its title, and how high it is
    "operating-curve": ("Operating curve", _operating_curve, 4.6),
    "goodput": ("Goodput and its prediction", _goodput, 4.2),
    "latency": ("Latency of responses", _latency, 3.5),
    "batches": ("Batch sizes", _batches, 3.3),
}
