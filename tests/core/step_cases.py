"""Pipelines that the targets are about."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.objectives import FixedBatching, Promise
from carpool.sim.simulation import Outcome, Run, Scenario, measure, play
from carpool.sim.step_simulation import StepRide, read_steps


@dataclass(frozen=True)
class Case:
    steps: tuple[str, ...]
    slo: float
    shared: bool = False

    def scenario(self, load: float, seconds: float, seed: int, *, fixed: bool = False) -> Scenario:
        steps = read_steps(self.steps)
        settings = FixedBatching(64, max_delay=0.005) if fixed else Promise(self.slo, 64)
        scenario = Scenario(
            steps[0].curve,
            self.slo,
            settings,
            1.0,
            seconds=seconds,
            seed=seed,
            steps=steps,
            shared=self.shared,
        )
        return scenario.at_load(load)

    def outcome(self, load: float, seconds: float, seed: int, *, fixed: bool = False) -> Outcome:
        return measure(self.scenario(load, seconds, seed, fixed=fixed))

    def run(self, load: float, seconds: float, seed: int) -> Run:
        return play(self.scenario(load, seconds, seed))


CASES = {
    "two steps, 100 ms": Case(("4+1", "3+0.22@4.2"), 0.1),
    "two steps, 60 ms": Case(("4+1", "3+0.22@4.2"), 0.06),
    "one device": Case(("4+0.5", "3+0.5@4.2"), 0.1, shared=True),
    "three steps": Case(("4+1", "3+0.22@4.2", "2+0.3"), 0.1),
    "diamond": Case(("4+1", "3+0.5 after 1", "2+0.6 after 1", "1+0.2 after 2,3"), 0.1),
}
LEAST = {0.9: 0.92, 1.3: 0.92, 3.0: 0.87}
"""Of the bound, by load."""


def attainment_by_crops(run: Run, slo: float) -> tuple[float, float]:
    """Of requests with ten crops or more, and of those with two or fewer."""
    many, few = [], []
    for ride in run.rides:
        assert isinstance(ride, StepRide)
        if ride.arrival.at >= run.seconds / 10:
            in_time = ride.latency is not None and ride.latency <= slo
            if ride.images[1] >= 10:
                many.append(in_time)
            elif ride.images[1] <= 2:
                few.append(in_time)
    return sum(many) / len(many), sum(few) / len(few)
