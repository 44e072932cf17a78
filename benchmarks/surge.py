"""The moderation incident through real sockets: 800 → 2,400 → 800 images/s on two devices for 800.

Two instances of a pretended ResNet-50 (6.2 ms for one image, 74 ms for 64), a promise of 100 ms, and a surge
three times as high as the calm. So that one machine can generate it, all times are multiplied by a scale and
all rates divided by it; figures are printed in the incident's own time. Three servers take the same arrivals
side by side:

    batch1    one image at a time
    knobs     Triton's knobs: 10 ms of delay, batches of at most 32 (the fix that was made in the incident)
    promise   slo_ms = 100

Each server records its arrivals (`--record`), and the simulator of `carpool simulate --arrivals trace:FILE`
plays them again: `goodput_fraction` is what was answered in time of what came in the surge, over what the
simulated promise answers of it. Clients give up after four times the promise.

    python benchmarks/surge.py                       # about nine minutes
    python benchmarks/surge.py --plot surge.png
    python benchmarks/surge.py --quick               # a shorter surge, within a minute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.errors import CarpoolError
from carpool.sim.arrivals import Recording, Ride
from carpool.sim.simulation import Scenario, play
from load import open_loop
from load.burst import LoadError
from load.carpool_server import CarpoolServer, FakeModel, starting, stop, wait_ready
from load.open_loop import Fallen, Shower
from load.program import run_program

POINTS = ((1, 6.2), (4, 9.1), (16, 21.0), (64, 74.0))  # ResNet-50: images, ms
SLO_MS = 100.0
INSTANCES = 2
CALM, SURGE = 800.0, 2400.0  # images per second
RECOVERY = (1.0, 6.0)  # seconds after the surge
PATIENCE = 4.0  # promises, after which a client gives up
CONNECTIONS = 2048
MODES = ("batch1", "knobs", "promise")
TARGETS = {"goodput_fraction": 0.90, "p99_over_slo": 1.05, "recovery_attainment": 0.99}


@dataclass(frozen=True)
class Story:
    """How long each part lasts in the incident's time, and how much slower everything is played."""

    before: float = 20.0
    surge: float = 20.0
    after: float = 20.0
    scale: float = 8.0

    @property
    def steps(self) -> tuple[tuple[float, float], ...]:
        rates = ((CALM, self.before), (SURGE, self.surge), (CALM, self.after))
        return tuple((rate / self.scale, seconds * self.scale) for rate, seconds in rates)

    @property
    def slo(self) -> float:
        """Seconds, as they are played."""
        return SLO_MS / 1e3 * self.scale

    @property
    def curve(self) -> str:
        return ",".join(f"{size}:{ms * self.scale:g}" for size, ms in POINTS)

    def played(self, start: float, end: float) -> tuple[float, float]:
        """Seconds since the beginning of the surge, as they are played since the start."""
        return (self.before + start) * self.scale, (self.before + end) * self.scale


QUICK = Story(before=0.5, surge=2.0, after=6.0, scale=4.0)


@dataclass(frozen=True)
class Row:
    mode: str
    goodput_fraction: float
    p99_over_slo: float
    recovery_attainment: float
    goodput_rps: float  # in the surge
    simulated_rps: float  # by the promise, on the same arrivals
    surge_attainment: float
    generator_late: bool


def main() -> int:
    args = parse_arguments()
    story = QUICK if args.quick else Story()
    if args.scale is not None:
        story = Story(story.before, story.surge, story.after, args.scale)
    fallen, simulated = run(story)
    rows = [row_of(mode, story, fallen[mode], simulated[mode]) for mode in MODES]
    for mode in MODES:
        for reason in fallen[mode].late_because:
            print(f"void, {mode}: {reason}", file=sys.stderr)
    if args.plot is not None:
        draw(args.plot, story, fallen, simulated["promise"])
    print(as_json(story, rows) if args.json else as_text(story, rows))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter parts, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--scale", type=float, help="times are multiplied by it, rates divided")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what was answered in time")
    return parser.parse_args()


# ---- what happens


def run(story: Story) -> tuple[dict[str, Fallen], dict[str, list[Ride]]]:
    """What became of every request, and what would have in the simulator; by mode."""
    with contextlib.ExitStack() as stack:
        servers: dict[str, CarpoolServer] = {}
        for mode, model in models(story).items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="carpool-surge-")))
            servers[mode] = stack.enter_context(starting(model.write(folder), record=True))
        for server in servers.values():
            wait_ready(server)
        showers = [
            Shower(
                server.url,
                story.steps,
                story.slo,
                timeout=PATIENCE * story.slo,
                connections=CONNECTIONS,
                model="fake",
            )
            for server in servers.values()
        ]
        fallen = dict(zip(servers, open_loop.pour(showers), strict=True))
        stop(*(server.process for server in servers.values()))  # which also writes the last of the records
        simulated = {mode: simulate(story, server, fallen[mode]) for mode, server in servers.items()}
    return fallen, simulated


def models(story: Story) -> dict[str, FakeModel]:
    curve, k = story.curve, story.scale
    return {
        "batch1": FakeModel(curve, max_batch=1, instances=INSTANCES),
        "knobs": FakeModel(curve, max_batch=32, max_delay_ms=10 * k, instances=INSTANCES),
        "promise": FakeModel(curve, max_batch=64, slo_ms=SLO_MS * k, instances=INSTANCES),
    }


def simulate(story: Story, server: CarpoolServer, fallen: Fallen) -> list[Ride]:
    """`carpool simulate --arrivals trace:RECORD` under the promise, without noise: the fake has none."""
    assert server.record is not None
    trace = Recording.read(server.record)
    curve = BatchCurve.parse(story.curve, 64)
    scenario = Scenario(
        curve,
        story.slo,
        Promise(story.slo, 64),
        rate=trace.own_rate,
        traffic=trace,
        instances=INSTANCES,
        seconds=trace.span + 1.0,
        noise=0.0,
        stall_share=0.0,
    )
    rides = play(scenario).rides[1:]  # the first was a question whether the server is there
    if len(rides) != len(fallen.drops):
        print(f"{len(fallen.drops)} requests were due and {len(rides)} recorded", file=sys.stderr)
    begin = rides[0].arrival.at - fallen.drops[0].at
    for ride in rides:
        object.__setattr__(ride.arrival, "at", ride.arrival.at - begin)
    return rides


# ---- what came out


def row_of(mode: str, story: Story, fallen: Fallen, simulated: Sequence[Ride]) -> Row:
    start, end = story.played(0.0, story.surge)
    inside = fallen.between(start, end)
    good = open_loop.in_time(inside, story.slo)
    would = sum(start <= ride.arrival.at < end and kept(ride, story) for ride in simulated)
    after = fallen.between(*story.played(story.surge + RECOVERY[0], story.surge + RECOVERY[1]))
    return Row(
        mode=mode,
        goodput_fraction=round(good / would, 4),
        p99_over_slo=round(open_loop.latency(inside, 0.99) / story.slo, 4),
        recovery_attainment=round(open_loop.in_time(after, story.slo) / max(1, len(after)), 4),
        goodput_rps=round(good / story.surge, 1),
        simulated_rps=round(would / story.surge, 1),
        surge_attainment=round(good / max(1, len(inside)), 4),
        generator_late=bool(fallen.late_because),
    )


def kept(ride: Ride, story: Story) -> bool:
    return ride.latency is not None and ride.latency <= story.slo


def as_json(story: Story, rows: Sequence[Row]) -> str:
    found: dict[str, object] = {
        row.mode: {name: value for name, value in asdict(row).items() if name != "mode"} for row in rows
    }
    return json.dumps({"scale": story.scale, **found}, indent=2)


def as_text(story: Story, rows: Sequence[Row]) -> str:
    lines = [
        f"{CALM:,.0f} → {SURGE:,.0f} → {CALM:,.0f} images/s for {story.before:g}, {story.surge:g} and "
        f"{story.after:g} s, SLO {SLO_MS:g} ms, {INSTANCES} instances; played {story.scale:g} times slower",
        "",
        "mode      in time in the surge   of what the promise   p99 of answered   in time 1–6 s after",
        "             images/s   share     gets, simulated          / SLO              the surge",
    ]
    lines += [
        f"{row.mode:<8} {row.goodput_rps:>12,.0f} {100 * row.surge_attainment:>6.1f} %"
        f"{row.goodput_fraction:>18.3f}{row.p99_over_slo:>20.3f}{100 * row.recovery_attainment:>19.1f} %"
        for row in rows
    ]
    promise = rows[-1]
    lines += ["", f"the simulated promise answers {promise.simulated_rps:,.0f} images/s in time"]
    met = (
        promise.goodput_fraction >= TARGETS["goodput_fraction"]
        and promise.p99_over_slo <= TARGETS["p99_over_slo"]
        and promise.recovery_attainment >= TARGETS["recovery_attainment"]
    )
    verdict = "kept" if met else "NOT kept"
    void = ", but void: the generator was late" if promise.generator_late else ""
    lines.append(f"the promise: ≥ 0.90, ≤ 1.05 and ≥ 99 %: {verdict}{void}")
    return "\n".join(lines)


def draw(path: Path, story: Story, fallen: dict[str, Fallen], simulated: Sequence[Ride]) -> None:
    from carpool.lab.plots import COLOURS, FAINT, INK, figure

    seconds = story.before + story.surge + story.after
    width = max(0.25, seconds / 120)
    bins = [width * (number + 0.5) for number in range(int(seconds / width))]

    def per_second(times: Sequence[float]) -> list[float]:
        counts = [0] * len(bins)
        for at in times:
            place = int(at / story.scale / width)
            if place < len(counts):
                counts[place] += 1
        return [count / width for count in counts]

    names = {
        "batch1": ("batch 1", "batch-1"),
        "knobs": ("10 ms, batches of 32", "knobs"),
        "promise": ("promise", "promise"),
    }
    with figure(path, width=9.0) as (axes,):
        offered = per_second([drop.at for drop in fallen["promise"].drops])
        axes.fill_between(bins, offered, color="#eef1f4", label="offered")
        for mode in MODES:
            label, colour = names[mode]
            drops = fallen[mode].drops
            good = [d.at for d in drops if d.latency is not None and d.latency <= story.slo]
            axes.plot(bins, per_second(good), color=COLOURS[colour], label=label)
        would = per_second([ride.arrival.at for ride in simulated if kept(ride, story)])
        axes.plot(bins, would, color=INK, linewidth=1.0, linestyle=":", label="promise, simulated")
        axes.axvspan(story.before, story.before + story.surge, color=FAINT, alpha=0.08)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, seconds)
        axes.set_xlabel("seconds of the incident")
        axes.set_title(f"Answered within {SLO_MS:g} ms, images/s: two instances through a surge")
        axes.legend(loc="upper right", fontsize=9)


if __name__ == "__main__":
    run_program(main, "surge", LoadError, CarpoolError)
