"""A profile that no longer holds: told once, put right, and over when it is over. In virtual time."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from carpool.core.curve import BatchCurve, fluid_bound, slo_capacity
from carpool.core.learning import Trend
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import poisson
from carpool.sim.simulation import Device, Run, Simulation
from core.playing import in_time, named
from later import later

CURVE = BatchCurve.parse("1:5,8:12,32:36")


def feed(
    trend: Trend, factor: float, seconds: float, *, at: float = 0.0, images: int = 8, step: float = 0.02
) -> list[float]:
    """Batches of one size, one after the other; what was told on the way."""
    told = []
    for number in range(round(seconds / step)):
        now = at + number * step
        trend.ran(images, factor * CURVE.times[images], CURVE, now)
        news = trend.news(now)
        if news is not None:
            told.append(news)
    return told


def test_a_device_that_keeps_to_its_profile_is_no_news() -> None:
    trend, random = Trend(CURVE), Random(1)
    for number in range(5000):
        trend.ran(8, CURVE.times[8] * random.lognormvariate(0, 0.1), CURVE, number * 0.02)
        assert trend.news(number * 0.02) is None
    assert trend.factor == pytest.approx(1.0, abs=0.1)


def test_a_lasting_change_is_told_once_and_so_is_its_end() -> None:
    trend = Trend(CURVE)
    assert feed(trend, 1.0, 5) == []
    assert trend.told == 1.0
    (slow,) = feed(trend, 1.6, 30, at=5)
    assert slow == pytest.approx(1.6, rel=0.1)
    assert feed(trend, 1.0, 30, at=35) == [1.0]


@pytest.mark.parametrize("step", [0.005, 0.06, 0.3, 2.0])
def test_nothing_is_told_on_the_way(step: float) -> None:
    """However often batches run: first where it settled, then that it is over."""
    trend = Trend(CURVE)
    told = [
        news
        for part, factor in enumerate((1.0, 2.0, 1.0))
        for news in feed(trend, factor, 300 * step + 10, at=part * (300 * step + 10), step=step)
    ]
    assert told == [pytest.approx(2.0, rel=0.1), 1.0]


def test_a_short_spell_is_not_told() -> None:
    trend = Trend(CURVE)
    assert feed(trend, 1.0, 2) == []
    assert feed(trend, 1.6, 0.8, at=2) == []
    assert feed(trend, 1.0, 5, at=2.8) == []


def test_a_device_at_the_edge_is_not_told_of_again_and_again() -> None:
    trend = Trend(CURVE)
    told = [news for half in range(40) for news in feed(trend, (1.16, 1.26)[half % 2], 3, at=3 * half)]
    assert len(told) <= 1


def test_it_is_told_again_when_it_gets_much_worse() -> None:
    trend = Trend(CURVE)
    told = feed(trend, 1.4, 10) + feed(trend, 2.2, 10, at=10)
    assert told == pytest.approx([1.4, 2.2], rel=0.1)


def test_the_curve_moves_where_batches_were_run_and_follows_elsewhere() -> None:
    trend = Trend(CURVE)
    for number in range(400):
        images, factor = ((1, 1.0), (32, 2.0))[number % 2]
        trend.ran(images, factor * CURVE.times[images], CURVE, number * 0.02)
    learned = trend.relearned(CURVE, 8.0)
    assert learned is not None
    curve, factor = learned
    assert curve.times[1] == pytest.approx(CURVE.times[1])
    assert curve.times[32] == pytest.approx(2 * CURVE.times[32])
    assert curve.times[8] == pytest.approx(2 * CURVE.times[8])  # nothing ran there: nearer to 32 than to 1
    assert factor == pytest.approx(2**0.5)


def test_nothing_is_learned_from_little_or_from_what_fits() -> None:
    trend = Trend(CURVE)
    assert trend.relearned(CURVE, 100.0) is None
    feed(trend, 1.6, 4.9)
    assert trend.relearned(CURVE, 4.9) is None  # not long enough
    trend = Trend(CURVE)
    feed(trend, 1.6, 10, step=1.0)
    assert trend.relearned(CURVE, 10.0) is None  # not often enough
    trend = Trend(CURVE)
    feed(trend, 1.05, 10)
    assert trend.relearned(CURVE, 10.0) is None
    trend.ran(8, 0.0, CURVE, 10.0)  # a clock that did not tick


def look(trend: Trend, curve: BatchCurve, now: float, **took: float) -> tuple[BatchCurve, float]:
    """Fifty batches of each size (named `_8`), in ms, over five seconds; the curve that follows."""
    for number in range(50):
        for size, ms in took.items():
            trend.ran(int(size[1:]), ms / 1e3, curve, now + number / 10)
    learned = trend.relearned(curve, now + 5.0)
    return (curve if learned is None else learned[0]), now + 5.0


def looks_until_32_is_tried(trend: Trend, curve: BatchCurve, now: float) -> tuple[int, BatchCurve, float]:
    for number in range(1000):
        if curve.efficient[32] == 32:
            return number, curve, now
        curve, now = look(trend, curve, now, _8=12.0)
    raise AssertionError("it is never tried again")


def test_a_size_that_once_proved_slow_is_tried_again_and_may_stay() -> None:
    trend = Trend(CURVE)
    curve, now = look(trend, CURVE, 0.0, _8=12.0, _32=72.0)
    assert curve.efficient[32] == 8
    looks, curve, now = looks_until_32_is_tried(trend, curve, now)
    assert 5 <= looks <= 25
    curve, now = look(trend, curve, now, _32=36.0)
    assert curve.times[32] == pytest.approx(0.036, rel=0.12)
    assert curve.efficient[32] == 32


def test_a_size_that_is_slow_for_good_is_tried_ever_less_and_for_a_few_batches() -> None:
    trend = Trend(CURVE)
    curve, now = look(trend, CURVE, 0.0, _8=12.0, _32=72.0)
    waits = []
    for _ in range(7):
        looks, curve, now = looks_until_32_is_tried(trend, curve, now)
        waits.append(looks)
        for _ in range(10):
            assert trend.relearned(curve, now) is None
            trend.ran(32, 0.072, curve, now)
        learned = trend.relearned(curve, now)
        assert learned is not None, "ten batches are enough to see that it was no good"
        curve = learned[0]
        assert curve.times[32] == pytest.approx(0.072)
        assert curve.times[8] == pytest.approx(0.012, rel=0.01), "nobody else is suspected for it"
    assert waits[1:5] == pytest.approx([waits[0] * 2**n for n in range(1, 5)], rel=0.2)
    assert waits[-1] == pytest.approx(waits[-2], rel=0.1)  # not for ever less


def test_a_size_that_proved_fast_keeps_its_name() -> None:
    trend = Trend(CURVE)
    curve, now = look(trend, CURVE, 0.0, _8=12.0, _32=18.0)
    for _ in range(100):
        curve, now = look(trend, curve, now, _8=12.0)
    assert curve.times[32] == pytest.approx(0.018)


def goodput(run: Run, slo: float, begin: float, end: float) -> float:
    return sum(in_time(r, slo) for r in run.rides if begin <= r.arrival.at < end) / (end - begin)


def kept(run: Run, slo: float, begin: float, end: float) -> float:
    """Of what was answered, the share in time."""
    answered = [r for r in run.rides if begin <= r.arrival.at < end and r.latency is not None]
    return sum(in_time(r, slo) for r in answered) / len(answered)


@pytest.mark.parametrize(
    ("name", "instances"),
    [
        *(("4+1/50", 1), later("4+1/50", 2)),
        *(later(name, instances) for name in ("resnet/100", "yolo/100") for instances in (1, 2)),
    ],
)
def test_a_throttled_device_keeps_its_promise_and_comes_back(name: str, instances: int) -> None:
    """1.6 times slower for 30 s, at 1.3 times the capacity that it had."""
    curve, slo = named(name)
    slower = BatchCurve([(size, 1.6 * seconds) for size, seconds in curve.points], curve.max_batch)
    device = Device(curve, slowdown=lambda now, _: 1.6 if 10 <= now < 40 else 1.0)
    rate = 1.3 * slo_capacity(curve, slo, instances)
    scheduler = Scheduler(curve, Promise(slo, curve.max_batch), instances)
    run = Simulation(scheduler, device, slo=slo, seed=1).play(poisson(rate, 60, Random(1)))
    assert goodput(run, slo, 10, 40) >= 0.9 * fluid_bound(slower, slo, rate, instances)
    assert goodput(run, slo, 40, 59) >= 0.9 * fluid_bound(curve, slo, rate, instances)
    assert kept(run, slo, 10, 40) >= 0.975
    assert kept(run, slo, 42, 59) >= 0.99
    usual = round(mean(batch.images for batch, ended, _ in run.batches if ended > 50))
    assert scheduler.curve.times[usual] == pytest.approx(curve.times[usual], rel=0.12)


@pytest.mark.conformance
def test_a_device_that_slows_down_only_in_large_batches_gets_a_curve_of_that_shape() -> None:
    """One number for all sizes cannot say this: single images are as fast as ever."""
    curve, slo = named("resnet/100")
    truth = BatchCurve([(1, 0.0062), (4, 0.0091), (16, 0.032), (64, 0.150)], 64)
    rate = 1.3 * slo_capacity(truth, slo)
    scheduler = Scheduler(curve, Promise(slo, 64))
    run = Simulation(scheduler, Device(truth), slo=slo).play(poisson(rate, 60, Random(1)))
    assert goodput(run, slo, 10, 59) >= 0.9 * fluid_bound(truth, slo, rate)
    assert scheduler.curve.times[32] == pytest.approx(truth.times[32], rel=0.15)


@pytest.mark.conformance
def test_one_slow_instance_does_not_change_the_curve_of_all() -> None:
    curve, slo = named("4+1/50")
    device = Device(curve, slowdown=lambda _, instance: (1.0, 3.0)[instance])
    scheduler = Scheduler(curve, Promise(slo, 64), 2)
    Simulation(scheduler, device, slo=slo).play(poisson(1500, 30, Random(1)))
    assert scheduler.curve is curve
    assert scheduler.instances[1].speed.mean == pytest.approx(3.0, rel=0.1)


@pytest.mark.conformance
def test_a_profile_that_was_much_too_slow_lets_batches_grow() -> None:
    """Measured on a busy machine: the largest batch that seemed to fit was far too small."""
    true, slo = named("4+1/50")
    pessimistic = BatchCurve([(size, 3 * seconds) for size, seconds in true.points], 64)
    rate = 1.3 * slo_capacity(true, slo)
    scheduler = Scheduler(pessimistic, Promise(slo, 64))
    run = Simulation(scheduler, Device(true), slo=slo).play(poisson(rate, 40, Random(1)))
    assert goodput(run, slo, 12, 39) >= 0.9 * fluid_bound(true, slo, rate)
