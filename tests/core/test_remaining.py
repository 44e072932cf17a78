"""One promise for a pipeline: what a step leaves to those after it, and what the gate asks of them."""

from __future__ import annotations

import pytest

from carpool.core.arbiter import Arbiter
from carpool.core.constants import Constants
from carpool.core.curve import BatchCurve
from carpool.core.job import Job, Reason
from carpool.core.objectives import Promise
from carpool.core.remaining import Remaining, Spread, Step
from carpool.core.scheduler import Scheduler

SLO = 0.1


def scheduler(fixed: float, each: float) -> Scheduler:
    return Scheduler(BatchCurve.linear(fixed, each), Promise(SLO, 64))


def chain(images: float = 4.0) -> Remaining:
    return Remaining([Step(scheduler(0.004, 0.001)), Step(scheduler(0.003, 0.0005), (0,), images)])


def test_a_spread_is_what_nine_in_ten_do_not_exceed() -> None:
    spread = Spread()
    assert spread.at(0.0) == 0.0
    for number in range(101):
        spread.seen(number / 1e3, 1.0)
    assert spread.at(1.0) == pytest.approx(0.090)


def test_a_spread_forgets_what_is_older_than_its_window() -> None:
    spread = Spread(Constants(later_window=10))
    for seconds in (*[1.0] * 20, *[0.01] * 10):
        spread.seen(seconds, 0.0)
    assert spread.at(0.0) == pytest.approx(0.01)


def test_a_spread_fades_when_nobody_comes_through() -> None:
    """Else a gate that is shut for it would stay shut."""
    spread = Spread()
    spread.seen(0.08, 0.0)
    assert spread.at(0.9) == pytest.approx(0.08)
    assert spread.at(5.0) < 0.002


def test_before_anything_is_known_later_steps_take_what_they_take_alone() -> None:
    remaining = chain()
    assert remaining.planned(0, 0.0) == pytest.approx(0.003 + 4 * 0.0005)
    assert remaining.planned(1, 0.0) == 0.0
    assert remaining.alone() == pytest.approx(remaining.steps[0].scheduler.curve.times[1] + 0.005)


def test_what_requests_needed_for_the_later_steps_is_learned() -> None:
    remaining = chain()
    for number in range(50):
        now = number / 100
        trip = remaining.enters()
        trip.reaches(0)
        trip.ends(0, now)
        trip.reaches(1, 4)
        trip.ends(1, now + 0.03)
        trip.done(now + 0.03)
    assert remaining.planned(0, 0.6) == pytest.approx(0.03)


def test_who_was_given_up_teaches_nothing() -> None:
    remaining = chain()
    for _ in range(50):
        trip = remaining.enters()
        trip.reaches(0)
        trip.ends(0, 0.0)
        trip.gone()
    assert remaining.planned(0, 0.0) == pytest.approx(0.005)
    assert remaining.at_gate(0, 1, 0.0) == pytest.approx(0.005)  # nobody is on the way


def test_the_gate_counts_what_waits_for_later_steps_and_what_is_on_its_way_there() -> None:
    remaining = chain()
    alone = remaining.at_gate(0, 1, 0.0)
    assert alone == pytest.approx(0.005)
    trips = [remaining.enters() for _ in range(100)]
    on_the_way = remaining.at_gate(0, 1, 0.0)  # 400 images: five batches of 64, of 35 ms each
    assert on_the_way == pytest.approx(5 * 0.035 + 0.005 - 0.005)
    later = remaining.steps[1].scheduler
    for trip in trips:
        trip.reaches(1, 4)
        later.lanes.waiting += 4
    assert remaining.at_gate(0, 1, 0.0) == pytest.approx(on_the_way)
    for trip in trips:
        trip.done(0.0)
    later.lanes.waiting -= 400
    assert remaining.at_gate(0, 1, 0.0) == pytest.approx(alone)


def test_how_many_images_requests_bring_is_learned_and_none_is_a_number_too() -> None:
    remaining = chain(images=4.0)
    for _ in range(400):
        trip = remaining.enters()
        trip.reaches(1, 0)
        trip.done(0.0)
    assert remaining.images[1] == pytest.approx(0.0, abs=0.01)
    assert remaining.planned(0, 0.0) > 0.0  # it takes what one image takes, when there is one


def test_a_diamond_waits_for_its_longer_side() -> None:
    first, short, long, last = (scheduler(t, 0.001) for t in (0.004, 0.001, 0.009, 0.002))
    remaining = Remaining([Step(first), Step(short, (0,)), Step(long, (0,)), Step(last, (1, 2))])
    assert remaining.planned(0, 0.0) == pytest.approx(0.010 + 0.003)
    assert remaining.planned(1, 0.0) == pytest.approx(0.003)


def test_what_is_left_to_later_steps_is_not_planned_with() -> None:
    core = scheduler(0.004, 0.001)
    plain, hurried = Job(0.0), Job(0.0)
    hurried.own_course().later = 0.097
    assert core.refuses(plain, 0.0) is None
    assert core.offer(Job(0.0), 0.0) is None
    assert core.decide(0.0).batch is not None  # the device is busy: no idle instance that would try it
    refusal = core.refuses(hurried, 0.0)
    assert refusal is not None
    assert refusal.reason is Reason.CANNOT_FINISH
    assert refusal.terms.predicted + refusal.terms.margin == pytest.approx(0.1075, abs=0.001)
    assert hurried.due == pytest.approx(0.003)


def sharing(step_of_second: int) -> tuple[Scheduler, Scheduler]:
    one, other = scheduler(0.004, 0.001), scheduler(0.004, 0.001)
    arbiter = Arbiter()
    for step, core in ((0, one), (step_of_second, other)):
        turn = arbiter.join(core, list(core.instances))
        turn.step_of, turn.step = frozenset({"street"}), step
    return one, other


def test_on_a_shared_device_the_later_step_goes_first() -> None:
    one, other = sharing(1)
    for core in (one, other):
        assert core.offer(Job(0.0), 0.0) is None
    assert one.decide(0.0).batch is None
    batch = other.decide(0.0).batch
    assert batch is not None
    other.finished(batch, 0.005, 0.005)  # it has used the device, and goes first all the same
    assert other.offer(Job(0.005), 0.005) is None
    assert one.decide(0.005).batch is None
    batch = other.decide(0.005).batch
    assert batch is not None
    other.finished(batch, 0.010, 0.005)
    assert one.decide(0.010).batch is not None


def test_models_that_are_steps_of_each_other_take_turns() -> None:
    one, other = sharing(0)
    for core in (one, other):
        assert core.offer(Job(0.0), 0.0) is None
    batch = one.decide(0.0).batch
    assert batch is not None
    one.finished(batch, 0.005, 0.005)
    assert one.offer(Job(0.005), 0.005) is None
    assert one.decide(0.005).batch is None
    assert other.decide(0.005).batch is not None
