"""The picture of `overload.py`: what each server answers in time, over the load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.lab import plots
from carpool.lab.plots import COLOURS, FAINT, INK

_OTHERS = ("#d1603d", "#e0a526", "#5b7db1", "#8a5a9e", "#8d8d99")
OURS = "Carpool"


def draw(path: Path, rows: Sequence[Mapping[str, Any]], capacity: float) -> None:
    servers = list(dict.fromkeys(row["server"] for row in rows))
    colours = dict(zip([name for name in servers if name != OURS], _OTHERS, strict=False))
    colours[OURS] = COLOURS["promise"]
    with plots.figure(path) as (axes,):
        ours = [row for row in rows if row["server"] == OURS]
        loads = [row["load"] for row in ours]
        axes.plot(loads, [row["bound_rps"] for row in ours], ":", color=INK, linewidth=1.6, label="bound")
        for name in reversed(servers):  # ours last, so that it lies on top
            points = [(row["load"], row["goodput_rps"]) for row in rows if row["server"] == name]
            axes.plot(*zip(*points, strict=True), marker="o", color=colours[name], label=name)
        axes.axvline(1.0, color=FAINT, linewidth=1)
        axes.set_title(f"Answered within 200 ms, a device that carries {capacity:.0f}/s")
        axes.set_xlabel("load, in multiples of the capacity")
        axes.set_ylabel("answers in time per second")
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        order = [0, *range(len(labels) - 1, 0, -1)]
        axes.legend(
            [handles[n] for n in order],
            [labels[n] for n in order],
            loc="lower right",
            bbox_to_anchor=(1, 0.05),
            fontsize=9,
        )
