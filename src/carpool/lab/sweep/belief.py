"""How long the model's batches take: as somebody says, as the server measured, or as a short trial shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from carpool.core.capacity import slo_capacity
from carpool.core.curve import BatchCurve, CurveError
from carpool.engine.numerals import numeral
from carpool.errors import InvalidInput
from carpool.lab.load.aim import Aim, http_facts, read_url, take_aim
from carpool.lab.load.facts import Unreachable
from carpool.lab.load.plan import Closed, Plan
from carpool.lab.load.run import run
from carpool.lab.sweep.measured import Watcher

GIVEN, SERVER, TRIAL = "given with --curve", "measured by the server", "seen in a short trial"
_TRIALS = (1, 4, 16)  # clients that ask at the same time
_TRIAL_S, _THINK_S = 1.5, 0.002
_LARGEST = 4096  # batch that anybody believes
_ENOUGH = 3  # answers in batches of a size


@dataclass(frozen=True, slots=True)
class Belief:
    """What the prediction rests on. `slo_ms` and `max_delay_ms` are the server's own, where it tells."""

    curve: BatchCurve
    instances: int
    source: str
    slo_ms: float | None = None
    max_delay_ms: float | None = None

    def capacity(self, slo_ms: float) -> float:
        """What `carpool plan` says can be promised, in images per second."""
        return slo_capacity(self.curve, slo_ms / 1e3, self.instances)

    @property
    def text(self) -> str:
        """As `--curve` takes it."""
        return ",".join(f"{size}:{seconds * 1e3:.4g}" for size, seconds in self.curve.points)


def rates_of(
    rates: Sequence[float], loads: Sequence[float], belief: Belief, slo_ms: float
) -> list[tuple[float, float | None]]:
    """What to offer, in requests per second, each with its load; `loads` count where there are no `rates`."""
    capacity = belief.capacity(slo_ms)
    if rates:
        return [(rate, float(f"{rate / capacity:.3g}") if capacity else None) for rate in rates]
    if not capacity:
        alone = belief.curve.times[1] * 1e3
        raise InvalidInput(
            f"nothing can be promised within {slo_ms:g} ms, since one image takes {numeral(alone)} ms: "
            f"give --slo-ms {2 * alone:.3g} or more, or --rates instead of --loads",
            field="--slo-ms",
        )
    return [(float(f"{load * capacity:.4g}"), load) for load in loads]


def ask_server(aim: Aim) -> Belief | None:
    """From the server's profile of the model; None if it has none to tell."""
    address = read_url(aim.url)
    if address.over_grpc or not aim.model:
        return None
    try:
        return read_profile(http_facts(address, aim.trust).profile(aim.model))
    except Unreachable:
        return None


def read_profile(document: Any) -> Belief | None:
    """What another server answers there may be anything."""
    try:
        points = [(int(size), float(ms) / 1e3) for size, ms in document["curve"]]
        instances = int(document["instances"])
        promise, knobs = document.get("promise"), document.get("knobs")
        slo_ms = float(promise["slo_ms"]) if promise else None
        delay = float(knobs["max_delay_ms"]) if knobs else None
        largest = min(max(int(document.get("max_batch", 1)), *(size for size, _ in points)), _LARGEST)
        return Belief(BatchCurve.measured(points, largest), max(1, instances), SERVER, slo_ms, delay)
    except (TypeError, KeyError, ValueError, AttributeError, CurveError):
        return None


async def try_out(aim: Aim, max_batch: int | None) -> Belief:
    """Ask with a few clients at once and look at the times that the answers carry."""
    seen = Watcher(0)
    for clients in _TRIALS:
        plan = Plan(Closed(clients, seconds=_TRIAL_S, think=_THINK_S))
        await run(plan, take_aim(aim), record=seen.record)
    return from_answers(seen, max_batch)


def from_answers(seen: Watcher, max_batch: int | None) -> Belief:
    points = [
        (size, infer.percentile(0.5))
        for size, infer in sorted(seen.infer.items())
        if infer.count >= max(_ENOUGH, size) and infer.percentile(0.5) > 0
    ]
    if not points:
        raise Unreachable(
            "the server's answers do not say how long batches took, so nothing can be planned: "
            "give --curve, like 4+1, or --rates"
        )
    largest = max(points[-1][0], max_batch or 1)
    return Belief(BatchCurve.measured(points, largest), 1, TRIAL)
