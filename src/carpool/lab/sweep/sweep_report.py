"""The charts of a sweep, each as PNG and as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.engine.numerals import numeral
from carpool.lab.plots import FAINT, INK, figure
from carpool.lab.sweep.results import Results
from carpool.lab.sweep.sweep_results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0b7a75", "#d1603d", "#c99012", "#6a4c93", "#3a6ea5", "#b5446e", "#7a5c3e", "#75757f")
PAPER = "#fefefe"
_LOADS_SHOWN = 3

Draw = Callable[[list["Axes"], Results], None]


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
        valid = [row for row in rows if not row.void]
        ax.plot(*_curve(valid), color=colour(results, name), marker="o", markersize=5, label=_plain(name))
        _hollow(ax, [(row.goodput_rps, row.p99_ms) for row in rows if row.void], colour(results, name))
    ax.set_yscale("log")
    _plain_numbers(ax)
    _slo_line(ax, results.slo_ms, "operating-curve-slo")
    _ring_best(ax, results)
    ax.set_xlim(left=0)
    ax.set_xlabel(f"answered within {results.slo_ms:g} ms, per second (goodput)")
    ax.set_ylabel("p99 of what was answered, ms")
    ax.set_title(_plain(f"{results.model}: operating curve"))
    _legend(ax, len(results.names))


def _curve(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.goodput_rps for row in rows], [row.p99_ms for row in rows]


def _hollow(ax: Axes, points: Sequence[tuple[float, float]], shade: str) -> None:
    for x, y in points:
        ax.plot([x], [y], marker="o", markersize=6, markerfacecolor="none", color=shade, linestyle="none")


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


def _slo_line(ax: Axes, slo_ms: float, gid: str) -> None:
    ax.axhline(slo_ms, color=INK, linestyle="--", linewidth=1.4, gid=gid)
    ax.annotate(
        f"SLO {slo_ms:g} ms",
        (0.0, slo_ms),
        xycoords=("axes fraction", "data"),
        xytext=(4, 4),
        textcoords="offset points",
        color=INK,
        fontsize=9,
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
        valid = [row for row in own if not row.void]
        xs, ys = [row.offered_rps for row in valid], [row.goodput_rps for row in valid]
        ax.plot(xs, ys, color=shade, marker="o", markersize=5, label=_plain(name))
        _hollow(ax, [(row.offered_rps, row.goodput_rps) for row in own if row.void], shade)
    ax.plot([], [], color=INK, linestyle="--", linewidth=1.3, label="as carpool plan predicts")
    _capacity(ax, results.capacity_rps, top)
    ax.set_xlim(0, 1.02 * top)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("offered, per second")
    ax.set_ylabel("answered in time, per second")
    ax.set_title(_plain(f"{results.model}: answered within {results.slo_ms:g} ms"))
    _legend(ax, len(results.names) + 2)


def _capacity(ax: Axes, capacity: float, top: float) -> None:
    if not 0 < capacity < top:
        return
    ax.axvline(capacity, color=FAINT, linewidth=1)
    ax.annotate(
        f"planned capacity {numeral(capacity)}/s",
        (capacity, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        rotation=90,
        rotation_mode="default",
        color=INK,
        fontsize=9,
    )


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


def _shares(row: Row, top: float) -> tuple[list[float], list[float]]:
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
