"""When requests are due: phases, kinds of traffic, and shares of several processes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.lab.load.load_plan import OpenLoop, Phase, Schedule
from carpool.sim.arrivals import Arrival, Bursty, Cameras, Constant, Poisson, Recording, Traffic, poisson

PHASES = (Phase(100, 1.0), Phase(400, 0.5), Phase(100, 1.0))


def test_constant_gaps_are_equal_and_phases_follow_each_other() -> None:
    schedule = Schedule((Phase(10, 1.0), Phase(2, 2.0)), Constant())
    expected = [n / 10 for n in range(10)] + [1.0, 1.5, 2.0, 2.5]
    assert list(schedule.times) == pytest.approx(expected)
    assert list(schedule.phases) == [0] * 10 + [1] * 4


@pytest.mark.parametrize("traffic", [Poisson(), Constant(), Bursty(period=0.2, length=0.05)])
def test_times_rise_and_stay_in_their_phase(traffic: Traffic) -> None:
    schedule = Schedule(PHASES, traffic, seed=3)
    assert list(schedule.times) == sorted(schedule.times)
    starts = (0.0, 1.0, 1.5, 2.5)
    for time, phase in zip(schedule.times, schedule.phases, strict=True):
        assert starts[phase] <= time < starts[phase + 1]


def test_the_seed_decides() -> None:
    assert Schedule(PHASES, Poisson(), 7).times == Schedule(PHASES, Poisson(), 7).times
    assert Schedule(PHASES, Poisson(), 7).times != Schedule(PHASES, Poisson(), 8).times


def test_it_is_the_traffic_that_the_simulator_plays() -> None:
    arrivals = poisson(200, 3.0, Random(5))
    assert list(Schedule((Phase(200, 3.0),), Poisson(), 5).times) == [arrival.at for arrival in arrivals]


def test_cameras_and_traces_keep_their_names_and_images() -> None:
    cameras = Schedule((Phase(20, 1.0),), Cameras(2, 10, per_source=True))
    assert {cameras.source(number) for number in range(len(cameras))} == {"camera-0", "camera-1"}
    recorded = Recording([Arrival(0.0, 4, "gate"), Arrival(1.0)], per_source=True)
    trace = Schedule((Phase(recorded.own_rate, 1.01),), recorded)
    assert [(trace.images[n], trace.source(n)) for n in range(2)] == [(4, "gate"), (1, "")]
    assert Schedule(PHASES, Poisson()).source(3) == ""


def test_a_run_has_a_bound() -> None:
    with pytest.raises(InvalidInput, match="lower the rate or the duration"):
        Schedule((Phase(100_000, 86_400),), Poisson())


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.floats(0, 3), min_size=1, max_size=8))
def test_processes_share_every_request_exactly_once(processes: int, looks: list[float]) -> None:
    schedule = Schedule((Phase(50, 2.0),), Poisson())
    seen = []
    for part in range(processes):
        pace = OpenLoop(schedule, part, processes)
        for now in [*sorted(looks), 2.0]:
            while tickets := pace.due(now, 3):
                assert all(ticket.intended <= now for ticket in tickets)
                seen += [ticket.number for ticket in tickets]
            assert pace.next_at > now
        assert pace.finished
    assert sorted(seen) == list(range(len(schedule)))
