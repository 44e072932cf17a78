"""Cores that a model shares with decoding and the protocol."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from carpool.core.curve import BatchCurve, slo_capacity
from carpool.lab.fleet_plan import FleetQuestion, plan
from carpool.lab.machine_share import UNSHARED, Machine

CURVE = BatchCurve.parse("1:13,8:85")
TWO_CORES = Machine(cores=2, infer_cores=2, decode=0.0025, protocol=0.0005)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.lab.fleet_plan._REQUESTS", 1_500)
    monkeypatch.setattr("carpool.lab.fleet_plan._SECONDS", 4.0)
    monkeypatch.setattr("carpool.lab.fleet_plan._AFFORDED", 6_000)
    monkeypatch.setattr("carpool.sim.simulation._WANTED", 1_000)


def test_with_cores_enough_only_the_batches_count() -> None:
    assert UNSHARED.stretch(1e6) == 1.0
    assert UNSHARED.outside(1e6) == 0.0
    assert UNSHARED.curve(CURVE, 100) is CURVE
    assert UNSHARED.capacity(CURVE, 0.25) == slo_capacity(CURVE, 0.25)


def test_a_model_on_the_cpu_gets_what_decoding_and_protocol_leave() -> None:
    assert TWO_CORES.stretch(0.0) == 1.0
    assert TWO_CORES.stretch(100.0) == pytest.approx(2 / 1.7)
    assert TWO_CORES.curve(CURVE, 100.0).times[8] == pytest.approx(0.085 * 2 / 1.7)
    capacity = TWO_CORES.capacity(CURVE, 0.25)
    # Every image takes 85/8 ms of both cores for its batch and 3 ms of one beside it.
    assert capacity == pytest.approx(2 / (2 * 0.085 / 8 + 0.003), rel=0.01)


def test_a_model_on_a_gpu_is_slowed_down_only_when_the_cores_run_out() -> None:
    gpu = Machine(cores=4, infer_cores=1, decode=0.003)
    assert gpu.stretch(900.0) == 1.0
    assert gpu.stretch(1200.0) == pytest.approx(2.5)
    assert gpu.stretch(1334.0) == inf
    fast = BatchCurve.parse("1:1,64:20")
    assert slo_capacity(fast, 0.1) > 1334
    assert 1000 < gpu.capacity(fast, 0.1) < 1334


def test_who_shares_a_core_waits_longer_for_its_own_decoding() -> None:
    assert replace(TWO_CORES, infer_cores=0).outside(0.0) == pytest.approx(0.003)
    assert TWO_CORES.outside(0.0) == pytest.approx(0.003 * 3 / 2)
    assert TWO_CORES.outside(100.0) == pytest.approx(0.003 * 3.3 / 2)


def test_a_promise_that_decoding_alone_breaks_has_no_capacity() -> None:
    assert Machine(cores=1, decode=0.3).capacity(CURVE, 0.25) == pytest.approx(0.0, abs=0.01)


@pytest.mark.usefixtures("quick")
def test_the_plan_counts_the_cores() -> None:
    question = FleetQuestion(CURVE, 0.25, 80.0, noise=0.0)
    assert plan(question).replicas == 1
    shared = plan(replace(question, machine=TWO_CORES))
    assert shared.replicas == 2
    assert shared.capacity_rps == pytest.approx(82.5, rel=0.02)
    said = " ".join(shared.why)
    assert "an image takes 3 ms of a core (decoding 2.5, protocol 0.5)" in said
    assert "of the replica's 2 cores. Batches would keep 2 busy and take 1.14 × as long" in said


@pytest.mark.conformance
@pytest.mark.usefixtures("quick")
def test_without_cores_only_the_wait_is_known() -> None:
    found = plan(FleetQuestion(CURVE, 0.25, 40.0, noise=0.0, machine=Machine(decode=0.02)))
    assert found.replicas == 1
    assert "Give --cores to check" in " ".join(found.why)
    alone = plan(FleetQuestion(CURVE, 0.25, 40.0, noise=0.0))
    assert found.p50_ms is not None
    assert alone.p50_ms is not None
    assert found.p50_ms == pytest.approx(alone.p50_ms + 20, abs=5)


@pytest.mark.usefixtures("quick")
def test_more_decoding_than_a_replica_has_cores_needs_more_replicas() -> None:
    one_core = Machine(cores=1, decode=0.02)
    found = plan(FleetQuestion(BatchCurve.parse("1:1,8:2"), 0.25, 90.0, noise=0.0, machine=one_core))
    assert found.replicas is not None
    assert found.replicas >= 2
    surging = FleetQuestion(BatchCurve.parse("1:1,8:2"), 0.25, 30.0, surge=3, noise=0.0, machine=one_core)
    more = plan(surging).replicas
    assert more is not None
    assert more >= 2


def test_instances_side_by_side_carry_as_much_more_until_the_cores_are_used_up() -> None:
    two = Machine(instances=2)
    assert two.capacity(CURVE, 0.25) == 2 * slo_capacity(CURVE, 0.25)
    shared = Machine(cores=2, infer_cores=2, decode=0.005, instances=2)
    assert slo_capacity(CURVE, 0.25) < shared.capacity(CURVE, 0.25) < two.capacity(CURVE, 0.25)
