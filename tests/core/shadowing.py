"""Production and a shadow on one device: a candidate gets a share of the traffic, too, as background work."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random

from carpool.core.arbiter import Arbiter
from carpool.core.background import BackgroundTurn
from carpool.core.instance import Batch
from carpool.core.job import Job
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival
from carpool.sim.simulation import Device, Run, Scenario, Simulation


@dataclass
class ShadowedSimulation(Simulation):
    """`scheduler` is production's. Whoever is copied is drawn from a stream of its own, and so is what the
    candidate's batches take: production's luck is the same with and without a shadow."""

    candidate: Scheduler | None = None  # None: the same model runs it again
    share: float = 1.0
    shared_device: bool = True  # else both run as they like, as models on processors do
    background: BackgroundTurn = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        arbiter = Arbiter(exclusive=self.shared_device)
        arbiter.join(self.scheduler, list(self.scheduler.instances))
        runs_it = self.candidate or self.scheduler
        self.background = runs_it.background = arbiter.join_background(runs_it, list(runs_it.instances))
        self._drawn, self._background_random = Random(self.seed + 1), Random(self.seed + 2)
        self.copied = 0

    def _offer(self, arrival: Arrival) -> None:
        super()._offer(arrival)
        if self._drawn.random() < self.share:
            self.copied += 1
            self.background.offer(Job(arrival.at, images=arrival.images), arrival.at)

    def _advance(self, until: float, look_again: float | None) -> float | None:
        if until == inf:  # what is left of the traffic says nothing about the load
            for job in self.background.everybody():
                self.background.cancel(job)
        return super()._advance(until, look_again)

    def _act(self, now: float) -> float | None:
        look_again = super()._act(now)
        if self.candidate is None:
            return look_again
        decision = self.candidate.decide(now)  # it has one instance
        if decision.batch is not None:
            self._run_batch(decision.batch, now)
        looks = (look_again, decision.look_again)
        return min((look for look in looks if look is not None), default=None)

    def _seconds(self, batch: Batch, now: float) -> float:
        random = self._background_random if batch.turn is self.background else self._random
        return self.device.seconds(batch.images, batch.instance.index, now, random)

    def _finish(self, batch: Batch, now: float) -> None:
        if batch.turn is self.background:
            self.background.finished(batch, now, now - batch.started)
        else:
            super()._finish(batch, now)


def play_shadowed(
    scenario: Scenario, share: float, *, candidate: bool = True, shared_device: bool = True
) -> tuple[Run, float]:
    """Production's run with so much of its traffic copied to a candidate with the same curve, or to the same
    model once more; and the part of the copies that was run."""
    arrivals = list(scenario.traffic.arrivals(scenario.rate, scenario.seconds, Random(scenario.seed)))
    simulation = ShadowedSimulation(
        Scheduler(scenario.curve, scenario.settings, scenario.instances),
        Device(scenario.device_curve(), scenario.noise, scenario.stall_share, scenario.stall_factor),
        slo=scenario.slo,
        seed=scenario.seed,
        latest=scenario.latest,
        outside=scenario.outside,
        candidate=Scheduler(scenario.curve, scenario.settings) if candidate else None,
        share=share,
        shared_device=shared_device,
    )
    run = simulation.play(arrivals)
    return run, simulation.background.ran / max(1, simulation.copied)
