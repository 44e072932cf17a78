"""What `carpool plan` and `carpool simulate` say before, beside what `carpool serve` does: is the lab right?

On a pretended device (16 ms + 4 ms per image, promise 200 ms), through real sockets:

    capacity    the highest rate of which 99 % are answered in time, by bisection, the median of three; beside
                the highest rate for which `carpool plan` asks for one replica
    p99         of what is answered at 0.5, 0.7 and 0.9 of the capacity that can be promised; beside the
                simulator's
    light load  at 5 % nobody waits for a batch to fill: p50 less the protocol, over the time of one image

The planner is told what a user can know. What the protocol takes: the median of requests for a second model
in the same server that takes no time, at the light load's rate and in the same seconds. Batch times and their
noise: what the server itself believes after half a minute of traffic, hand-over included, from its profile
document. Then four real models on the CPU, each profiled first on its own: a profile that other work
disturbed is taken again after a quiet moment, and in the end left out. There the generator, the front end and
the model share the cores: what a request takes of a core beside its inference, the generator's part included,
is measured at a light load, and the planner is told that and the number of cores.

A point is void when the generator was late, or when others took more than a few percent of the machine: after
a quiet moment it is measured again, a few times. What is void in the end is left out, and said.

    python benchmarks/prediction.py               # about half an hour
    python benchmarks/prediction.py --model nanodet   # one real model alone
    python benchmarks/prediction.py --no-real     # the pretended device only, about five
    python benchmarks/prediction.py --quick       # the same, shorter, within a minute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.objectives import Promise
from carpool.demo import bundled_models
from carpool.errors import CarpoolError
from carpool.lab.fleet_plan import ENOUGH, FleetQuestion, max_batch, suffices
from carpool.lab.machine_share import UNSHARED, Machine
from carpool.sim.simulation import Scenario, measure
from load import open_loop, processes
from load.burst import LoadError
from load.carpool_server import CarpoolServer, FakeModel, carpool_server, starting, wait_ready
from load.disturbance import Disturbance, is_quiet
from load.open_loop import Fallen, Shower
from load.program import run_program
from load.slices import wait_for_quiet

CURVE, SLO = "16+4", 0.2
NOTHING_MS = 0.01  # what the model for the protocol's share takes, twice
WARM_UP_S = 1.0  # not counted: the first seconds after a pause are easier
SIMULATED_S = 120.0
LOADS = (0.5, 0.7, 0.9)
LIGHT = 0.05
LEARNING = 0.7  # load at which a server learns its batch times
WITHIN = {"capacity": 0.05, "p99": 0.15, "light_load": 1.15}
WITHIN_REAL = {"capacity": 0.05, "p99": 0.15}
NINE_TENTHS = 1.28  # standard deviations: where the cautious speed lies
CORES = len(os.sched_getaffinity(0))
REAL = {"efficientnet_lite0": 0.1, "nanodet": 0.25, "open_nsfw": 0.25, "u2netp": 2.5}  # seconds of the SLO


@dataclass(frozen=True)
class Effort:
    seconds: float  # of a point
    steps: int  # of a bisection
    rounds: int  # of the loads
    light_s: float
    repeats: int = 3  # of what is void
    patience_s: float = 60.0  # for a quiet moment before that


FULL = Effort(seconds=25, steps=5, rounds=3, light_s=30)
QUICK = Effort(seconds=6, steps=3, rounds=1, light_s=5, repeats=0, patience_s=0.0)


@dataclass(frozen=True)
class Device:
    """What is asked of a model, and what the lab knows of it."""

    curve: BatchCurve
    slo: float
    noise: float = 0.0
    model: str = "fake"
    machine: Machine = UNSHARED

    @property
    def capacity(self) -> float:
        """Of the batches alone: load 1.0."""
        return slo_capacity(self.curve, self.slo, self.machine.instances)

    def planned(self) -> float:
        """The highest rate for which `carpool plan` asks for one replica."""
        low, high = 0.0, 1.2 * self.capacity
        while high - low > 0.005 * self.capacity:
            rate = (low + high) / 2
            asked = FleetQuestion(self.curve, self.slo, rate, noise=self.noise, machine=self.machine)
            one = suffices(asked, replicas=1)
            low, high = (rate, high) if one else (low, rate)
        return low

    def simulated_p99(self, rate: float) -> float:
        """Seconds."""
        promise = Promise(self.slo, max_batch(self.curve, self.slo))
        stalls = 0.002 if self.noise else 0.0
        scenario = Scenario(
            self.machine.curve(self.curve, rate),
            self.slo,
            promise,
            rate,
            seconds=SIMULATED_S,
            instances=self.machine.instances,
            noise=self.noise,
            stall_share=stalls,
            outside=self.machine.outside(rate),
        )
        return measure(scenario).p99_ms / 1e3


def main() -> int:
    args = parse_arguments()
    found: dict[str, object] = {} if args.model else pretended(QUICK if args.quick else FULL)
    if not args.quick and not args.no_real:
        found["real"] = [real(name, REAL[name], FULL) for name in args.model or REAL]
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter, and no real model: within a minute")
    parser.add_argument("--json", action="store_true", help="print one object for machines")
    parser.add_argument("--no-real", action="store_true", help="the pretended device only")
    parser.add_argument("--model", action="append", choices=list(REAL), help="this real model alone")
    return parser.parse_args()


# ---- the pretended device


def pretended(effort: Effort) -> dict[str, object]:
    """Three servers side by side: they only sleep, so that none takes anything from the others."""
    device = Device(BatchCurve.parse(CURVE, 64), SLO)
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(3):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="carpool-prediction-")))
            FakeModel(CURVE, 64, slo_ms=SLO * 1e3).write(folder)
            models = FakeModel(f"{NOTHING_MS:g}+{NOTHING_MS:g}", 1).write(folder, "nothing")
            servers.append(stack.enter_context(starting(models)))
        for server in servers:
            wait_ready(server)
        light = light_load(servers[0], device, effort)
        known_of = replace(
            learned(servers, device, effort), machine=Machine(protocol=light["protocol_ms"] / 1e3)
        )
        planned = known_of.planned()
        found = bisect(servers, device, planned, effort)
        seen = loads(servers, device, effort)
    p99 = [
        p99_row(device, load, seen[load], known_of.simulated_p99(load * device.capacity)) for load in LOADS
    ]
    known = [rate for rate in found if rate is not None]
    measured = median(known) if known else None
    off = None if measured is None else measured / planned - 1
    return {
        "curve": CURVE,
        "slo_ms": SLO * 1e3,
        "learned": {
            "curve": as_curve(known_of.curve.points),
            "noise": round(known_of.noise, 4),
        },
        "capacity": {
            "measured_rps": rounded(measured, 1),
            "planned_rps": round(planned, 1),
            "closed_form_rps": round(device.capacity, 1),
            "error": rounded(off),
            "each_rps": [rounded(rate, 1) for rate in found],
            "ok": off is not None and abs(off) <= WITHIN["capacity"],
        },
        "p99": p99,
        "light_load": light,
    }


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def as_curve(points: Sequence[tuple[int, float]]) -> str:
    return ",".join(f"{size}:{seconds * 1e3:.4g}" for size, seconds in points)


def learned(servers: Sequence[CarpoolServer], device: Device, effort: Effort) -> Device:
    """Batch times and their noise as the servers believe them after some traffic, the medians of them."""
    rate = LEARNING * device.capacity
    attempt(servers, [shower(one, device, rate, effort.light_s, seed=5) for one in servers], effort)
    documents = []
    for server in servers:
        with urllib.request.urlopen(f"{server.url}/v2/models/{device.model}/profile", timeout=10) as answer:
            documents.append(json.load(answer))
    points = [
        (int(sizes[0][0]), median(ms for _, ms in sizes) / 1e3)
        for sizes in zip(*(document["believed"] for document in documents), strict=True)
    ]
    speeds = [speed for document in documents for speed in document["speed"]["instances"]]
    noise = median(cautious / mean - 1 for mean, cautious in speeds) / NINE_TENTHS
    return replace(device, curve=BatchCurve.measured(points, device.curve.max_batch), noise=noise)


def attempt(servers: Sequence[CarpoolServer], showers: Sequence[Shower], effort: Effort) -> list[Fallen]:
    """All side by side; those that are void again, a few times, each after a quiet moment."""
    found = undisturbed(servers, showers)
    for repeat in range(1, effort.repeats + 1):
        late = [number for number, fallen in enumerate(found) if fallen.late_because]
        if not late:
            break
        wait_for_quiet(effort.patience_s)
        again = [replace(showers[number], seed=showers[number].seed + 1000 * repeat) for number in late]
        for number, fallen in zip(late, undisturbed(servers, again), strict=True):
            found[number] = fallen
    for fallen in found:
        for reason in fallen.late_because:
            print(f"void: {reason}", file=sys.stderr)
    return found


def undisturbed(servers: Sequence[CarpoolServer], showers: Sequence[Shower]) -> list[Fallen]:
    """Void, all of them, if somebody else used the machine meanwhile."""

    def cpu() -> dict[int, float]:
        trees = [processes.tree_cpu(server.process.pid) for server in servers]
        return {pid: seconds for tree in trees for pid, seconds in tree.items()}

    watched = Disturbance(cpu)
    found = open_loop.pour(showers)
    _, _, others = watched.read()
    if not is_quiet(others):
        reason = f"others took {others:.0%} of the machine"
        for fallen in found:
            fallen.late_because = (*fallen.late_because, reason)
    return found


def shower(server: CarpoolServer, device: Device, rate: float, seconds: float, seed: int) -> Shower:
    steps = ((rate, WARM_UP_S + seconds),)
    return Shower(server.url, steps, device.slo, timeout=10 * device.slo, seed=seed, model=device.model)


def bisect(
    servers: Sequence[CarpoolServer], device: Device, around: float, effort: Effort
) -> list[float | None]:
    """The highest rate with enough answered in time, once on each server; None where a point was void."""
    low, high = [0.8 * around] * len(servers), [1.15 * around] * len(servers)
    void = [False] * len(servers)
    for step in range(effort.steps):
        rates = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        showers = [
            shower(server, device, rate, effort.seconds, seed=10 * step + number)
            for number, (server, rate) in enumerate(zip(servers, rates, strict=True))
        ]
        for number, fallen in enumerate(attempt(servers, showers, effort)):
            void[number] |= bool(fallen.late_because)
            counted = fallen.between(WARM_UP_S, float("inf"))
            share = open_loop.in_time(counted, device.slo) / max(1, len(counted))
            if share >= ENOUGH:
                low[number] = rates[number]
            else:
                high[number] = rates[number]
    return [None if bad else (a + b) / 2 for a, b, bad in zip(low, high, void, strict=True)]


def loads(servers: Sequence[CarpoolServer], device: Device, effort: Effort) -> dict[float, list[float]]:
    """p99 at each load, on another server in each round, without those that are void."""
    seen: dict[float, list[float]] = {load: [] for load in LOADS}
    for turn in range(effort.rounds):
        pairs = [(servers[(number + turn) % len(servers)], load) for number, load in enumerate(LOADS)]
        groups = [pairs] if len(servers) >= len(LOADS) else [[pair] for pair in pairs]
        for group in groups:
            showers = [
                shower(server, device, load * device.capacity, effort.seconds, seed=100 + turn)
                for server, load in group
            ]
            for (_, load), fallen in zip(group, attempt(servers, showers, effort), strict=True):
                if not fallen.late_because:
                    seen[load].append(open_loop.latency(fallen.between(WARM_UP_S, float("inf")), 0.99))
    return seen


def p99_row(device: Device, load: float, seen: Sequence[float], simulated: float) -> dict[str, object]:
    measured = median(seen) if seen else None
    error = None if measured is None else measured / simulated - 1
    return {
        "load": load,
        "rate_rps": round(load * device.capacity, 1),
        "measured_ms": None if measured is None else round(measured * 1e3, 2),
        "simulated_ms": round(simulated * 1e3, 2),
        "error": rounded(error),
        "each_ms": [round(p99 * 1e3, 2) for p99 in seen],
        "ok": error is not None and abs(error) <= WITHIN["p99"],
    }


def light_load(server: CarpoolServer, device: Device, effort: Effort) -> dict[str, float | bool]:
    """At 5 % of the capacity; the protocol's share beside it, on the same server at the same time."""
    rate, alone = LIGHT * device.capacity, device.curve.times[1]
    showers = [
        shower(server, device, rate, effort.light_s, seed=1),
        shower(server, replace(device, model="nothing"), rate, effort.light_s, seed=2),
    ]
    ours, nothing = attempt([server], showers, effort)
    protocol = open_loop.latency(nothing.drops, 0.5) - 2 * NOTHING_MS / 1e3
    p50 = open_loop.latency(ours.drops, 0.5)
    ratio = (p50 - protocol) / alone
    return {
        "load": LIGHT,
        "rate_rps": round(rate, 2),
        "p50_ms": round(p50 * 1e3, 3),
        "batch1_ms": round(alone * 1e3, 3),
        "protocol_ms": round(protocol * 1e3, 3),
        "ratio": round(ratio, 4),
        "void": bool(ours.late_because or nothing.late_because),
        "ok": ratio <= WITHIN["light_load"],
    }


# ---- a real model


def real(name: str, slo: float, effort: Effort) -> dict[str, object]:
    """One of the demo's models: profiled first, on the idle machine, then served and loaded."""
    path = bundled_models() / name
    profile = profiled(path, slo)
    for _ in range(effort.repeats):
        if not profile["noisy"]:
            break
        wait_for_quiet(effort.patience_s)
        profile = profiled(path, slo)
    if profile["noisy"]:
        return {"model": name, "left_out": "its profile was disturbed, and nothing is planned with that"}
    points = [(int(row["batch"]), row["ms"] / 1e3) for row in profile["rows"]]
    noise = median(row["spread"] for row in profile["rows"]) / 1.35  # the middle half of a normal spread
    instances = int(profile["instances"])
    alone = Device(BatchCurve(points), slo, noise, name, Machine(instances=instances))
    shorter = replace(effort, seconds=15, rounds=3)
    with carpool_server(path, options=["--slo-ms", f"{slo * 1e3:g}"]) as server:
        busy = min(float(profile["infer_cores"]), CORES)
        beside = beside_the_batch(server, alone, busy, shorter)
        device = replace(alone, machine=Machine(CORES, busy, protocol=beside, instances=instances))
        planned = device.planned()
        if planned < 1.0:
            return {
                "model": name,
                "left_out": f"too noisy to plan for: batch times spread by {100 * noise:.0f} %",
            }
        served = device.machine.capacity(device.curve, slo) / device.capacity
        rates = replace(alone, curve=slower(alone.curve, 1 / served))
        simulated = {load: device.simulated_p99(load * rates.capacity) for load in LOADS}
        each = [bisect([server], device, planned, shorter)[0] for _ in range(3)]
        seen = loads([server], rates, shorter)
    rated = [rate for rate in each if rate is not None]
    found = median(rated) if rated else None
    off = None if found is None else found / planned - 1
    return {
        "model": name,
        "slo_ms": slo * 1e3,
        "curve": as_curve(points),
        "noise": round(noise, 4),
        "infer_cores": round(busy, 3),
        "beside_ms": round(beside * 1e3, 3),
        "capacity": {
            "measured_rps": rounded(found, 1),
            "planned_rps": round(planned, 1),
            "closed_form_rps": round(rates.capacity, 1),
            "error": rounded(off),
            "each_rps": [rounded(rate, 1) for rate in each],
            "ok": off is not None and abs(off) <= WITHIN_REAL["capacity"],
        },
        "p99": [p99_row(rates, load, seen[load], simulated[load]) for load in LOADS],
    }


def slower(curve: BatchCurve, factor: float) -> BatchCurve:
    return BatchCurve([(size, seconds * factor) for size, seconds in curve.points], curve.max_batch)


def beside_the_batch(server: CarpoolServer, device: Device, busy: float, effort: Effort) -> float:
    """Seconds of a core that a request takes beside its inference, of the server and of the generator, at a
    light load, where every batch is of one image."""
    rate = LIGHT * device.capacity
    each = busy / device.machine.instances  # cores of one instance
    before = processes.tree_cpu(server.process.pid)
    (fallen,) = open_loop.pour([shower(server, device, rate, effort.light_s, seed=3)])
    spent = processes.spent(before, processes.tree_cpu(server.process.pid))
    generator = fallen.generator_core_share * (WARM_UP_S + effort.light_s)
    return max(0.0, (spent + generator) / max(1, len(fallen.drops)) - each * device.curve.times[1])


def profiled(path: Path, slo: float) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("carpool")), "profile", str(path), "--json"]
    done = subprocess.run(
        [*command, "--slo-ms", f"{slo * 1e3:g}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LoadError(f"carpool profile failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- what came out


def as_text(found: dict[str, object]) -> str:
    lines = as_text_of_pretended(found) if "learned" in found else []
    listed = found.get("real", [])
    assert isinstance(listed, list)
    for one in listed:
        lines += ["", *as_text_of_real(one)]
    return "\n".join(lines)


def as_text_of_pretended(found: dict[str, object]) -> list[str]:
    known, light = found["learned"], found["light_load"]
    assert isinstance(known, dict)
    assert isinstance(light, dict)
    return [
        f"a device of {found['curve']} ms, promise {found['slo_ms']:g} ms; its servers believe "
        f"{known['curve']} ms, noise {100 * known['noise']:.1f} %",
        "",
        *compared(found),
        "",
        f"light load: {light['rate_rps']:g}/s ({100 * LIGHT:g} %): p50 {light['p50_ms']:g} ms, of which the "
        f"protocol {light['protocol_ms']:g}; the rest is {light['ratio']:.3f} × the "
        f"{light['batch1_ms']:g} ms of one image (≤ {WITHIN['light_load']}: {said(light['ok'])})",
    ]


def as_text_of_real(real: dict[str, Any]) -> list[str]:
    if "left_out" in real:
        return [f"{real['model']} on the CPU: left out, {real['left_out']}"]
    return [
        f"{real['model']} on the CPU, promise {real['slo_ms']:g} ms, curve {real['curve']}, noise "
        f"{100 * real['noise']:.1f} %",
        f"the generator, the front end and the model share {CORES} cores: a batch keeps "
        f"{real['infer_cores']:g} busy, and a request takes {real['beside_ms']:g} ms of one beside it",
        "",
        *compared(real, WITHIN_REAL),
    ]


def compared(found: dict[str, object], within: Mapping[str, float] = WITHIN) -> list[str]:
    capacity, p99 = found["capacity"], found["p99"]
    assert isinstance(capacity, dict)
    assert isinstance(p99, list)
    lines = [f"{'':<22} {'measured':>10} {'predicted':>10} {'off by':>8}"]
    rows = [("capacity, images/s", capacity["measured_rps"], capacity["planned_rps"], capacity)]
    rows += [
        (f"p99 at {row['load']:g} ({row['rate_rps']:g}/s), ms", row["measured_ms"], row["simulated_ms"], row)
        for row in p99
    ]
    for name, measured, predicted, row in rows:
        if measured is None:
            lines.append(f"{name:<22} {'void':>10} {predicted:>10,.1f}")
            continue
        bound = within["capacity" if row is capacity else "p99"]
        verdict = f"  within {100 * bound:g} %: {said(row['ok'])}"
        lines.append(
            f"{name:<22} {measured:>10,.1f} {predicted:>10,.1f} {100 * row['error']:>+6.1f} %{verdict}"
        )
    closed = capacity["closed_form_rps"]
    lines.append(f"(the closed form of what can be promised is {closed:,.0f}/s: load 1.0)")
    return lines


def said(ok: object) -> str:
    return "yes" if ok else "NO"


if __name__ == "__main__":
    run_program(main, "prediction", LoadError, CarpoolError)
