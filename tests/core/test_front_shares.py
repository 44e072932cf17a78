"""Who is turned away by a front end that is behind, in virtual time: one loop, several who ask."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.constants import CONSTANTS
from carpool.core.front_load import BACKLOG_PROMISES, REST, FairBacklog, FrontShares
from carpool.core.learning import Rate

SLO = 0.05
SERVE, REFUSE = 270e-6, 70e-6
TICK = 0.004
LOOK = 0.005
SECONDS = 10.0
SETTLED = 1.0  # from then on it counts: a flood is seen when the wait has stood, and what gathered is gone
LIMIT = CONSTANTS.most_unread * SLO


class Who(NamedTuple):
    name: str
    rate: float
    slo: float | None = SLO
    model: int = 1
    refused_by_engine: float = 0.0  # this part of them


class Fared(NamedTuple):
    came: int
    turned_away: int
    in_time: int  # read within what plans leave to what is outside

    @property
    def attainment(self) -> float:
        return self.in_time / self.came


def arrivals(who: Who, random: Random) -> list[tuple[float, Who]]:
    found, at = [], 0.0
    while (at := at + random.expovariate(who.rate)) < SECONDS:
        found.append((at, who))
    return found


def play(everybody: Sequence[Who], seed: int = 1) -> dict[str, Fared]:
    random, backlog = Random(seed), FairBacklog()
    now = look_at = waited = 0.0
    counts = {who.name: [0, 0, 0] for who in everybody}
    for arrived, who in merge(*(arrivals(who, random) for who in everybody)):
        now = max(now, arrived)
        if now >= look_at:
            look_at, waited = now + LOOK, round((now - arrived) / TICK) * TICK
        count = counts[who.name] if arrived >= SETTLED else [0, 0, 0]
        count[0] += 1
        lane = backlog.shares.lane((str(who.model), who.name), now)
        lane.asked.add(1.0, now)
        if random.random() < who.refused_by_engine:
            away = True
        else:
            away = backlog.rejects(who.model, who.slo, lane, waited, now)
            count[1] += away
        count[2] += not away and now - arrived <= CONSTANTS.most_outside * SLO
        backlog.shares.done.add(0.4 if away else 1.0, now)
        now += REFUSE if away else SERVE
    return {name: Fared(*count) for name, count in counts.items()}


@pytest.mark.parametrize("flood", [4000.0, 6000.0, 9000.0])
def test_who_asks_for_little_is_not_turned_away_for_a_flood(flood: float) -> None:
    found = play([Who("small", 200.0), Who("flood", flood)])
    assert found["small"].turned_away == 0
    assert found["small"].attainment >= 0.97
    assert found["flood"].turned_away > 0


@pytest.mark.conformance
def test_a_flood_of_another_model_goes_first_whatever_it_was_promised() -> None:
    for slo in (None, 2.0):
        found = play([Who("small", 200.0), Who("flood", 6000.0, slo=slo, model=2)])
        assert found["small"].turned_away == 0
        assert found["small"].attainment >= 0.97


def test_two_who_flood_alike_are_turned_away_alike() -> None:
    found = play([Who("small", 200.0), Who("one", 4000.0), Who("other", 4000.0)])
    assert found["small"].turned_away == 0
    one, other = found["one"], found["other"]
    assert one.turned_away == pytest.approx(other.turned_away, rel=0.1)


def test_alone_it_gets_what_the_front_end_can_do() -> None:
    rate = 6000.0
    possible = (1 - rate * REFUSE) / (SERVE - REFUSE)
    assert play([Who("all", rate)])["all"].in_time / (SECONDS - SETTLED) >= 0.95 * possible


def test_many_small_ones_that_are_too_much_together_are_all_served_in_part() -> None:
    found = play([Who(f"camera-{number}", 150.0) for number in range(40)])
    assert all(fared.turned_away > 0 for fared in found.values())
    assert min(fared.attainment for fared in found.values()) > 0.2


def test_the_others_give_way_only_if_the_flood_alone_does_not_suffice() -> None:
    backlog, now = FairBacklog(), 1.0
    long = BACKLOG_PROMISES * SLO
    small, flood = (backlog.shares.lane(("m", name), now) for name in ("small", "flood"))
    refused = {small: 0, flood: 0}
    first: dict[object, float] = {}
    for _ in range(2000):
        now += 0.001
        for lane, count in ((flood, 30), (small, 1)):
            for _ in range(count):
                lane.asked.add(1.0, now)
                backlog.shares.done.add(1.0, now)
                if backlog.rejects(1, SLO, lane, 2 * LIMIT, now):
                    refused[lane] += 1
                    first.setdefault(lane, now)
    assert refused[flood] > refused[small] > 0
    assert first[small] >= first[flood] + 4 * long


def test_who_is_kept_waiting_counts_as_asking_for_more() -> None:
    shares, now = FrontShares(), 1.0
    held, busy = shares.lane(("m", "held"), now), shares.lane(("m", "busy"), now)
    held.asked.add(1.0, now)
    busy.asked.add(4.0, now)
    shares.done.add(5.0, now)
    assert not shares.asks_too_much(held, 0.9, now)
    assert shares.asks_too_much(busy, 0.9, now)
    shares.done.add(5.0, now)
    held.waits_for_more(now + 1.0)
    now += 0.01
    assert shares.asks_too_much(held, 0.9, now)
    assert not shares.asks_too_much(busy, 0.9, now)


def test_names_cost_no_memory() -> None:
    shares = FrontShares()
    for number in range(10_000):
        shares.lane(("m", f"name-{number}"), 1.0)
    assert len(shares) == CONSTANTS.max_lanes + 1
    assert shares.lane(("m", "late"), 1.0).key == REST
    assert shares.lane(("m", "later"), 1.0 + 2 * CONSTANTS.lately_s).key == ("m", "later")


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 100)), max_size=50))
def test_what_was_asked_is_forgotten_and_never_negative(story: list[tuple[float, float]]) -> None:
    flow, now, total = Rate(1.0), 0.0, 0.0
    for passed, work in story:
        now += passed
        flow.add(work, now)
        total += work
        assert 0.0 <= flow.at(now) <= total + 1e-9
    assert flow.at(now + 60.0) <= total * 1e-9


@given(
    demands=st.lists(st.floats(0.01, 100), min_size=1, max_size=20),
    share=st.floats(0.01, 0.99),
)
def test_the_division_is_max_min(demands: list[float], share: float) -> None:
    """Whoever asks for too much asks for more than each who does not, and somebody always does."""
    shares, now = FrontShares(), 1.0
    lanes = []
    for number, demand in enumerate(demands):
        lane = shares.lane(("m", str(number)), now)
        lane.asked.add(demand, now)
        shares.done.add(demand, now)
        lanes.append(lane)
    too_much = [lane.demand(now) for lane in lanes if shares.asks_too_much(lane, share, now)]
    others = [lane.demand(now) for lane in lanes if not shares.asks_too_much(lane, share, now)]
    assert too_much
    assert max(others, default=0.0) <= min(too_much)
    assert sum(others) <= share * sum(demands) + 1e-6
