from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from carpool.core.curve import BatchCurve, sizes
from carpool.engine.profile.measuring import FOR_SERVING, Effort, Measuring, Point, sample
from carpool.types import Datatype, Signature, TensorSpec
from engine.timed import SIGNATURE, Clock, Timed


def measuring(
    takes: Callable[[int, int], float], effort: Effort = FOR_SERVING
) -> tuple[Measuring, Timed, Clock]:
    clock = Clock()
    backend = Timed(clock, takes)
    return Measuring([backend], SIGNATURE, effort, now=clock), backend, clock


def linear(images: int, _run: int) -> float:
    return 0.004 + 0.001 * images


def test_a_steady_model_is_measured_exactly_and_soon() -> None:
    measure, backend, clock = measuring(linear)
    began = clock()
    measured = measure.points(sizes(32))
    assert [(p.size, pytest.approx(p.seconds)) for p in measured.points] == [
        (size, linear(size, 0)) for size in (1, 2, 4, 8, 16, 32)
    ]
    assert measured.ended == ""
    assert all(point.spread < 1e-6 for point in measured.points)
    assert clock() - began < 2.0
    assert len(backend.sizes) == 6 * Effort().least_runs


def test_the_first_slow_runs_do_not_count() -> None:
    measure, backend, _ = measuring(lambda _, run: 0.5 / (run + 1) if run < 4 else 0.01, Effort(warm_up=2.0))
    point = measure.point(1)
    assert point.seconds == pytest.approx(0.01)
    assert len(backend.sizes) > 4


def test_warming_up_ends_even_if_it_never_gets_steady() -> None:
    measure, _, clock = measuring(lambda _, run: (0.01, 0.03)[run % 2])
    began = clock()
    point = measure.point(1)
    assert 0.01 <= point.seconds <= 0.03
    assert point.spread > 0.5
    assert clock() - began < 1.0


def test_disturbed_runs_change_the_spread_more_than_the_time() -> None:
    random = Random(1)

    def takes(_images: int, _run: int) -> float:
        return 0.01 * (3.0 if random.random() < 0.3 else random.uniform(1.0, 1.03))

    point = measuring(takes, Effort(least_runs=40, most_runs=60, seconds=5, warm_up=5))[0].point(4)
    assert point.seconds == pytest.approx(0.01, rel=0.05)
    assert point.spread > 0.02


def test_more_runs_while_it_is_not_clear() -> None:
    noisy = measuring(lambda _, run: 0.001 * (1 + 0.1 * (run % 3)))[0].point(1)
    quiet = measuring(lambda *_: 0.001)[0].point(1)
    assert noisy.runs > quiet.runs == Effort().least_runs


def test_batches_longer_than_the_promise_are_not_looked_at() -> None:
    measure, backend, _ = measuring(linear)
    measured = measure.points(sizes(32), budget=0.010)
    assert [point.size for point in measured.points] == [1, 2, 4, 8]
    assert measured.ended == "the last takes longer than 10 ms"
    assert max(backend.sizes) == 8


def test_nor_are_those_that_bring_nothing_more() -> None:
    measured = measuring(lambda images, _: 0.001 * images**1.2)[0].points(sizes(32), budget=1.0)
    assert [point.size for point in measured.points] == [1, 2, 4]
    assert measured.ended == "larger ones bring no more images per second"
    without_a_promise = measuring(lambda images, _: 0.001 * images**1.2)[0].points(sizes(32))
    assert without_a_promise.points[-1].size == 32  # they will be run, so they are warmed


def test_a_slow_model_does_not_take_for_ever() -> None:
    measure, backend, clock = measuring(lambda images, _: 0.4 * images)
    began = clock()
    measured = measure.points(sizes(32))
    assert measured.ended == "the 0.6 s for measuring were over"
    assert measured.points[0].seconds == pytest.approx(0.4)
    assert clock() - began < 2.0
    assert max(backend.sizes) == 1


def test_a_disturbance_does_not_make_batches_look_useless() -> None:
    """If they seemed so, nobody would run one, and nothing would teach better."""

    def disturbed(images: int, run: int) -> float:
        return (1.0 if run < 6 else 0.02) if images == 2 else linear(images, run)

    measure, _, _ = measuring(disturbed)
    assert measure.points(sizes(32)).curve(32).efficient[8] == 8


def test_passes_spread_a_disturbance_over_all_sizes() -> None:
    """Twice as slow during the first pass only."""
    effort = Effort(least_runs=3, most_runs=3, passes=4, total=100)
    runs_of_a_pass = 3 * len(sizes(8))
    measure, backend, _ = measuring(
        lambda images, run: linear(images, run) * (2 if run < runs_of_a_pass else 1), effort
    )
    measured = measure.points(sizes(8))
    assert [p.seconds for p in measured.points] == pytest.approx([linear(p.size, 0) for p in measured.points])
    assert backend.sizes[: 3 * 2] == [1, 1, 1, 2, 2, 2]
    assert len(backend.sizes) == 4 * runs_of_a_pass


def test_told_of_every_size() -> None:
    told: list[int] = []
    measuring(linear)[0].points([1, 3], tell=told.append)
    assert told == [1, 3]


def test_the_device_is_waited_for() -> None:
    clock = Clock()

    def synchronise() -> None:
        clock.seconds += 0.02

    measure = Measuring([Timed(clock, lambda *_: 0.001)], SIGNATURE, now=clock, synchronise=synchronise)
    assert measure.point(1).seconds == pytest.approx(0.021)


def test_all_instances_run_at_the_same_time() -> None:
    clock = Clock()
    backends = [Timed(clock, lambda *_: 0.001) for _ in range(3)]
    point = Measuring(backends, SIGNATURE, now=clock).point(2)
    assert len({len(backend.sizes) for backend in backends}) == 1
    assert point.runs % 3 == 0


def test_a_profile_of_another_replica_is_checked_by_one_run_where_it_fits() -> None:
    curve = BatchCurve.linear(0.004, 0.001, 8)
    seen: list[int] = []

    def takes(images: int, run: int) -> float:
        """The first run of four images is slow because it is the first."""
        seen.append(images)
        return linear(images, run) * (3.0 if images == 4 and seen.count(4) == 1 else 1.1)

    found = measuring(takes)[0].quick_ratios([1, 4], curve, 1.3)
    assert seen == [1, 4, 4]
    assert found == {1: pytest.approx(1.1), 4: pytest.approx(1.1)}


def test_the_curve_never_falls() -> None:
    measured = measuring(lambda images, _: 0.01 if images == 1 else 0.009)[0].points([1, 2])
    assert measured.curve(2).times == pytest.approx((0.0, 0.01, 0.01))
    assert Point(4, 0.01).rate == 400


def test_requests_of_zeros() -> None:
    signature = Signature(
        "m", (TensorSpec("t", Datatype.BYTES, (-1,)), TensorSpec("x", Datatype.UINT8, (3,))), (), 8
    )
    made = sample(signature, 2)
    assert made["t"].shape == (2, 64)
    assert made["t"][0, 0] == b""
    assert made["x"].dtype == np.uint8
    assert sample(Signature("m", signature.inputs, ()), 1)["x"].shape == (3,)


@pytest.mark.parametrize(("largest", "found"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes(largest: int, found: list[int]) -> None:
    assert sizes(largest) == found
