"""Predicts a sweep: finds out how long batches take, and simulates every rate with that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from carpool.core.curve import BatchCurve, CurveError, slo_capacity
from carpool.core.numerals import numeral
from carpool.core.objectives import FixedBatching, Promise
from carpool.errors import InvalidInput, Unreachable
from carpool.lab.load.aim import Aim, http_facts, read_url, take_aim
from carpool.lab.load.generator import run
from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.sweep.sweep_runs import AS_IS, Setting, Watcher
from carpool.link.typed_json import read_document, write_document
from carpool.sim.simulation import Scenario, measure
from carpool.sim.step_simulation import capacity, read_steps

GIVEN, SERVER, TRIAL = "given with --curve", "measured by the server", "measured in a short trial"
STEPS_GIVEN = "given with --step"
_TRIALS = (1, 4, 16)  # clients that ask at the same time
_TRIAL_S, _THINK_S = 1.5, 0.002
_LARGEST = 4096  # batch that is accepted as plausible
_ENOUGH = 3  # answers in batches of a size


@dataclass(frozen=True, slots=True)
class CurveEstimate:
    """Holds what the prediction rests on. `slo_ms` and `max_delay_ms` are the server's own, where it reports
    them."""

    curve: BatchCurve
    instances: int
    source: str
    slo_ms: float | None = None
    max_delay_ms: float | None = None
    steps: tuple[str, ...] = ()  # of a pipeline, as `--step` takes them; the curve is that of the first

    def capacity(self, slo_ms: float) -> float:
        """What `carpool plan` says can be promised, in images per second."""
        if self.steps:
            return capacity(read_steps(self.steps), slo_ms / 1e3, self.instances)
        return slo_capacity(self.curve, slo_ms / 1e3, self.instances)

    @property
    def text(self) -> str:
        """As `--curve` takes it, or `--step` each part."""
        if self.steps:
            return " → ".join(self.steps)
        return ",".join(f"{size}:{seconds * 1e3:.4g}" for size, seconds in self.curve.points)


@dataclass(frozen=True, slots=True)
class SweepBasis:
    """Holds `rates` in requests per second, each with its load."""

    model: str
    slo_ms: float
    rates: list[tuple[float, float | None]]
    belief: CurveEstimate
    requests: str  # what is sent, in words

    def as_json(self) -> Any:
        return json.loads(write_document(self))


def read_basis(document: Any) -> SweepBasis:
    try:
        return read_document(SweepBasis, json.dumps(document).encode())
    except ValueError:
        raise InvalidInput("--out: its sweep.json is damaged: name a new folder") from None


def rates_of(
    rates: Sequence[float], loads: Sequence[float], belief: CurveEstimate, slo_ms: float
) -> list[tuple[float, float | None]]:
    """Returns what to offer, in requests per second, each with its load; `loads` count where there are no
    `rates`."""
    most = belief.capacity(slo_ms)
    if rates:
        return [(rate, float(f"{rate / most:.3g}") if most else None) for rate in rates]
    if not most:
        alone = belief.curve.times[1] * 1e3
        raise InvalidInput(
            f"no batch meets an SLO of {slo_ms:g} ms, because one image takes {numeral(alone)} ms: give "
            f"--slo-ms {2 * alone:.3g} or more, or --rates instead of --loads"
        )
    return [(float(f"{load * most:.4g}"), load) for load in loads]


def ask_server(aim: Aim) -> CurveEstimate | None:
    """Reads the server's profile of the model; None if it has none."""
    address = read_url(aim.url)
    if address.over_grpc or not aim.model:
        return None
    try:
        return read_profile(http_facts(address, aim.trust).profile(aim.model))
    except Unreachable:
        return None


def read_profile(document: Any) -> CurveEstimate | None:
    """Reads a profile; what another server answers there may be anything."""
    try:
        points = [(int(size), float(ms) / 1e3) for size, ms in document["curve"]]
        instances = int(document["instances"])
        promise, fixed = document.get("promise"), document.get("knobs")
        slo_ms = float(promise["slo_ms"]) if promise else None
        delay = float(fixed["max_delay_ms"]) if fixed else None
        largest = min(max(int(document.get("max_batch", 1)), *(size for size, _ in points)), _LARGEST)
        return CurveEstimate(BatchCurve.measured(points, largest), max(1, instances), SERVER, slo_ms, delay)
    except (TypeError, KeyError, ValueError, AttributeError, CurveError):
        return None


async def try_out(aim: Aim, max_batch: int | None) -> CurveEstimate:
    """Ask with a few clients at once and look at the times that the answers carry."""
    seen = Watcher(0)
    for clients in _TRIALS:
        plan = Plan(Closed(clients, seconds=_TRIAL_S, think=_THINK_S))
        await run(plan, take_aim(aim), record=seen)
    return from_answers(seen, max_batch)


def from_answers(seen: Watcher, max_batch: int | None) -> CurveEstimate:
    points = [
        (size, infer.percentile(0.5))
        for size, infer in sorted(seen.infer.items())
        if infer.count >= max(_ENOUGH, size) and infer.percentile(0.5) > 0
    ]
    if not points:
        raise Unreachable(
            "the server's responses have no batch times, so nothing can be planned: give --curve, like "
            "4+1, or --rates"
        )
    largest = max(points[-1][0], max_batch or 1)
    return CurveEstimate(BatchCurve.measured(points, largest), 1, TRIAL)


_BETWEEN = 8  # rates of the line, besides those that are measured
_MOST_REQUESTS = 20_000
_SEEDS, _FEW = 3, 1000  # so many runs where one would hold few requests


@dataclass(frozen=True, slots=True)
class Predicted:
    """One simulated point; the field names are the keys of `prediction` in results.json."""

    setting: str
    rate: float
    offered_rps: float  # by the luck of the simulated arrivals
    goodput_rps: float
    attainment: float
    p99_ms: float


def predict(
    settings: Sequence[Setting], rates: Sequence[float], belief: CurveEstimate, slo_ms: float, seconds: float
) -> list[Predicted]:
    """Predicts for as long as the measured runs: a queue that grows without a promise grows for as long as
    they last.

    At the measured rates, and in steps from a small one to the highest. A server that does not say how it
    batches is taken for one that keeps a promise.
    """
    top = max(rates)
    line = sorted({*rates, *(top * (step + 1) / _BETWEEN for step in range(_BETWEEN))})
    found = []
    for setting, rate in product(settings, line):
        largest = setting.max_batch or belief.curve.max_batch
        policy: Promise | FixedBatching = Promise((setting.slo_ms or slo_ms) / 1e3, largest)
        delay_ms = belief.max_delay_ms if setting.kind == AS_IS else setting.max_delay_ms
        if delay_ms is not None:
            policy = FixedBatching(largest, max_delay=delay_ms / 1e3)
        lasts = min(max(seconds, 4 * slo_ms / 1e3, 20 / rate), _MOST_REQUESTS / rate)
        scenario = Scenario(
            BatchCurve(belief.curve.points, largest),
            slo_ms / 1e3,
            policy,
            rate,
            instances=belief.instances,
            seconds=lasts,
            seeds=_SEEDS if lasts * rate < _FEW else 1,
            steps=read_steps(belief.steps),
        )
        out = measure(scenario)
        values = (out.offered_rps, out.goodput_rps, out.attainment, out.p99_ms)
        found.append(Predicted(setting.name, rate, *values))
    return found
