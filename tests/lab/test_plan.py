"""The three questions that the planner must answer, and those to which the answer is no."""

from __future__ import annotations

import pytest

from carpool.core.curve import BatchCurve
from carpool.lab.fleet_plan import ENOUGH, FleetPlan, FleetQuestion, plan
from carpool.lab.machine_share import replica_memory_mb

EXERCISE = BatchCurve.parse("4+1")
RESNET = BatchCurve.parse("1:6.2,4:9.1,16:21,64:74")
YOLO = BatchCurve.parse("1:8,8:12,32:22,64:35,128:60")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter checks, for answers that do not hang on the last permille."""
    monkeypatch.setattr("carpool.lab.fleet_plan._REQUESTS", 3_000)
    monkeypatch.setattr("carpool.lab.fleet_plan._SECONDS", 4.0)
    monkeypatch.setattr("carpool.lab.fleet_plan._AFFORDED", 15_000)


def _check(found: FleetPlan, slo_ms: float) -> None:
    assert found.p50_ms is not None
    assert found.p99_ms is not None
    assert 0 < found.p50_ms < found.p99_ms <= slo_ms
    assert found.max_delay_ms == 0
    assert found.headroom is not None
    assert found.headroom >= 0
    assert all(sentence.endswith(".") for sentence in found.why)


@pytest.mark.conformance
def test_a_detector_at_500_a_second_needs_one_gpu() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.05, 500, price_per_hour=2.5, model_mb=300.0))
    _check(found, 50)
    assert (found.replicas, found.max_batch, found.promised_batch) == (1, 46, 21)
    assert found.capacity_rps == 840
    assert found.headroom == pytest.approx(0.68)
    assert found.cost_per_1000 == pytest.approx(2.5 / (500 * 3600) * 1000)
    assert found.memory_mb == replica_memory_mb(300.0) > 300.0 + 512
    assert found.p99_ms == pytest.approx(26, abs=2)
    assert found.delay_helps is False
    assert any("No delay helps" in sentence for sentence in found.why)


@pytest.mark.conformance
@pytest.mark.usefixtures("quick")
def test_with_surges_of_three_times_it_needs_two() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.05, 500, surge=3, surge_seconds=10))
    _check(found, 50)
    assert found.replicas == 2
    surge = next(check for check in found.checks if check.what == "surge")
    assert surge.rate_rps == 1500
    assert surge.attainment >= ENOUGH
    assert any("behind a balancer" in sentence for sentence in found.why)


@pytest.mark.conformance
def test_a_surge_just_below_capacity_is_caught_by_the_simulator() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.05, 500, surge=1.6, surge_seconds=10))
    assert found.replicas == 2
    assert any("one replica would answer" in sentence for sentence in found.why)


@pytest.mark.usefixtures("quick")
@pytest.mark.conformance
def test_a_surge_shorter_than_the_promise_is_ridden_out() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.05, 300, surge=4, surge_seconds=0.02))
    assert found.replicas == 1


@pytest.mark.usefixtures("quick")
def test_a_hundred_cameras_need_one_gpu_and_a_spare() -> None:
    found = plan(FleetQuestion(YOLO, 0.1, 1000, redundancy=1))
    _check(found, 100)
    assert found.replicas == 2
    assert {check.replicas for check in found.checks if check.what == "steady"} == {1, 2}
    assert found.capacity_rps == pytest.approx(2046, abs=1)


@pytest.mark.conformance
def test_the_moderation_fleet_needs_three() -> None:
    found = plan(FleetQuestion(RESNET, 0.1, 800, surge=3, surge_seconds=600))
    _check(found, 100)
    assert found.replicas == 3


@pytest.mark.conformance  # by a permille, so the check cannot be shorter
def test_a_tight_promise_needs_more_than_the_formula_says() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.012, 100))
    assert found.capacity_rps > 100
    assert found.replicas == 2
    assert any("too few" in sentence for sentence in found.why)


@pytest.mark.conformance
@pytest.mark.usefixtures("quick")
def test_large_fleets_are_simulated_in_part() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.05, 20_000))
    assert found.replicas is not None
    assert 24 <= found.replicas <= 28
    assert any("every 8 of them" in sentence for sentence in found.why)


def test_a_promise_below_two_images_is_refused_with_what_would_help() -> None:
    found = plan(FleetQuestion(BatchCurve.parse("10+1"), 0.02, 10))
    assert found.replicas is None
    assert found.p99_ms is None
    text = " ".join(found.why)
    assert "at least 22 ms" in text
    assert "at most 10 ms" in text


@pytest.mark.conformance
@pytest.mark.usefixtures("quick")
def test_a_device_too_noisy_for_its_promise_is_refused_with_what_would_help() -> None:
    found = plan(FleetQuestion(EXERCISE, 0.0102, 2, noise=0.5))
    assert found.replicas is None
    assert any("less noise" in sentence for sentence in found.why)
