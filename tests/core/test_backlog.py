"""A front end that is behind, in virtual time: one queue, in which to refuse costs less than to serve."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.front_load import BACKLOG_MEMORY_S, BACKLOG_PROMISES, Backlog

SLO = 0.05
SERVE, REFUSE = 270e-6, 70e-6
TICK = 0.004  # in which the kernel tells how long a request lay there
LOOK = 0.005
NEVER = Constants(most_unread=float("inf"))


class Played(NamedTuple):
    in_time: float  # read within the share of the promise that plans leave to what is outside, per second
    served: float
    refused: float
    longest: float


def play(
    rate: float, *, stalls: float = 0.0, stall: float = 0.0, constants: Constants = CONSTANTS, seed: int = 1
) -> Played:
    """Ten seconds, with so many stalls of the whole process per second."""
    random, backlog = Random(seed), Backlog(constants)
    arrived = now = look_at = waited = next_stall = longest = 0.0
    in_time = served = refused = 0
    while (arrived := arrived + random.expovariate(rate)) < 10.0:
        now = max(now, arrived)
        if stalls and now >= next_stall:
            now += stall if next_stall else 0.0
            next_stall = now + random.expovariate(stalls)
        if now >= look_at:
            look_at, waited = now + LOOK, round((now - arrived) / TICK) * TICK
        if backlog.is_too_long(waited, SLO, now):
            refused += 1
            now += REFUSE
            continue
        lay = now - arrived
        longest = max(longest, lay)
        in_time += lay <= CONSTANTS.most_outside * SLO
        served += 1
        now += SERVE
    return Played(in_time / 10, served / 10, refused / 10, longest)


@pytest.mark.parametrize("rate", [4500.0, 6000.0, 9000.0])
def test_beyond_what_it_can_do_nearly_all_it_could_do_is_read_in_time(rate: float) -> None:
    possible = (1 - rate * REFUSE) / (SERVE - REFUSE)
    assert play(rate).in_time >= 0.95 * possible
    assert play(rate, constants=NEVER).in_time < 0.02 * possible


def test_who_keeps_up_turns_nobody_away() -> None:
    found = play(3000.0)
    assert found.refused == 0
    assert found.longest < SLO / 2


def test_a_stall_that_is_worked_off_costs_few() -> None:
    found = play(2500.0, stalls=2.5, stall=0.02)
    assert found.refused < 0.01 * found.served
    patient = play(2500.0, stalls=2.5, stall=0.02, constants=NEVER)
    assert found.in_time >= patient.in_time


def test_a_wait_must_stand_before_anybody_is_turned_away() -> None:
    backlog, limit = Backlog(), CONSTANTS.most_unread * SLO
    long = BACKLOG_PROMISES * SLO
    assert not backlog.is_too_long(2 * limit, SLO, 1.0)
    assert not backlog.is_too_long(limit, SLO, 1.0 + long / 2)  # it was over once
    assert not backlog.is_too_long(2 * limit, SLO, 1.0 + long)
    assert backlog.is_too_long(2 * limit, SLO, 1.01 + 2 * long)
    assert not backlog.is_too_long(limit, SLO, 1.1 + 2 * long)
    assert backlog.is_too_long(2 * limit, SLO, 1.2 + 2 * long)  # not long ago
    quiet = 1.3 + 2 * long + BACKLOG_MEMORY_S
    assert not backlog.is_too_long(2 * limit, SLO, quiet)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2)), max_size=60))
def test_nobody_is_turned_away_while_the_wait_is_short(story: list[tuple[float, float]]) -> None:
    backlog, now = Backlog(), 0.0
    for passed, waited in story:
        now += passed
        if backlog.is_too_long(waited, SLO, now):
            assert waited > CONSTANTS.most_unread * SLO
