"""Draws pictures of what the simulator found. Matplotlib is optional: it is imported when something is
drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.errors import InvalidInput
from carpool.lab.batch_profile import CAUTION, Budget, ProfileReport
from carpool.sim.simulation import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Sweep = Sequence[tuple[float, Outcome]]

COLOURS = {"promise": "#0b7a75", "knobs": "#d1603d", "eager": "#e0a526", "batch-1": "#8d8d99"}
LABELS = {
    "promise": "Carpool, SLO",
    "knobs": "fixed batch size and delay",
    "eager": "no delay",
    "batch-1": "one at a time",
}
INK, FAINT = "#22303c", "#93a1ad"
_STYLE = Path(__file__).parent / "plots.mplstyle"  # with the same colours
_BESIDE: Any = {"textcoords": "offset points", "color": INK, "fontsize": 9}


@contextmanager
def figure(path: Path, columns: int = 1, width: float = 8.0, height: float = 4.2) -> Iterator[list[Axes]]:
    """Yields axes side by side, written to `path` at the end."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInput("plots need matplotlib: pip install 'carpool[plot]'") from None
    with mpl.rc_context(fname=_STYLE):
        drawn: Figure = Figure(figsize=(width, height), layout="constrained")
        yield [drawn.add_subplot(1, columns, column + 1) for column in range(columns)]
        try:
            drawn.savefig(path)
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None


def beside_level(axes: Axes, text: str, y: float, *, left: bool = False) -> None:
    """Writes words over a horizontal line, at one of its ends."""
    x, offset, side = (0.0, 4, "left") if left else (1.0, -2, "right")
    axes.annotate(text, (x, y), xycoords=("axes fraction", "data"), xytext=(offset, 4), ha=side, **_BESIDE)


def beside_capacity(axes: Axes, text: str, x: float) -> None:
    """Writes words along a vertical line, from its foot."""
    where: Any = {"xycoords": ("data", "axes fraction"), "xytext": (-5, 0), "ha": "right", "rotation": 90}
    axes.annotate(text, (x, 0.03), **where, **_BESIDE)


def operating_curve(path: Path, sweeps: Mapping[str, Sweep], *, slo_ms: float, title: str) -> None:
    """Draws goodput and latency over load, side by side."""
    with figure(path, columns=2, width=11.0) as (left, right):
        goodput(left, sweeps)
        latency(right, sweeps, slo_ms)
        left.set_title(f"{title}, SLO {slo_ms:g} ms: goodput")
        right.set_title("Latency of responses" if len(sweeps) == 1 else "p99 of responses")


def batch_profile(path: Path, report: ProfileReport) -> None:
    """Batch times with the line through them, and the rate they give, with the knee and the promises."""
    sizes = [row.batch for row in report.rows]
    with figure(path, columns=2, width=11.0) as (left, right):
        times = [row.ms for row in report.rows]
        widths = [row.spread * row.ms for row in report.rows]
        line = [report.fixed_ms + report.per_image_ms * size for size in sizes]
        left.plot(sizes, line, color=FAINT, linewidth=1.4, label="fixed + per image")
        left.errorbar(
            sizes, times, [[0.0] * len(sizes), widths], fmt="o", color=COLOURS["promise"], capsize=3
        )
        left.set_title(f"{report.model}: time of a batch")
        left.set_ylabel("ms")
        left.set_ylim(0, 1.15 * max(time + width for time, width in zip(times, widths, strict=True)))
        for budget in report.budgets:
            ms = budget.slo_ms / (2 * CAUTION)  # the longest batch that it allows
            if ms < left.get_ylim()[1]:
                left.axhline(ms, color=INK, linestyle="--", linewidth=1)
                beside_level(left, f"allowed by an SLO of {budget.slo_ms:g} ms", ms)
        rates = [row.images_per_s for row in report.rows]
        right.plot(sizes, rates, color=COLOURS["promise"], marker="o")
        right.axvline(report.knee, color=FAINT, linewidth=1.2, linestyle="--")
        right.annotate(f"knee: {report.knee}", (report.knee, 0), xytext=(4, 6), textcoords="offset points")
        right.set_title("Images per second")
        right.set_ylim(0, 1.12 * max(rates))
        for batch in dict.fromkeys(budget.batch for budget in report.budgets if budget.batch):
            _chosen_batch(right, [budget for budget in report.budgets if budget.batch == batch])
        for axes in (left, right):
            axes.set_xlabel("images per batch")
            axes.set_xlim(left=0)
        left.legend(loc="upper left")


def cascade_curve(
    path: Path, points: Sequence[tuple[float, float, float]], chosen: float, labelled: bool
) -> None:
    """How often a cascade is right and what it costs, over what its cheap model keeps: `points` are (kept,
    accuracy, times the big model's cost), from nothing kept to everything."""
    kept, right, cost = (list(column) for column in zip(*points, strict=True))
    with figure(path, columns=2, width=11.0) as (left, second):
        left.plot(kept, right, color=COLOURS["promise"])
        left.axhline(right[0], color=INK, linestyle="--", linewidth=1)
        beside_level(left, "large model alone", right[0])
        left.set_title("Right" if labelled else "Agreement with the large model")
        second.plot(kept, cost, color=COLOURS["knobs"])
        second.axhline(1.0, color=INK, linestyle="--", linewidth=1)
        beside_level(second, "large model alone", 1.0)
        second.set_title("Cost, as a multiple of the large model alone")
        second.set_ylim(bottom=0)
        for axes in (left, second):
            axes.axvline(chosen, color=FAINT, linewidth=1.2)
            beside_capacity(axes, f"kept: {100 * chosen:.0f} %", chosen)
            axes.set_xlabel("share of the images that the cheap model answers")
            axes.set_xlim(0, 1)


def _chosen_batch(axes: Axes, budgets: Sequence[Budget]) -> None:
    """Draws one mark for all promises that allow the same."""
    place = (budgets[0].batch, budgets[0].images_per_s)
    axes.plot(*place, marker="D", markersize=8, color=COLOURS["knobs"])
    words = f"{', '.join(f'{budget.slo_ms:g}' for budget in budgets)} ms: batches of {budgets[0].batch}"
    axes.annotate(words, place, xytext=(6, -14), textcoords="offset points", color=INK, fontsize=9)


def goodput(axes: Axes, sweeps: Mapping[str, Sweep]) -> None:
    """Draws images answered in time per second, under the fluid bound."""
    reference = next(iter(sweeps.values()))
    loads = [load for load, _ in reference]
    bound = [outcome.fluid_bound_rps for _, outcome in reference]
    axes.plot(loads, bound, color=INK, linestyle=":", linewidth=1.6, label="fluid bound")
    _lines(axes, sweeps, lambda outcome: outcome.goodput_rps)
    axes.axvline(1.0, color=FAINT, linewidth=1)
    beside_capacity(axes, f"capacity {reference[0][1].capacity_rps:,.0f}/s", 1.0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("images per second")
    _over_load(axes)


def latency(axes: Axes, sweeps: Mapping[str, Sweep], slo_ms: float) -> None:
    """Draws the p99 of answers (of one contender alone also p50 and p95), and the promise.

    A contender whose line leaves the picture has answered every request late.
    """
    top = 3 * slo_ms
    if len(sweeps) == 1:
        for share, style in (("p50", ":"), ("p95", "--"), ("p99", "-")):
            for name, sweep in sweeps.items():
                points = [(load, min(getattr(outcome, f"{share}_ms"), 10 * top)) for load, outcome in sweep]
                axes.plot(
                    *zip(*points, strict=True), color=COLOURS.get(name, INK), linestyle=style, label=share
                )
    else:
        _lines(axes, sweeps, lambda outcome: min(outcome.p99_ms, 10 * top))
    axes.axhline(slo_ms, color=INK, linestyle="--", linewidth=1.4)
    beside_level(axes, f"SLO {slo_ms:g} ms", slo_ms)
    axes.set_ylim(0, top)
    axes.set_ylabel("ms")
    _over_load(axes)


def _lines(axes: Axes, sweeps: Mapping[str, Sweep], value: Callable[[Outcome], float]) -> None:
    """The promise is drawn last, so that it lies on top."""
    for name, sweep in reversed(list(sweeps.items())):
        loads = [load for load, _ in sweep]
        values = [value(outcome) for _, outcome in sweep]
        axes.plot(loads, values, color=COLOURS.get(name, INK), label=LABELS.get(name, name))


def _over_load(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.set_xlabel("load, in multiples of the SLO capacity")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="best")
