"""What runs in which process, and what travels between them; with what each took, if there is a `gpu.json`.

python -m chip.draw_processes OUT.png [GPU.json]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carpool.link.records import RUN_PLACE, TO_ENGINE, TO_FRONTEND
from chip.draw import COLOURS, TITLES

SHORT = {"jpeg": "JPEG", "tensor": "tensor", "shared": "shared memory"}
GREY = "#555555"
SIZE = (12.6, 6.0)
LEVEL = 1.75  # where boxes begin, above the slots
HEIGHT, WITHOUT = 2.5, 1.7  # of a box with figures in it, and without


class Box(NamedTuple):
    part: str  # as `gpu.json` calls it
    left: float
    width: float
    title: str
    lines: tuple[str, ...]
    colour: str

    @property
    def right(self) -> float:
        return self.left + self.width


BOXES = (
    Box(
        "front ends",
        1.15,
        2.35,
        "front ends",
        ("HTTP, gRPC, the body", "into a slot; the answer", "from there to the client"),
        "#e8f0f8",
    ),
    Box(
        "engine loop",
        4.35,
        2.05,
        "engine",
        ("who rides with whom,", "who is refused; never", "touches a body"),
        "#fdf1e3",
    ),
    Box(
        "runner",
        7.25,
        2.35,
        "runner",
        ("a thread per instance:", "gather, launch, wait,", "answers into the slots"),
        "#e9f4e7",
    ),
    Box(
        "gpu",
        10.45,
        2.05,
        "GPU",
        ("decode, resize,", "one graph per batch,", "boxes chosen"),
        "#f3ecf5",
    ),
)


def chosen(results: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    """The first network that was measured, and by what was sent, its closed loop with the most images/s."""
    for name, found in results.items():
        if not (isinstance(found, dict) and "rows" in found):
            continue
        best: dict[str, dict[str, Any]] = {}
        for row in found["rows"]:
            if row["what"] in SHORT and row["images_per_s"] > best.get(row["what"], {}).get(
                "images_per_s", 0
            ):
                best[row["what"]] = row
        return name, {what: best[what] for what in SHORT if what in best}
    return "", {}


def figures(part: str, rows: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What was sent, and what this part took for it; nothing where it was not seen."""
    found = []
    for what, row in rows.items():
        if part == "gpu":
            device = row.get("device", {})
            if "busy" in device:
                decoder = device.get("jpeg_decoder")
                also = f", decoder {decoder:.2f}" if what == "jpeg" and decoder is not None else ""
                found.append((what, f"busy {device['busy']:.2f}{also}"))
        elif part in row.get("shares", {}):
            share, cost = row["shares"][part], row["us_per_request"][part]
            found.append((what, f"{share:.2f} cores, {cost:.0f} µs"))
    return found


class Picture:
    """Drawn piece by piece."""

    def __init__(self, axes: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
        self.axes = axes
        self.rows = rows
        self.top = LEVEL + (HEIGHT if rows else WITHOUT)
        self.there, self.back = self.top - 0.85, self.top - 1.4  # where arrows go from box to box

    def text(self, x: float, y: float, text: str, size: float = 9, **more: Any) -> None:
        self.axes.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, **more})

    def arrow(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        style = {"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.2}
        self.axes.annotate("", end, start, arrowprops=style)

    def box(self, box: Box) -> None:
        from matplotlib.patches import FancyBboxPatch

        middle = box.left + box.width / 2
        style = "round,pad=0,rounding_size=0.08"
        corner, height = (box.left, LEVEL), self.top - LEVEL
        self.axes.add_patch(
            FancyBboxPatch(corner, box.width, height, boxstyle=style, facecolor=box.colour, edgecolor=GREY)
        )
        self.text(middle, self.top - 0.22, box.title, 12, weight="bold")
        self.text(middle, self.top - 0.42, "\n".join(box.lines), va="top", linespacing=1.3)
        told = figures(box.part, self.rows)
        if told and box.part == "engine loop":
            self.text(middle, LEVEL + 0.18 + 0.24 * len(told), "its loop:", 8.5, color=GREY)
        for number, (what, text) in enumerate(reversed(told)):
            self.text(middle, LEVEL + 0.18 + 0.24 * number, text, color=COLOURS[what])

    def between(self, left: float, right: float, there: str = "", back: str = "") -> None:
        middle, gap = (left + right) / 2, 0.04
        self.arrow((left + gap, self.there), (right - gap, self.there))
        self.arrow((right - gap, self.back), (left + gap, self.back))
        self.text(middle, self.there + 0.08, there, 8, va="bottom")
        self.text(middle, self.back - 0.08, back, 8, va="top")

    def slots(self, left: float, right: float) -> None:
        """What is large lies still: only front ends and the runner touch it."""
        from matplotlib.patches import Rectangle

        spot = Rectangle((left, 0.25), right - left, 0.62, facecolor="#f4f4f4", edgecolor=GREY)
        self.axes.add_patch(spot)
        middle = (left + right) / 2
        self.text(middle, 0.68, "slots in shared memory", 10, weight="bold")
        words = "bodies of requests and rows of answers stay where they are: no process sends them to another"
        self.text(middle, 0.42, words, 8.5)

    def down(self, box: Box, writes: str, reads: str) -> None:
        """Between a process and the slots."""
        first, second = box.left + 0.3 * box.width, box.left + 0.7 * box.width
        self.arrow((first, LEVEL - 0.03), (first, 0.9))
        self.arrow((second, 0.9), (second, LEVEL - 0.03))
        self.text(first - 0.07, 1.32, writes, 8, ha="right")
        self.text(second + 0.07, 1.32, reads, 8, ha="left")

    def title(self, network: str) -> None:
        """The loads in their colours, so that the figures in the boxes need no more words."""
        level, left = self.top + 0.5, BOXES[0].left
        name = f"{TITLES.get(network, network)}, images/s:"
        self.text(left, level, name, 10, weight="bold", ha="left")
        for number, (what, row) in enumerate(self.rows.items()):
            text = f"{SHORT[what]} {row['images_per_s']:,.0f}"
            self.text(left + 2.6 + 1.9 * number, level, text, 10, color=COLOURS[what], ha="left")
        said = "below, in the same colours: cores in use, and µs of CPU per answered request"
        self.text(left, level - 0.27, said, 8.5, color=GREY, ha="left")


def draw(target: Path, results: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    network, rows = chosen(results)
    figure, axes = plt.subplots(figsize=SIZE)
    picture = Picture(axes, rows)
    front, engine, runner, gpu = BOXES
    for box in BOXES:
        picture.box(box)
    picture.text(0.1, (picture.there + picture.back) / 2, "clients", 11, weight="bold")
    picture.between(0.5, front.left)
    told, done = f"where it lies:\n{TO_ENGINE.size} bytes", f"done:\n{TO_FRONTEND.size} bytes"
    picture.between(front.right, engine.left, told, done)
    picture.between(engine.right, runner.left, f"its place:\n{RUN_PLACE.size} bytes", "the batch\nis done")
    picture.between(runner.right, gpu.left, "copies,\nlaunches", "rows of\nanswers")
    picture.slots(front.left, runner.right)
    picture.down(front, writes="bodies", reads="answers")
    picture.down(runner, writes="answers", reads="bodies")
    if rows:
        picture.title(network)
    axes.set_xlim(-0.4, gpu.right + 0.2)
    axes.set_ylim(0.1, picture.top + (0.75 if rows else 0.15))
    axes.set_aspect("equal")
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(target, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        raise SystemExit(__doc__)
    target, *file = map(Path, arguments)
    draw(target, json.loads(file[0].read_text()) if file else {})


if __name__ == "__main__":
    main(sys.argv[1:])
