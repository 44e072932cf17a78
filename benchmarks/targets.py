"""What the scheduler must reach, simulated: every target with the mean over seeds, and whether it is met.

tests/core/test_targets.py asks the same of shorter runs, with looser bounds. Nothing here depends on the
machine: the clock is virtual, and a seed gives the same numbers everywhere.

    python benchmarks/targets.py            # five seeds of 30 s each, one process per core
    python benchmarks/targets.py --quick    # two of 8 s: a look, not a verdict
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from core.text_cases import SLOTS, TEXTS

from carpool.core.curve import BatchCurve, fluid_bound, slo_capacity
from carpool.core.objectives import Promise
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Device, Scenario, report
from carpool.sim.simulation import play as simulate
from core.clairvoyant import most_answered_in_time
from core.playing import NAMED, attainment, named, play, play_poisson, stream, together
from core.shadowing import play_shadowed
from core.step_cases import CASES, LEAST, attainment_by_crops

WIDE, WIDE_SLO = (0.005, 0.001), 0.072  # fixed cost of five images, promise of twelve single ones


@dataclass(frozen=True)
class Effort:
    seeds: int
    seconds: float
    requests: int  # fewer seconds where more than this would come


FULL = Effort(5, 30.0, 100_000)
QUICK = Effort(2, 8.0, 8_000)

Values = list[float]


@dataclass(frozen=True)
class Target:
    """`measure` takes a seed and says one number for each of the bounds, by name."""

    name: str
    bounds: tuple[tuple[str, str, float], ...]  # what, ≥ or ≤, how much
    measure: Callable[[Effort, int], Values]


@dataclass(frozen=True)
class Row:
    target: str
    what: str
    value: float
    worst: float
    sign: str
    bound: float

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.sign == "≥" else self.value <= self.bound


def targets() -> Iterator[Target]:
    yield from (three_times(name) for name in NAMED)
    least = {"4+1/50": 0.98, "resnet/30": 0.955, "resnet/100": 0.995, "yolo/100": 0.995}
    for name, bound in least.items():
        yield Target(f"{name} at 0.9×", (("in time", "≥", bound),), partial(in_time, *named(name), 0.9, 1))
    for scale, instances in ((1, 2), (1, 4), (4, 2), (4, 4), (20, 4)):
        curve = BatchCurve.linear(WIDE[0] * scale, WIDE[1] * scale)
        title = f"{5 * scale}+{scale}/{72 * scale}, {instances} instances at 1.0×"
        found = partial(in_time, curve, WIDE_SLO * scale, 1.0, instances)
        yield Target(title, (("in time", "≥", 0.98),), found)
    bounds = (("of a clairvoyant", "≥", 0.98), ("in time, with noise", "≥", 0.96))
    yield Target("5+1/72, 1 instance at 1.0×", bounds, beside_a_clairvoyant)
    for name in ("4+1/50", "resnet/30", "resnet/100"):
        yield Target(f"{name}: a protected tenth at 3×", (("in time", "≥", 0.999),), partial(protected, name))
        for names in (1, 1000):
            title = f"{name}: a modest source beside a flood of {names}"
            yield Target(title, (("in time", "≥", 0.97),), partial(modest, name, names))
    yield from of_pipelines()
    yield from of_texts()
    for name in ("4+1/50", "resnet/100", "yolo/100"):
        for load in (0.3, 0.6, 0.9, 1.0, 3.0):
            for share in (0.05, 1.0):
                title = f"{name} at {load}×, {share:.0%} also in a shadow"
                yield Target(title, beside_alone(load), partial(shadowed, name, load, share))


def of_pipelines() -> Iterator[Target]:
    for name, case in CASES.items():
        for load, least in LEAST.items():
            waste = (("step 1 wasted", "≤", 0.05),) if case.shared else ()
            bounds = (("of the fluid bound", "≥", least), *waste)
            yield Target(f"pipeline, {name}, at {load:g}×", bounds, partial(pipeline, name, load))
    fair = (("many crops, of few", "≥", 0.8),)
    for name in ("two steps, 60 ms", "one device"):
        yield Target(f"pipeline, {name}, at 3×", fair, partial(many_crops, name))


def of_texts() -> Iterator[Target]:
    """Answers that are written token by token, in slots, beside static batches of as many."""
    for name, case in TEXTS.items():
        bounds = (
            ("× static batches", "≥", case.gain),
            ("first token, of theirs", "≤", case.first),
            ("in time at 1.5×", "≥", 0.9),
            ("first token, encoder apart", "≤", 2 / 3),
        )
        yield Target(f"{name}, {SLOTS} slots", bounds, partial(written, name))


def beside_alone(load: float) -> tuple[tuple[str, str, float], ...]:
    """From capacity on there is no shadow, and every answer takes what it takes alone."""
    least = 1.0 if load >= 1.0 else 0.995
    later = 0.0 if load >= 1.0 else 0.1
    return ("of the goodput alone", "≥", least), ("p99 later, of the promise", "≤", later)


def three_times(name: str) -> Target:
    curve, slo = named(name)
    rate = 3 * slo_capacity(curve, slo)

    def measure(effort: Effort, seed: int) -> Values:
        run = play_poisson(curve, slo, 3.0, seconds=long(effort, rate), seed=seed)
        bound = fluid_bound(curve, slo, rate)
        p99 = run.p99_ms / 1e3 / slo
        return [run.goodput_rps / bound, p99, run.wasted_fraction, run.shed_at_arrival_fraction]

    bounds = (
        ("of the fluid bound", "≥", 0.95),
        ("p99 over the promise", "≤", 1.01),
        ("wasted", "≤", 0.03),
        ("sheds at arrival", "≥", 0.80),
    )
    return Target(f"{name} at 3×", bounds, measure)


def long(effort: Effort, rate: float) -> float:
    """Slow traffic for longer, so that as many come; fast traffic for as long as they are enough."""
    return min(max(effort.seconds, effort.requests / 4 / rate), effort.requests / rate)


def in_time(curve: BatchCurve, slo: float, load: float, instances: int, effort: Effort, seed: int) -> Values:
    seconds = long(effort, load * slo_capacity(curve, slo, instances))
    return [play_poisson(curve, slo, load, seconds=seconds, seed=seed, instances=instances).attainment]


def beside_a_clairvoyant(effort: Effort, seed: int) -> Values:
    """Without noise, on the same arrivals as somebody who knows the future; then with noise, and longer."""
    curve = BatchCurve.linear(*WIDE)
    arrivals = poisson(slo_capacity(curve, WIDE_SLO), 4.0, Random(seed))
    run, _ = play(curve, WIDE_SLO, arrivals, device=Device(curve, noise=0.0, stall_share=0.0))
    answered = sum(ride.latency is not None and ride.latency <= WIDE_SLO for ride in run.rides)
    best = most_answered_in_time([arrival.at for arrival in arrivals], curve, WIDE_SLO)
    return [answered / best, *in_time(curve, WIDE_SLO, 1.0, 1, effort, seed)]


def protected(name: str, effort: Effort, seed: int) -> Values:
    curve, slo = named(name)
    capacity, random = slo_capacity(curve, slo), Random(seed)
    urgent = stream(0.3 * capacity, effort.seconds, random, priority=1)
    rest = stream(2.7 * capacity, effort.seconds, random)
    run, _ = play(curve, slo, together(urgent, rest), seed=seed)
    return [attainment(run, slo, 2, effort.seconds - 1, lambda arrival: arrival.priority == 1)]


def modest(name: str, names: int, effort: Effort, seed: int) -> Values:
    curve, slo = named(name)
    capacity, random = slo_capacity(curve, slo), Random(seed)
    few = stream(0.3 * capacity, effort.seconds, random, source="modest")
    flood = stream(2.7 * capacity, effort.seconds, random, source="flood", names=names)
    run, _ = play(curve, slo, together(few, flood), seed=seed)
    return [attainment(run, slo, 2, effort.seconds - 1, lambda arrival: arrival.source == "modest")]


def pipeline(name: str, load: float, effort: Effort, seed: int) -> Values:
    case = CASES[name]
    seconds = long(effort, load * case.scenario(1.0, 1.0, 0).capacity)
    found = case.outcome(load, seconds, seed)
    wasted = [found.steps[0]["wasted_fraction"]] if case.shared else []
    return [found.fraction_of_bound, *wasted]


def written(name: str, effort: Effort, seed: int) -> Values:
    case, requests = TEXTS[name], effort.requests // 4
    seed += 1
    return [
        case.gained(SLOTS, seed),
        case.first_token(SLOTS, seed, requests),
        case.overloaded(SLOTS, seed, requests),
        case.apart(SLOTS, seed, requests),
    ]


def many_crops(name: str, effort: Effort, seed: int) -> Values:
    """Requests with ten or more beside those with two or fewer."""
    case = CASES[name]
    seconds = long(effort, 3 * case.scenario(1.0, 1.0, 0).capacity)
    many, few = attainment_by_crops(case.run(3.0, seconds, seed), case.slo)
    return [many / few]


def shadowed(name: str, load: float, share: float, effort: Effort, seed: int) -> Values:
    curve, slo = named(name)
    scenario = Scenario(curve, slo, Promise(slo, curve.max_batch), 0.0, seed=seed).at_load(load)
    scenario = replace(scenario, seconds=long(effort, scenario.rate))
    alone = report(simulate(scenario), slo, 1)
    beside = report(play_shadowed(scenario, share)[0], slo, 1)
    return [beside.goodput_rps / alone.goodput_rps, (beside.p99_ms - alone.p99_ms) / 1e3 / slo]


def measured(task: tuple[int, int, Effort]) -> tuple[int, Values]:
    number, seed, effort = task
    return number, list(targets())[number].measure(effort, seed)


def rows(effort: Effort, processes: int) -> Iterator[Row]:
    asked = list(targets())
    tasks = [(number, seed, effort) for number in range(len(asked)) for seed in range(effort.seeds)]
    found: dict[int, list[Values]] = {number: [] for number in range(len(asked))}
    with get_context("spawn").Pool(processes) as pool:
        for number, values in pool.imap_unordered(measured, tasks):
            found[number].append(values)
    for number, target in enumerate(asked):
        for (what, sign, bound), values in zip(target.bounds, zip(*found[number], strict=True), strict=True):
            worst = min(values) if sign == "≥" else max(values)
            yield Row(target.name, what, mean(values), worst, sign, bound)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two short seeds: a look, not a verdict")
    parser.add_argument("--json", action="store_true", help="print one row per target for machines")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    found = list(rows(QUICK if args.quick else FULL, args.processes))
    if args.json:
        print(json.dumps([asdict(row) | {"met": row.met} for row in found], indent=2))
    else:
        width = max(len(row.target) for row in found)
        print(f"{'':<{width}} {'':<22} {'mean':>7} {'worst':>7} {'target':>8}")
        for row in found:
            verdict = "" if row.met else "  MISSED"
            numbers = f"{row.value:>7.4f} {row.worst:>7.4f} {row.sign:>2} {row.bound:<5g}"
            print(f"{row.target:<{width}} {row.what:<22} {numbers}{verdict}")
    return 0 if args.quick or all(row.met for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
