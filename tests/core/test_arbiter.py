"""Several models on one device, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.arbiter import Arbiter
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.instance import Batch
from carpool.core.job import Job
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival, poisson
from carpool.sim.simulation import Device, Report, Run, Simulation, report
from core.playing import RESNET
from later import later, many


@dataclass
class Model:
    """What one of them is and what is asked of it."""

    curve: BatchCurve
    slo: float
    arrivals: list[Arrival]
    weight: float = 1.0
    fixed: FixedBatching | None = None
    instances: int = 1
    simulation: Simulation = field(init=False)
    used: float = 0.0

    def start(self, arbiter: Arbiter | None, seed: int) -> None:
        policy = self.fixed or Promise(self.slo, self.curve.max_batch)
        scheduler = Scheduler(self.curve, policy, self.instances)
        self.simulation = Simulation(scheduler, Device(self.curve), slo=self.slo, seed=seed)
        if arbiter is not None:
            arbiter.join(scheduler, list(scheduler.instances), self.weight)


class Together:
    """All of them on one device, event by event; everybody decides again after each."""

    def __init__(self, models: list[Model], seed: int) -> None:
        arbiter = Arbiter()
        for number, model in enumerate(models):
            model.start(arbiter, seed + number)
        self.models = models
        self.random = Random(seed)
        self.arrivals = sorted(
            ((a.at, n, a) for n, model in enumerate(models) for a in model.arrivals), key=lambda e: e[:2]
        )
        self.arrivals.reverse()
        self.running: list[tuple[float, Model, Batch]] = []
        self.looks: list[float] = [inf] * len(models)
        self.now = 0.0

    @property
    def waiting(self) -> int:
        return sum(model.simulation.scheduler.lanes.requests for model in self.models)

    def play(self) -> None:
        while self.arrivals or self.running or self.waiting:
            arrives = self.arrivals[-1][0] if self.arrivals else inf
            ends = min((end for end, _, _ in self.running), default=inf)
            at = min(arrives, ends, *self.looks)
            assert at < inf, "somebody waits for a turn that never comes"
            self.now = max(self.now, at)
            if ends <= self.now:
                entry = min(self.running, key=lambda e: e[0])
                self.running.remove(entry)
                entry[1].simulation._finish(entry[2], self.now)
            elif arrives <= self.now:
                _, number, arrival = self.arrivals.pop()
                self.models[number].simulation._offer(arrival)
            while any(self.decides(number, model) for number, model in enumerate(self.models)):
                """A batch that started may have made room for a decision elsewhere."""

    def decides(self, number: int, model: Model) -> bool:
        """True when it started a batch."""
        decision = model.simulation.scheduler.decide(self.now)
        for gone in decision.given_up:
            gone.job.payload.given_up = True
        self.looks[number] = inf if decision.look_again is None else decision.look_again
        if decision.batch is None:
            return False
        batch = decision.batch
        took = model.simulation.device.seconds(batch.images, batch.instance.index, self.now, self.random)
        self.running.append((self.now + took, model, batch))
        model.used += took
        return True


def play_together(models: list[Model], seconds: float, *, seed: int = 1) -> list[Report]:
    Together(models, seed).play()
    runs: list[Run] = [model.simulation.run for model in models]
    for run in runs:
        run.seconds = seconds
    return [report(run, model.slo, 1) for run, model in zip(runs, models, strict=True)]


def resnet(load: float, seconds: float, seed: int, slo: float = 0.1, weight: float = 1.0) -> Model:
    curve = BatchCurve.parse(RESNET, 64)
    rate = load * slo_capacity(curve, slo)
    return Model(curve, slo, poisson(rate, seconds, Random(seed)), weight)


@pytest.mark.parametrize("seed", [1, later(2)])
def test_a_flooded_model_does_not_starve_a_modest_one(seed: int) -> None:
    flooded, modest = resnet(3.0 / 2, 10.0, seed), resnet(0.3 / 2, 10.0, seed + 100)
    reports = play_together([flooded, modest], 10.0, seed=seed)
    assert reports[1].attainment >= 0.97


@pytest.mark.conformance
@pytest.mark.parametrize("flood", [3.0, later(6.0)])
def test_even_three_times_the_whole_device_does_not(flood: float) -> None:
    flooded, modest = resnet(flood, 5.0, 5), resnet(0.15, 5.0, 6)
    reports = play_together([flooded, modest], 5.0)
    assert reports[1].attainment >= 0.97
    assert reports[0].goodput_rps >= 0.6 * slo_capacity(flooded.curve, flooded.slo)
    assert reports[0].p99_ms <= 1.05 * 100


@pytest.mark.conformance
def test_two_flooded_models_divide_the_device_by_weight() -> None:
    models = [resnet(3.0, 2.0, 1, weight=3.0), resnet(3.0, 2.0, 2, weight=1.0)]
    play_together(models, 2.0)
    assert models[0].used / models[1].used == pytest.approx(3.0, rel=0.15)


def test_a_model_with_a_short_promise_survives_one_with_long_batches() -> None:
    slow = BatchCurve.parse("20+4", 64)
    long = Model(slow, 0.5, poisson(2 * slo_capacity(slow, 0.5), 20.0, Random(1)))
    short = resnet(0.1, 20.0, 2, slo=0.1)
    reports = play_together([long, short], 20.0)
    assert reports[1].attainment >= 0.95


def test_a_model_that_waits_for_a_fuller_batch_holds_nobody_up() -> None:
    curve = BatchCurve.parse("4+1", 16)
    patient = Model(
        curve,
        10.0,
        poisson(20.0, 10.0, Random(1)),
        fixed=FixedBatching(max_batch=16, preferred=(16,), max_delay=0.5),
    )
    promised = resnet(0.5, 10.0, 2)
    reports = play_together([patient, promised], 10.0)
    assert reports[1].attainment >= 0.99
    assert reports[0].attainment == 1.0


def test_alone_on_its_device_a_model_is_as_if_there_were_no_arbiter() -> None:
    arrivals = resnet(2.0, 3.0, 3)
    together = play_together([arrivals], 3.0)
    alone = resnet(2.0, 3.0, 3)
    alone.start(None, 1)
    alone.simulation._random = Random(1)
    run = alone.simulation.play(alone.arrivals)
    run.seconds = 3.0
    assert report(run, 0.1, 1) == together[0]


def test_who_dies_first_in_line_lets_the_next_one_go() -> None:
    arbiter = Arbiter()
    first, second = (Scheduler(BatchCurve.parse("4+1", 8), Promise(0.05, 8)) for _ in range(2))
    woken: list[str] = []
    arbiter.join(first, list(first.instances), wake=lambda: woken.append("first"))
    turn = arbiter.join(second, list(second.instances), wake=lambda: woken.append("second"))
    turn.tag = 1.0  # it has had its turn
    first.offer(Job(0.0), 0.0)
    second.offer(Job(0.0), 0.0)
    assert second.decide(0.0).batch is None
    assert woken == ["first"]
    first.set_available(first.instances[0], False)
    assert first.decide(0.0).batch is None
    assert woken == ["first", "second"]
    assert second.decide(0.0).batch is not None


def test_batches_leave_room_for_what_others_wait_outside_their_own() -> None:
    """A third of that promise passes on the way, of which a quarter of it is reckoned with."""
    arbiter = Arbiter()
    curve = BatchCurve.parse("4+1", 64)
    flooded, other = (Scheduler(curve, Promise(0.05, 64)) for _ in range(2))
    for core in (flooded, other):
        arbiter.join(core, list(core.instances))
    other.offer(Job(0.0), 0.0)
    other.cancel(next(iter(other.lanes.everybody())), 0.0)
    flooded.offer(Job(0.0), 0.0)
    assert flooded.decide(0.0).batch is not None
    assert flooded.instances.longest == pytest.approx(0.05 / 2.2)
    for _ in range(200):
        other.outside.seen(0.05 / 3, 0.0)
    turn = flooded.instances[0].turn
    assert turn is not None
    turn.granted(0.0)
    assert flooded.instances.longest == pytest.approx(0.75 * 0.05 / 2.2)


def test_who_leaves_gives_the_device_back() -> None:
    arbiter = Arbiter()
    curve = BatchCurve.parse("4+1", 16)
    woken: list[str] = []
    stays, goes = (Scheduler(curve, Promise(0.1, 16), 1) for _ in range(2))
    arbiter.join(stays, list(stays.instances), wake=lambda: woken.append("stays"))
    turn = arbiter.join(goes, list(goes.instances))
    goes.offer(Job(0.0), 0.0)
    assert goes.decide(0.0).batch is not None
    stays.offer(Job(0.0), 0.0)
    assert stays.decide(0.0).batch is None
    arbiter.leave(turn)
    assert woken == ["stays"]
    assert stays.decide(0.001).batch is not None
    assert stays.instances.pace == 1.0


@settings(max_examples=many(15), deadline=None)
@given(
    loads=st.lists(st.floats(0.05, 3.0), min_size=2, max_size=3),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3),
    seed=st.integers(0, 1000),
)
def test_everybody_who_is_offered_ends_exactly_once(
    loads: list[float], weights: list[float], seed: int
) -> None:
    models = [resnet(load, 0.5, seed + n, weight=weights[n]) for n, load in enumerate(loads)]
    play_together(models, 0.5, seed=seed)
    for model in models:
        ledger = model.simulation.scheduler.ledger
        ended = sum(ledger.refused.values()) + sum(ledger.given_up.values()) + ledger.answered
        assert ledger.offered == ended == len(model.arrivals)
        assert ledger.running == 0
