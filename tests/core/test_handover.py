"""What a batch occupies its instance for beside its run: learned apart, and counted where it matters."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.instance import Batch
from carpool.core.job import Job
from carpool.core.learning import Belief, Handover
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Device, Report, Simulation, report
from core.playing import named
from later import later

QUICK = BatchCurve([(n, 0.000125 * n * (1 + 0.004 * n)) for n in (1, 2, 4, 8, 16, 32)])
"""A batch brings nothing by itself: one at a time is the fastest, by a little."""
GAP = 0.00015
UNCOUNTED = replace(CONSTANTS, handover_weight=0.0)


class HandedOver(Simulation):
    """Every batch takes a while to begin and to be heard of, which the device knows nothing of."""

    gap = GAP

    def _run_batch(self, batch: Batch, now: float) -> None:
        self._running.append((now + self._gap(batch) + self._seconds(batch, now), batch))

    def _gap(self, batch: Batch) -> float:
        return self.gap * Random(batch.started).lognormvariate(0.0, 0.4)

    def _finish(self, batch: Batch, now: float) -> None:
        released = self.scheduler.finished(batch, now, now - batch.started - self._gap(batch))
        for job in released:
            job.payload.latency = now - job.arrived
        in_time = sum(1 for job in batch.jobs if now <= job.arrived + self.slo)
        self.run.batches.append((batch, now, in_time))


def play(curve: BatchCurve, slo: float, load: float, constants: Constants = CONSTANTS) -> Report:
    """Load 1 is what can be promised if handing over is counted."""
    scheduler = Scheduler(curve, Promise(slo, curve.max_batch), constants=constants)
    rate = load * slo_capacity(curve.delayed(GAP), slo)
    arrivals = poisson(rate, 20_000 / rate, Random(1))
    return report(HandedOver(scheduler, Device(curve), slo=slo, seed=1).play(arrivals), slo, 1)


def test_a_delayed_curve_takes_longer_by_the_same_for_every_size() -> None:
    for curve in (QUICK, BatchCurve.parse("4+1", 16), BatchCurve([(2, 0.01)], 8), BatchCurve([(1, 0.01)])):
        later = curve.delayed(0.003)
        assert later.max_batch == curve.max_batch
        assert later.times[0] == 0.0
        for before, after in zip(curve.times[1:], later.times[1:], strict=True):
            assert after == pytest.approx(before + 0.003)
    padded = BatchCurve([(1, 0.004), (8, 0.018)], 8, [2, 8]).delayed(0.001)
    assert padded.buckets == (2, 8)
    assert padded.times[1] == padded.times[2] == pytest.approx(0.007)


def test_handing_over_makes_single_requests_dear() -> None:
    assert QUICK.efficient[32] == 1
    assert QUICK.delayed(GAP).efficient[32] == 16


def test_it_is_learned_from_what_lasts_and_not_from_a_stall() -> None:
    handover = Handover()
    for _ in range(100):
        handover.seen(0.0002)
    assert handover.seconds == pytest.approx(0.0002, rel=0.05)
    handover.seen(1.0)
    assert handover.seconds < 0.00024
    for _ in range(1000):
        handover.seen(1.0)
    assert handover.seconds <= CONSTANTS.handover_most_s


def test_the_curve_follows_when_it_matters_and_not_at_every_batch() -> None:
    handover = Handover()
    for _ in range(100):
        handover.seen(0.0002)
    assert not handover.is_news(0.005, 1.0), "little beside what one image takes"
    assert handover.is_news(0.0005, 1.0)
    handover.counted = 0.0001
    assert not handover.is_news(0.0005, 1.1), "it was looked at just now"
    assert handover.is_news(0.0005, 1.3)
    handover.counted = handover.seconds
    assert not handover.is_news(0.0005, 2.0)


def test_speeds_are_said_in_the_new_terms() -> None:
    belief = Belief(BatchCurve.parse("0.1+0.1", 8), 1, 0.0, CONSTANTS)
    belief.speeds[0].rebased(0.5)  # a lone image was seen to take 0.4 ms
    for _ in range(200):
        belief.handover.seen(0.0002)
    belief.count_handover(1)
    assert belief.curve.times[1] == pytest.approx(0.0004, rel=0.01)
    assert belief.runs.times[1] == pytest.approx(0.0002)
    assert belief.speeds[0].mean == pytest.approx(1.0, rel=0.01)
    belief.adopt(BatchCurve.parse("0.2+0.2", 8), 1.0)
    assert belief.curve.times[1] == pytest.approx(0.0006, rel=0.01), "it is counted with the next curve too"


def test_a_trend_is_about_the_device_alone() -> None:
    scheduler = Scheduler(QUICK, Promise(0.02, 32))
    now = 0.0
    for _ in range(2000):
        scheduler.offer(Job(now), now)
        batch = scheduler.decide(now).batch
        assert batch is not None
        now += QUICK.times[1] + 0.0003
        scheduler.finished(batch, now, QUICK.times[1])
    assert scheduler.trend.factor == pytest.approx(1.0)
    assert scheduler.belief.runs is scheduler.trend.profile
    assert scheduler.belief.handover.counted == pytest.approx(0.0003, rel=0.2)
    assert scheduler.instances[0].speed.mean == pytest.approx(1.0, rel=0.2)


@pytest.mark.conformance
@pytest.mark.parametrize("load", [later(0.9), 1.5])
def test_a_quick_model_carries_what_its_instances_can(load: float) -> None:
    found = play(QUICK, 0.02, load)
    most = min(load, 1.0) * slo_capacity(QUICK.delayed(GAP), 0.02)
    assert found.goodput_rps >= 0.95 * most
    assert found.p99_ms <= 20.2
    assert found.wasted_fraction < 0.02
    assert found.goodput_rps > 2 * play(QUICK, 0.02, load, UNCOUNTED).goodput_rps


@pytest.mark.conformance
@pytest.mark.parametrize("load", [0.9, later(1.5)])
@pytest.mark.parametrize("name", ["4+1/50", later("resnet/30")])
def test_nothing_changes_where_it_is_little(name: str, load: float) -> None:
    curve, slo = named(name)
    assert play(curve, slo, load) == play(curve, slo, load, UNCOUNTED)


@pytest.mark.parametrize("load", [0.9, later(1.5)])
@pytest.mark.parametrize(("text", "slo"), [("0.1+0.05", 0.01), later("0.05+0.02", 0.005)])
def test_promises_of_quick_models_hold_no_less(text: str, slo: float, load: float) -> None:
    curve = BatchCurve.parse(text, 32)
    found, before = play(curve, slo, load), play(curve, slo, load, UNCOUNTED)
    assert found.goodput_rps >= 0.99 * before.goodput_rps
    assert found.p99_ms <= max(before.p99_ms, 1e3 * slo)
    assert found.wasted_fraction <= before.wasted_fraction + 0.002
