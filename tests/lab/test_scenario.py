from __future__ import annotations

from dataclasses import replace

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.objectives import FixedBatching, Promise
from carpool.errors import InvalidInput
from carpool.sim.simulation import Scenario, contenders, measure, sweep

CURVE = BatchCurve.parse("4+1")
SCENARIO = Scenario(CURVE, 0.05, Promise(0.05, 64), rate=840.0, seconds=5.0)


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert measure(SCENARIO) == measure(SCENARIO)
    assert measure(SCENARIO) != measure(replace(SCENARIO, seed=2))


def test_seeds_are_averaged_and_the_worst_is_kept() -> None:
    both = measure(replace(SCENARIO, seeds=2))
    alone = [measure(replace(SCENARIO, seed=seed)) for seed in (1, 2)]
    assert both.goodput_rps == pytest.approx(sum(o.goodput_rps for o in alone) / 2)
    assert both.worst_seed_attainment == min(o.attainment for o in alone)


def test_only_the_promise_survives_overload() -> None:
    found = {
        name: measure(entry)
        for name, entry in contenders(
            replace(SCENARIO, seconds=2.0).at_load(2.0), FixedBatching(64, max_delay=0.005)
        ).items()
    }
    assert list(found) == ["promise", "knobs", "eager", "batch-1"]
    assert found["promise"].fraction_of_bound > 0.95
    assert found["promise"].p99_ms < 51
    assert found["promise"].wasted_fraction < 0.03
    for name in ("knobs", "eager", "batch-1"):
        assert found[name].attainment < 0.1
        assert found[name].wasted_fraction > 0.8


def test_no_delay_answers_sooner_when_there_is_little_to_do() -> None:
    found = contenders(SCENARIO.at_load(0.1), FixedBatching(64, max_delay=0.010))
    eager, delayed = measure(found["eager"]), measure(found["knobs"])
    assert eager.p50_ms < 6 < delayed.p50_ms


def test_the_bound_of_a_slow_device_is_its_own_and_the_capacity_is_the_profiles() -> None:
    slow = measure(replace(SCENARIO, profile_error=1.3))
    assert slow.capacity_rps == 840
    assert slow.fluid_bound_rps < 680
    assert slow.fraction_of_bound > 0.9


def test_an_empty_run_is_refused() -> None:
    with pytest.raises(InvalidInput, match="--seconds"):
        measure(replace(SCENARIO, seconds=0.001))


def test_a_sweep_steps_over_loads() -> None:
    steps: list[None] = []
    found = sweep(replace(SCENARIO, seconds=2.0), (0.5, 1.5), lambda: steps.append(None))
    assert [load for load, _ in found] == [0.5, 1.5]
    assert found[0][1].offered_rps < 500 < 1000 < found[1][1].offered_rps
    assert len(steps) == 2
