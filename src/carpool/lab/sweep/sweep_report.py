"""What a sweep leaves behind: charts as PNG and SVG, and one HTML page without script or network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_LOADS_SHOWN = 3
_AROUND_SLO = 3  # times above and below it are shown at least
_FEW_POINTS = 8
_CHARTS = {
    "operating-curve": "Operating curve",
    "goodput": "Goodput and its prediction",
    "latency": "How long answers took",
    "batches": "Batch sizes",
}

Draw = Callable[[list["Axes"], Results], None]
Place = Callable[[PointRow], tuple[float, float]]


def draw_charts(results: Results, folder: Path) -> dict[str, Path]:
    """Draws all of them; returns the SVG files by the name of the chart."""
    panels = max(1, len(shown_rates(results)))
    found = {}
    charts: dict[str, tuple[Draw, int, float, float]] = {
        "operating-curve": (_operating_curve, 1, 7.6, 4.6),
        "goodput": (_goodput, 1, 7.6, 4.2),
        "latency": (_latency, panels, 2.4 + 3.0 * panels, 3.5),
        "batches": (_batches, panels, 2.4 + 3.0 * panels, 3.3),
    }
    for name, (draw, columns, width, height) in charts.items():
        for suffix in (".png", ".svg"):
            with figure(folder / (name + suffix), columns, width, height) as axes:
                draw(axes, results)
        found[name] = folder / f"{name}.svg"
    return found


def colour(results: Results, setting: str) -> str:
    """The promise has the first colour; settings keep theirs through all charts."""
    return PALETTE[results.names.index(setting) % len(PALETTE)]


def shown_rates(results: Results) -> list[float]:
    """For charts with room for a few: the lowest rate, the one nearest to 0.9 of capacity, the highest."""
    rates = sorted({row.rate for row in results.rows})
    if len(rates) <= _LOADS_SHOWN:
        return rates
    middle = min(rates[1:-1], key=lambda rate: abs(rate - 0.9 * results.capacity_rps))
    return [rates[0], middle, rates[-1]]


def _plain(text: str) -> str:
    """Matplotlib reads formulas between dollars."""
    return text.replace("$", r"\$")


# ---- goodput against p99


def _operating_curve(axes: list[Axes], results: Results) -> None:
    (ax,) = axes
    for name in results.names:
        rows = [row for row in results.rows if row.setting == name and row.answered]
        _measured(ax, results, rows, lambda row: (row.goodput_rps, row.p99_ms))
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
    ax.set_ylabel("p99 of what was answered, ms")
    ax.set_title(_plain(f"{results.model}: operating curve"))
    _legend(ax, len(results.names))


def _measured(ax: Axes, results: Results, rows: Sequence[PointRow], point: Place) -> None:
    """One setting's points: a line through those that count, and hollow ones where the generator was late."""
    if not rows:
        return
    shade, label = colour(results, rows[0].setting), _plain(rows[0].setting)
    valid = [point(row) for row in rows if not row.void]
    ax.plot([x for x, _ in valid], [y for _, y in valid], color=shade, marker="o", markersize=5, label=label)
    for x, y in (point(row) for row in rows if row.void):
        ax.plot([x], [y], marker="o", markersize=6, markerfacecolor="none", color=shade, linestyle="none")


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
    found = [best for name in results.names if (best := results.best(name)) is not None]
    chosen = max(found, key=lambda row: row.goodput_rps, default=None)
    for row in found:
        ring = {"markersize": 13, "markerfacecolor": "none", "linestyle": "none", "markeredgewidth": 1.6}
        gid = "chosen-point" if row is chosen else None
        at = [row.goodput_rps], [row.p99_ms]
        ax.plot(*at, marker="o", color=colour(results, row.setting), gid=gid, **ring)  # type: ignore[arg-type]
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
    """Milliseconds as people write them, also between the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = ax.get_ylim()
    steps = (1.0, 2.0, 5.0) if high / max(low, 1e-9) < 300 else (1.0,)
    ax.yaxis.set_major_locator(LogLocator(subs=steps))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _legend(ax: Axes, entries: int) -> None:
    """Below the picture, where it hides nothing."""
    columns = 3 if entries > 4 else max(1, min(entries, 4))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, fontsize=9)


# ---- goodput against the offered rate, with the prediction


def _goodput(axes: list[Axes], results: Results) -> None:
    (ax,) = axes
    rows = results.rows
    top = max([row.offered_rps for row in rows] + [point.offered_rps for point in results.prediction])
    ax.plot([0, top], [0, top], color=FAINT, linestyle=":", linewidth=1.4, label="all that is offered")
    for name in results.names:
        predicted = sorted(
            (point for point in results.prediction if point.setting == name), key=lambda p: p.offered_rps
        )
        xs, ys = [point.offered_rps for point in predicted], [point.goodput_rps for point in predicted]
        shade = colour(results, name)
        ax.plot(
            xs, ys, color=shade, linestyle="--", linewidth=1.3, gid=f"prediction-{results.names.index(name)}"
        )
        own = [row for row in rows if row.setting == name]
        _measured(ax, results, own, lambda row: (row.offered_rps, row.goodput_rps))
    ax.plot([], [], color=INK, linestyle="--", linewidth=1.3, label="as carpool plan predicts")
    if 0 < results.capacity_rps < top:
        ax.axvline(results.capacity_rps, color=FAINT, linewidth=1)
        beside_capacity(ax, f"planned capacity {numeral(results.capacity_rps)}/s", results.capacity_rps)
    ax.set_xlim(0, 1.02 * top)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("offered, per second")
    ax.set_ylabel("answered in time, per second")
    ax.set_title(_plain(f"{results.model}: answered within {results.slo_ms:g} ms"))
    _legend(ax, len(results.names) + 2)


# ---- latency and batches, at a few rates


def _latency(axes: list[Axes], results: Results) -> None:
    top = 2.5 * results.slo_ms
    for ax, rate in zip(axes, shown_rates(results), strict=True):
        for row in (row for row in results.rows if row.rate == rate):
            shade, style = colour(results, row.setting), ":" if row.void else "-"
            ax.step(*_shares(row, top), where="post", color=shade, linestyle=style, label=_plain(row.setting))
        ax.axvline(results.slo_ms, color=INK, linestyle="--", linewidth=1.2)
        ax.set_xlim(0, top)
        ax.set_ylim(0, 103)
        ax.set_xlabel("ms")
        ax.set_title(_at(results, rate))
    axes[0].set_ylabel("% of what was offered")
    _common_legend(axes, len(results.names))


def _shares(row: PointRow, top: float) -> tuple[list[float], list[float]]:
    """Answered within so many ms, as a share of what was offered: who was refused never gets there."""
    xs, ys, seen = [0.0], [0.0], 0
    shares = [share / 200 for share in range(1, 201)]
    for share, seconds in zip(shares, row.response.percentiles(shares) if row.answered else (), strict=False):
        xs.append(seconds * 1e3)
        seen = round(share * row.answered)
        ys.append(100 * seen / max(row.offered, 1))
    return [*xs, max(top, xs[-1])], [*ys, ys[-1]]


def _batches(axes: list[Axes], results: Results) -> None:
    rows = results.rows
    sizes = sorted({size for row in rows for size in row.batches})
    place = {size: number for number, size in enumerate(sizes)}
    width = 0.84 / len(results.names)
    for ax, rate in zip(axes, shown_rates(results), strict=True):
        for row in (row for row in rows if row.rate == rate):
            number = results.names.index(row.setting)
            total = max(1, sum(row.batches.values()))
            at = [place[size] + (number - (len(results.names) - 1) / 2) * width for size in row.batches]
            heights = [100 * count / total for count in row.batches.values()]
            ax.bar(at, heights, width, color=colour(results, row.setting), label=_plain(row.setting))
        shown = [size for number, size in enumerate(sizes) if number % (len(sizes) // 12 + 1) == 0]
        ax.set_xticks([place[size] for size in shown], [str(size) for size in shown])
        ax.set_xlim(-0.6, max(len(sizes), 1) - 0.4)
        ax.grid(visible=False, axis="x")
        ax.set_xlabel("images in the batch")
        ax.set_title(_at(results, rate))
    axes[0].set_ylabel("% of answers")
    _common_legend(axes, len(results.names))


def _common_legend(axes: list[Axes], entries: int) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    drawn = axes[0].figure
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(entries, 4), fontsize=9)


def _at(results: Results, rate: float) -> str:
    load = next((row.load for row in results.rows if row.rate == rate), None)
    return f"{numeral(rate)}/s" if load is None else f"load {load:g} ({numeral(rate)}/s)"


_DARK = ("#3fc1b8", "#f0845f", "#f2c14e", "#b79ce0", "#7fb2e5", "#e58ab0", "#c9a27e", "#a9a9b5")
_THEMED = {  # what Matplotlib writes → our name for it, and the colour by night
    INK: ("--ink", "#e6ebef"),
    PAPER: ("--paper", "#151b20"),
    FAINT: ("--faint", "#7d8b97"),
    "#e6eaee": ("--grid", "#2c363f"),
    **{
        light: (f"--c{number}", dark) for number, (light, dark) in enumerate(zip(PALETTE, _DARK, strict=True))
    },
}
_COLUMNS = (
    *("setting", "load", "offered/s", "in time/s", "plan/s", "in time", "p50 ms", "p99 ms"),
    *("plan p99", "batch", "refused", "failed"),
)
_STYLE = (Path(__file__).parent / "sweep_report.css").read_text("utf-8")
_PAGE = Template((Path(__file__).parent / "sweep_report.html").read_text("utf-8"))
_REASONS = 3  # why runs were void: the rest would say the same with other numbers


def page(results: Results, charts: Mapping[str, str]) -> str:
    """`charts` are SVG documents by name, as Matplotlib writes them."""
    many = "setting" if len(results.settings) == 1 else "settings"
    lead = (
        f"{len(results.runs)} runs of {results.seconds:g} s each, {len(results.settings)} {many}, "
        f"SLO {results.slo_ms:g} ms, {results.date}."
    )
    drawings = {
        name.replace("-", "_"): themed(charts[name], title) if name in charts else ""
        for name, title in _CHARTS.items()
    }
    return _PAGE.substitute(
        drawings,
        model=escape(results.model),
        style=_colours() + _STYLE,
        lead=escape(lead),
        findings="".join(f"<li>{escape(sentence)}</li>" for sentence in results.words()),
        noise=escape(results.noise_words()),
        points=_table(results),
        facts=_facts(results),
    )


def _colours() -> str:
    light = "".join(f"{name}:{value};" for value, (name, _) in _THEMED.items())
    dark = "".join(f"{name}:{value};" for name, value in _THEMED.values())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def themed(svg: str, title: str) -> str:
    """The drawing alone, without its background, in colours that follow the reader's."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"fill: #ffffff(; opacity: 0\.\d+)?", "fill: none", drawing)
    for colour, (name, _) in _THEMED.items():
        drawing = drawing.replace(colour, f"var({name})")
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _table(results: Results) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in _COLUMNS)
    best = {name: results.best(name) for name in results.names}
    body = "".join(_row(results, row, best[row.setting]) for row in results.rows)
    table = f'<table id="points"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _row(results: Results, row: PointRow, best: PointRow | None) -> str:
    predicted = results.predicted(row.setting, row.rate)
    chosen = best is not None and best.rate == row.rate
    mark = "void" if row.void else f"{row.void_runs} of {row.runs} void" if row.void_runs else ""
    cells = (
        row.setting,
        "–" if row.load is None else f"{row.load:g}",
        numeral(row.offered_rps),
        numeral(row.goodput_rps),
        "–" if predicted is None else numeral(predicted.goodput_rps),
        f"{100 * row.attainment:.1f} %",
        numeral(row.p50_ms),
        numeral(row.p99_ms),
        "–" if predicted is None else numeral(predicted.p99_ms),
        f"{row.mean_batch:.1f}",
        ", ".join(f"{reason} {count:,}" for reason, count in row.refused.items()) or "0",
        f"{row.failed:,}",
    )
    kind = "void" if row.void else "best" if chosen else ""
    number = results.names.index(row.setting) % len(PALETTE)
    dot = f'<span class="dot" style="background:var(--c{number})"></span>'
    marks = "".join(f"<b>{mark}</b>" for mark in ("best" if chosen else "", mark) if mark)
    first = f"<td>{dot}{escape(cells[0])}{marks}</td>"
    return f'<tr class="{kind}">{first}{"".join(map(_cell, cells[1:]))}</tr>'


def _cell(text: str) -> str:
    """Figures stay on one line; reasons may take several."""
    return f'<td class="words">{escape(text)}</td>' if " " in text[8:] else f"<td>{escape(text)}</td>"


def _facts(results: Results) -> str:
    instances = "1 instance" if results.instances == 1 else f"{results.instances} instances"
    void = sorted({reason for run in results.runs for reason in run.void})
    facts: Iterable[tuple[str, str]] = (
        ("command", results.command),
        ("asked", f"{results.target}; {results.requests}; arrivals at random times (Poisson)"),
        ("order", "rates shuffled, settings in turn at each rate, so that a noisy minute hits all of them"),
        ("machine", results.machine),
        ("date", results.date),
        ("versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
        ("batch curve", f"{results.curve} (batch:ms, {results.curve_from}), {instances}"),
        ("planned capacity", f"{numeral(results.capacity_rps)}/s within {results.slo_ms:g} ms: load 1"),
        *(("void because", reason) for reason in void[:_REASONS]),
        *((("", f"and {len(void) - _REASONS} more like these"),) if len(void) > _REASONS else ()),
    )
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{rows}</dl>"


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
        (folder / "results.json").write_text(
            json.dumps(results.as_json(), indent=1, ensure_ascii=False), "utf-8"
        )
        charts = {name: file.read_text("utf-8") for name, file in draw_charts(results, folder).items()}
        found.write_text(page(results, charts), "utf-8")
    except OSError as error:
        raise InvalidInput(f"--out: cannot write to {folder}: {error.strerror or error}") from None
    return found
