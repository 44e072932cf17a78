"""Draws every picture of the documentation, with the project's own simulator: `python docs/draw.py`.

Everything here runs in virtual time from fixed seeds, so that the same code draws the same pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from carpool.core.curve import BatchCurve, promised_batch, slo_capacity
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scaling import ScalingRule
from carpool.lab import plots
from carpool.lab.fleet_day import camera_day, fluid_day
from carpool.lab.plots import COLOURS, FAINT, INK
from carpool.sim.arrivals import Arrival, Cameras, Poisson, Traffic, poisson
from carpool.sim.fleet_simulation import Autoscale, FleetScenario, play_fleet
from carpool.sim.simulation import Outcome, Ride, Scenario, Surge, contenders, measure, play, sweep
from carpool.sim.step_simulation import UnderLoad, read_steps

IMAGES = Path(__file__).parent / "images"
EXERCISE = BatchCurve.parse("4+1")
RESNET = BatchCurve.parse("1:6.2,4:9.1,16:21,64:74")
YOLO = BatchCurve.parse("1:8,8:12,32:22,64:35,128:60")


def batch_curve() -> None:
    """What a larger batch buys and costs, and where the promise ends."""
    slo_ms = 50.0
    sizes = range(1, EXERCISE.max_batch + 1)
    with plots.figure(IMAGES / "batch-curve.png", width=8, height=3.8) as (axes,):
        axes.plot(sizes, [EXERCISE.throughput(size) for size in sizes], color=COLOURS["promise"])
        axes.set_ylabel("images per second", color=COLOURS["promise"])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("batch size B")
        axes.set_title("t(B) = 4 + 1·B ms: what a batch buys, and what it costs")
        time = axes.twinx()
        time.grid(visible=False)
        time.plot(sizes, [2e3 * EXERCISE.times[size] for size in sizes], color=COLOURS["knobs"])
        time.set_ylabel("2·t(B), ms", color=COLOURS["knobs"])
        time.set_ylim(bottom=0)
        time.axhline(slo_ms, color=INK, linestyle="--", linewidth=1.4)
        time.annotate("SLO 50 ms", (64, slo_ms), (0, 4), textcoords="offset points", ha="right", fontsize=9)
        batch = promised_batch(EXERCISE, slo_ms / 1e3)
        axes.plot(batch, EXERCISE.throughput(batch), "o", color=INK)
        label = f"B = {batch}: {EXERCISE.throughput(batch):,.0f}/s can be promised"
        axes.annotate(label, (batch, EXERCISE.throughput(batch)), (8, -16), textcoords="offset points")


def over_load() -> None:
    """Goodput and latency over load, of the promise and of what other servers do."""
    scenario = Scenario(EXERCISE, 0.05, Promise(0.05, 64), rate=1.0)
    entries = contenders(scenario, FixedBatching(64, max_delay=0.010))
    sweeps = {name: sweep(entry) for name, entry in entries.items()}
    with plots.figure(IMAGES / "goodput-over-load.png") as (axes,):
        plots.goodput(axes, sweeps)
        axes.set_title("Answered within 50 ms, t(B) = 4 + 1·B ms")
    with plots.figure(IMAGES / "latency-over-load.png") as (axes,):
        plots.latency(axes, sweeps, 50.0)
        axes.set_title("p99 of what was answered, t(B) = 4 + 1·B ms")
    write_dark(IMAGES / "goodput-over-load.png")


def write_dark(drawn: Path) -> None:
    """Write the same picture for dark pages beside it: light and dark change places, hues stay."""
    with Image.open(drawn) as picture:
        pixels = np.asarray(picture.convert("RGB"), np.float32) / 255.0
    most, least = pixels.max(-1, keepdims=True), pixels.min(-1, keepdims=True)
    turned = pixels + (1.0 - most - least)  # the lightness turned over moves all channels alike
    paper = np.array([30, 33, 41], np.float32) / 255.0
    written = paper + turned * (1.0 - paper)
    Image.fromarray((255.0 * written).round().astype(np.uint8)).save(drawn.with_stem(f"{drawn.stem}-dark"))


def surge() -> None:
    """Two GPUs, 800 images/s, ten seconds of 2,400."""
    seconds, width = 30.0, 0.5
    scenario = Scenario(
        RESNET,
        0.1,
        Promise(0.1, 64),
        rate=800,
        traffic=Surge(factor=3, length=10, calm=10),
        instances=2,
        seconds=20,
    )
    entries = contenders(scenario, FixedBatching(32, max_delay=0.010))
    bins = [width * number for number in range(int(seconds / width))]
    with plots.figure(IMAGES / "surge.png") as (axes,):
        for name in ("batch-1", "eager", "knobs", "promise"):
            rides = play(entries[name]).rides
            in_time = _per_second(rides, bins, width, lambda ride: _good(ride, 0.1))
            axes.step(bins, in_time, where="post", color=COLOURS[name], label=name)
        offered = _per_second(rides, bins, width, lambda _: True)
        axes.fill_between(bins, offered, step="post", color="#eef2f5", label="offered", zorder=0)
        axes.set_title("A surge on two GPUs: 800 → 2,400 → 800 images/s, SLO 100 ms")
        axes.set_xlabel("seconds")
        axes.set_ylabel("answered within the SLO, per second of arrival")
        axes.set_xlim(0, seconds - 2 * width)
        axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper right")


@dataclass(frozen=True)
class Crowd(Traffic):
    """A protected trickle, a modest source and a flood, three times what the device can carry in all."""

    shares: tuple[tuple[str, float, int], ...] = (("urgent", 0.1, 1), ("modest", 0.3, 0), ("flood", 2.6, 0))
    name = "crowd"
    even = True

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        """`rate` is the device's capacity."""
        found = [
            Arrival(arrival.at, source=source, priority=priority)
            for source, share, priority in self.shares
            for arrival in poisson(share * rate, seconds, random)
        ]
        return sorted(found, key=lambda arrival: arrival.at)


@dataclass(frozen=True)
class Nameless(Crowd):
    """The same crowd to a server that does not ask who they are."""

    def arrivals(self, rate: float, seconds: float, random: Random) -> list[Arrival]:
        return [Arrival(arrival.at) for arrival in super().arrivals(rate, seconds, random)]


def lanes() -> None:
    """Who is answered in time when one source floods."""
    who = [source for source, _, _ in Crowd().shares]
    scenario = Scenario(EXERCISE, 0.05, Promise(0.05, 64), rate=840, traffic=Crowd(), seconds=30)
    sources = [arrival.source for arrival in Crowd().arrivals(840, 30, Random(scenario.seed))]
    with plots.figure(IMAGES / "lanes.png", height=3.4) as (axes,):
        kinds: list[tuple[str, Traffic, str]] = [
            ("lanes and a guard batch", Crowd(), COLOURS["promise"]),
            ("one queue for all", Nameless(), FAINT),
        ]
        for number, (label, traffic, colour) in enumerate(kinds):
            rides = play(replace(scenario, traffic=traffic)).rides
            heights = [_attainment(rides, sources, source) for source in who]
            places = [place + 0.36 * number - 0.18 for place in range(len(who))]
            bars = axes.bar(places, heights, width=0.34, color=colour, label=label)
            axes.bar_label(bars, [f"{100 * height:.1f} %" for height in heights], padding=2, fontsize=9)
        axes.set_xticks(range(len(who)), ["protected\n0.1 × capacity", "modest\n0.3 ×", "flood\n2.6 ×"])
        axes.set_ylim(0, 1.15)
        axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axes.grid(visible=False, axis="x")
        axes.set_title("Answered within 50 ms while one source floods (3× in all)")
        axes.legend(loc="upper right")


def cameras() -> None:
    """How many cameras fit on one GPU, and what it costs that all send at the same moment."""
    counts = [10, 50, 100, 120, 140, 160, 170, 180, 190, 200]
    scenario = Scenario(YOLO, 0.1, Promise(0.1, 128), rate=1.0, seconds=60)
    kinds: list[tuple[str, Traffic, str]] = [
        ("all at the same moment", Cameras(1, 10.0, aligned=True), COLOURS["knobs"]),
        ("as Poisson", Poisson(), FAINT),
        ("at phases of their own", Cameras(1, 10.0), COLOURS["promise"]),
    ]
    with plots.figure(IMAGES / "cameras.png", columns=2, width=10, height=3.8) as (left, right):
        for label, traffic, colour in kinds:
            found = [measure(replace(scenario, traffic=traffic, rate=10.0 * count)) for count in counts]
            left.plot(counts, [outcome.p99_ms for outcome in found], color=colour, label=label)
            right.plot(counts, [100 * outcome.attainment for outcome in found], color=colour, label=label)
        left.axhline(100, color=INK, linestyle="--", linewidth=1.4)
        left.set_ylim(0, 110)
        left.set_title("p99 of what was answered, ms")
        right.axhline(99, color=INK, linestyle="--", linewidth=1.4)
        right.set_ylim(94, 100.2)
        right.set_title("answered within 100 ms, %")
        for axes in (left, right):
            axes.set_xlabel("cameras at 10 frames/s on one GPU")
        right.legend(loc="lower left")


def rollout_states() -> None:
    """How a version takes over, and the ways back."""
    ahead = ("loading", "checked", "shadow", "canary\n1 … n", "full", "standby", "done")
    box: Any = {"boxstyle": "round,pad=0.45", "facecolor": "white", "edgecolor": INK, "linewidth": 1.2}
    arrow: Any = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 2, "shrinkB": 2}
    with plots.figure(IMAGES / "rollout-states.png", width=8, height=2.6) as (axes,):
        axes.set_axis_off()
        axes.set_xlim(-0.5, len(ahead) - 0.4)
        axes.set_ylim(-1.75, 1.1)
        for place, name in enumerate(ahead):
            sent = name in ("canary\n1 … n", "full", "standby", "done")  # the candidate answers somebody
            edge = box | ({"edgecolor": COLOURS["promise"], "linewidth": 2.0} if sent else {})
            axes.text(place, 0, name, ha="center", va="center", fontsize=10, bbox=edge)
            if place:
                axes.annotate("", (place - 0.36, 0), (place - 0.64, 0), arrowprops=arrow)
        goes_back = arrow | {"color": COLOURS["knobs"]}
        for place in range(len(ahead) - 1):
            axes.annotate("", (place, -1.1), (place, -0.38), arrowprops=goes_back)
        words: Any = {"ha": "center", "va": "center", "fontsize": 10}
        axes.text(2.5, -1.4, "rolled-back, or failed: stable answers everything, at once", **words)
        above = "time is over, enough was seen, every guard is proven; or promote"
        axes.text(2.5, 0.8, above, color=COLOURS["promise"], **words)
        axes.text(5.5, -0.72, "abort", color=COLOURS["knobs"], **words)
        axes.text(2.5, -0.72, "a guard, abort", color=COLOURS["knobs"], **words)


def cascade() -> None:
    """A cascade under load: the cheap model answers for the big one, or requests are refused."""
    steps = read_steps(("2+0.3", "6+2@0.3"))
    loads = (0.5, 0.7, 0.9, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0)
    found: dict[UnderLoad, list[Outcome]] = {"quick": [], "refuse": []}
    for under_load, outcomes in found.items():
        scenario = Scenario(
            *(steps[0].curve, 0.1, Promise(0.1, 64), 1.0),
            seconds=8.0,
            steps=steps,
            shared=True,
            under_load=under_load,
        )
        outcomes += [measure(scenario.at_load(load)) for load in loads]
    with plots.figure(IMAGES / "cascade-under-load.png", width=8, height=3.8) as (axes,):
        for under_load, colour in zip(found, (COLOURS["promise"], COLOURS["knobs"]), strict=True):
            in_time = [outcome.attainment for outcome in found[under_load]]
            axes.plot(loads, in_time, color=colour, label=f'under_load = "{under_load}"')
        by_big = [(outcome.cascade or {})["hard_by_big_fraction"] for outcome in found["quick"]]
        hard = "hard ones that the big model still answers"
        axes.plot(loads, by_big, color=COLOURS["promise"], linestyle=":", linewidth=1.6, label=hard)
        axes.axvline(1.0, color=FAINT, linewidth=1)
        axes.set_ylim(0, 1.03)
        axes.set_xlim(loads[0], loads[-1])
        axes.set_xlabel("load, in multiples of what the cascade can carry with both models")
        axes.set_title("Answered within 100 ms: cheap 2 + 0.3·B ms, big 6 + 2·B ms for 30 %, one device")
        axes.legend(loc="lower left")


def scaled_surge() -> None:
    """80 → 300 images/s on replicas that answer 52/s each: scaled by load, and by saturation."""
    slo, calm, length, width = 0.2, 60.0, 240.0, 5.0
    one = Scenario(
        BatchCurve.parse("16+16"),
        slo,
        Promise(slo, 64),
        80,
        traffic=Surge(300 / 80, length, calm),
        seconds=length,
    )
    bins = [width * number for number in range(int((calm + length) / width))]
    with plots.figure(IMAGES / "fleet-surge.png", columns=2, width=11) as (left, right):
        for by, target, name in (("saturation", 0.6, "knobs"), ("load", 0.75, "promise")):
            run = play_fleet(FleetScenario(one, 2, retries=1, autoscale=Autoscale(by, target, 2, 12)))
            in_time = _per_second(run.run.rides, bins, width, lambda ride: _good(ride, slo))
            label = f"{by} {target:g}"
            left.step(bins, in_time, where="post", color=COLOURS[name], label=label)
            times, counts = zip(*run.serving, strict=True)
            right.step(
                (*times, calm + length), (*counts, counts[-1]), where="post", color=COLOURS[name], label=label
            )
        offered = _per_second(run.run.rides, bins, width, lambda _: True)
        left.fill_between(bins, offered, step="post", color="#dbe4ea", label="offered", zorder=0)
        left.set_title("Answered within the SLO, per second of arrival")
        right.set_title("Replicas that serve, 52/s each")
        for axes in (left, right):
            axes.set_xlabel("seconds")
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, calm + length - width)
        left.legend(loc="lower right")
        right.legend(loc="upper left")


def million_day() -> None:
    """A million cameras, one frame a second each while something moves."""
    rates = evening_day()
    capacity = slo_capacity(YOLO, 0.1)
    day = fluid_day(rates, capacity, ScalingRule(cold_start=120.0))
    hours = [number / 3600 for number in range(len(rates))]
    with plots.figure(IMAGES / "million-cameras.png", width=9, height=3.8) as (axes,):
        needed = [rate / capacity for rate in rates]
        axes.fill_between(hours[::60], needed[::60], color="#dbe4ea", label="load, in whole replicas")
        axes.plot(hours[::60], day.serving[::60], color=COLOURS["promise"], label="replicas that serve")
        most = max(day.serving)
        axes.axhline(most, color=INK, linestyle="--", linewidth=1)
        plots.beside_level(axes, f"always there for the peak: {most}", most, left=True)
        axes.set_title("A million cameras over a day, 2,046 images/s a replica")
        axes.set_xlabel("hour")
        axes.set_xlim(0, 24)
        axes.set_ylim(0, 1.15 * most)
        axes.legend(loc="lower right")


def evening_day() -> list[float]:
    """The day of cameras, and at six in the evening a fifth of all frames more for twenty minutes, within one
    minute."""
    rates = camera_day(1e6)
    for second in range(64_800, 66_000):
        rates[second] += 0.2e6 * min(1.0, (second - 64_800) / 60)
    return rates


def _per_second(
    rides: list[Ride], bins: list[float], width: float, counts: Callable[[Ride], bool]
) -> list[float]:
    heights = [0.0] * len(bins)
    for ride in rides:
        place = int(ride.arrival.at / width)
        if place < len(bins) and counts(ride):
            heights[place] += 1 / width
    return heights


def _good(ride: Ride, slo: float) -> bool:
    return ride.latency is not None and ride.latency <= slo


def _attainment(rides: list[Ride], sources: list[str], source: str) -> float:
    """After two seconds, in which the scheduler finds out who is who."""
    own = [ride for ride, who in zip(rides, sources, strict=True) if who == source and ride.arrival.at > 2]
    return sum(_good(ride, 0.05) for ride in own) / len(own)


_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2933 } .small { font-size: 11.5px; fill: #52606d }
  rect { fill: #ffffff; stroke: #9aa5b1; rx: 6px } .process { fill: #f5f7fa; stroke: #52606d }
  .extension { fill: #e3f8ff; stroke: #2186eb; stroke-dasharray: 5 3 } path { stroke: #52606d; fill: none }
  .paper { fill: #ffffff; stroke: none; rx: 0 } b, .title { font-weight: 600 } marker path { fill: #52606d }
"""


def _box(x: int, y: int, width: int, height: int, title: str, *lines: str, kind: str = "") -> str:
    """Returns a box with a title and lines below it."""
    words = [f'<text class="title" x="{x + 10}" y="{y + 20}">{title}</text>']
    words += [
        f'<text class="small" x="{x + 10}" y="{y + 37 + 15 * n}">{line}</text>'
        for n, line in enumerate(lines)
    ]
    box = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
    return "\n".join([box, *words])


def _arrow(*points: tuple[int, int], both: bool = False) -> str:
    way = " L ".join(f"{x} {y}" for x, y in points)
    start = ' marker-start="url(#head)"' if both else ""
    return f'<path d="M {way}" marker-end="url(#head)"{start}/>'


def architecture() -> None:
    """Draws the processes, what a request passes in them, and where extensions take part."""
    parts = [
        _box(16, 16, 928, 30, "supervisor: starts the others, restarts what dies, owns sockets and memory"),
        _box(16, 70, 96, 236, "clients", "HTTP", "gRPC"),
        _box(150, 60, 270, 256, "front end (one process or more)", kind="process"),
        _box(166, 92, 238, 46, "app.py", "routes, keys; a body goes into a slot"),
        _box(
            166,
            150,
            238,
            62,
            "the lane of a version",
            "wrappers of extensions, in one order:",
            "cache, rollout, pipelines, …",
            kind="extension",
        ),
        _box(
            166,
            224,
            238,
            80,
            "request.py",
            "one state machine for every protocol:",
            "READING, OFFERED, RUNNING,",
            "ANSWERING, OVER",
        ),
        _box(492, 60, 270, 256, "engine (one process)", kind="process"),
        _box(508, 92, 238, 62, "driver.py", "of each version: takes requests,", "starts batches, answers"),
        _box(
            508,
            166,
            238,
            62,
            "batcher.py in core/",
            "admits or rejects; forms the largest",
            "batch that keeps the SLO; no clock",
        ),
        _box(
            508,
            240,
            238,
            62,
            "parts of extensions",
            "runtimes, what stands before a driver,",
            "questions of front ends",
            kind="extension",
        ),
        _box(800, 70, 144, 62, "instance threads", "of the engine:", "onnxruntime, …"),
        _box(800, 156, 144, 62, "workers", "a process for each", "Python model"),
        _box(800, 242, 144, 62, "runner", "a process of PyTorch", "models, on GPUs", kind="extension"),
        _box(
            150,
            334,
            270,
            46,
            "process of an extension",
            "sends requests of its own: cameras",
            kind="extension",
        ),
        _box(492, 334, 452, 46, "shared memory", "slots of requests and answers, counters, signs of life"),
        _arrow((112, 115), (164, 115)),
        _arrow((285, 138), (285, 149)),
        _arrow((285, 212), (285, 223)),
        _arrow((404, 264), (456, 264), (456, 123), (506, 123)),
        '<text class="small" x="461" y="200">link</text>',
        _arrow((627, 154), (627, 165), both=True),
        _arrow((746, 115), (798, 100)),
        _arrow((746, 123), (798, 186)),
        _arrow((746, 131), (798, 272)),
        _arrow((420, 357), (456, 357), (456, 270)),
        _arrow((627, 318), (627, 332), both=True),
        '<rect class="extension" x="16" y="340" width="22" height="14"/>',
        '<text class="small" x="46" y="352">extensions</text>',
    ]
    _write_boxes("architecture.svg", 960, 396, parts)


def optimize() -> None:
    """Draws which images go where in `carpool optimize`, and what decides."""
    parts = [
        _box(16, 76, 120, 78, "your images", "400 or more,", "labels or none"),
        _box(184, 16, 190, 62, "to calibrate with", "a quarter, at most 128"),
        _box(184, 152, 190, 62, "held back", "300; no quantizer", "sees them"),
        _box(
            422,
            16,
            236,
            78,
            "forms",
            "onnxruntime, OpenVINO; fp32, int8;",
            "sensitive layers in fp32",
            kind="process",
        ),
        _box(422, 152, 236, 62, "the same answers?", "against the model as it is,", "or against labels"),
        _box(
            706,
            16,
            238,
            78,
            "how much faster?",
            "in turns with the model as it is:",
            "capacity within the SLO",
        ),
        _box(706, 152, 114, 62, "2/", "with report"),
        _box(830, 152, 114, 62, "keep", "and why"),
        _arrow((136, 105), (160, 105), (160, 47), (182, 47)),
        _arrow((136, 125), (160, 125), (160, 183), (182, 183)),
        _arrow((374, 47), (420, 47)),
        _arrow((374, 183), (420, 183)),
        _arrow((540, 94), (540, 150)),
        _arrow((658, 183), (682, 183), (682, 55), (704, 55)),
        _arrow((763, 94), (763, 150)),
        _arrow((887, 94), (887, 150)),
        '<text class="small" x="770" y="126">a gain</text>',
        '<text class="small" x="894" y="126">none</text>',
    ]
    _write_boxes("optimize.svg", 960, 230, parts)


def _write_boxes(name: str, width: int, height: int, parts: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M 0 0 L 8 4 L 0 8 z"/></marker></defs>'
    )
    paper = f'<rect class="paper" width="{width}" height="{height}"/>'
    text = "\n".join([head, f"<style>{_STYLE}</style>", marker, paper, *parts, "</svg>\n"])
    (IMAGES / name).write_text(text, "utf-8")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    pictures = (
        *(batch_curve, over_load, surge, lanes, cameras, rollout_states, cascade),
        *(scaled_surge, million_day, architecture, optimize),
    )
    wanted = set(sys.argv[1:])
    for draw in pictures:
        if not wanted or draw.__name__ in wanted:
            draw()


if __name__ == "__main__":
    main()
