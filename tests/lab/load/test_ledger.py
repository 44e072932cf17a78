"""Bookkeeping in virtual time: every request has one end, and a stall of the server cannot hide."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.lab.load.load_plan import Closed, ClosedLoop, OpenLoop, Phase, Schedule
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Kind, Ledger, Tally, Ticket, Timing, failed
from carpool.sim.arrivals import Constant, Poisson
from lab.load.playing import Stalling, play

ANSWERS = st.sampled_from(
    [
        (0.01, PLAIN_ANSWER),
        (0.02, Answer(Kind.ANSWERED, "", Timing(0.001, 0.002, 4))),
        (0.2, PLAIN_ANSWER),  # later than the timeout
        (0.01, Answer(Kind.REFUSED, "overload")),
        (0.01, failed("broken-off")),
        (inf, PLAIN_ANSWER),
    ]
)


def ends(tally: Tally) -> int:
    refused, broken = sum(tally.refused.values()), sum(tally.failed.values())
    return tally.answered + refused + broken + tally.timed_out + tally.unanswered


@settings(deadline=None)
@given(st.lists(ANSWERS, min_size=1, max_size=30), st.integers(1, 8))
def test_every_request_ends_exactly_once(script: list[tuple[float, Answer]], connections: int) -> None:
    ledger = Ledger(2, slo=0.05, timeout=0.1)
    schedule = Schedule((Phase(200, 0.5), Phase(400, 0.5)), Poisson())

    def serve(ticket: Ticket, now: float) -> tuple[float, Answer]:
        after, answer = script[ticket.number % len(script)]
        return now + after, answer

    play(OpenLoop(schedule), ledger, serve, until=1.05, connections=connections)
    assert ledger.open == 0
    assert sum(tally.offered for tally in ledger.tallies) == len(schedule)
    for tally in ledger.tallies:
        assert ends(tally) == tally.offered
        assert tally.good <= tally.answered == tally.response.count == tally.service.count
        assert tally.sent <= tally.offered
        assert tally.response.most >= tally.service.most


def test_only_the_first_end_counts() -> None:
    ledger = Ledger(1, slo=None, timeout=1.0)
    ticket = Ticket(0, 0.0)
    ledger.start(ticket, 0.0)
    assert ledger.expire(0.99) == []
    assert ledger.expire(1.0) == [ticket]
    assert not ledger.end(ticket, 1.1, PLAIN_ANSWER)
    (tally,) = ledger.tallies
    assert (tally.timed_out, tally.answered, tally.offered, ledger.open) == (1, 0, 1, 0)


def test_what_is_open_at_the_end_is_unanswered_and_perhaps_never_sent() -> None:
    ledger = Ledger(1, slo=None, timeout=9.0)
    on_its_way, waiting = Ticket(0, 0.0), Ticket(1, 0.0)
    for ticket in (on_its_way, waiting):
        ledger.start(ticket, 0.0)
    on_its_way.sent = 0.001
    assert set(ledger.abandon(5.0)) == {on_its_way, waiting}
    (tally,) = ledger.tallies
    assert (tally.unanswered, tally.sent) == (2, 1)


def test_what_is_outside_is_what_the_server_does_not_account_for() -> None:
    ledger = Ledger(1, slo=None, timeout=9.0)
    for number, timing in enumerate((Timing(0.010, 0.020, 4, post=0.005), Timing(0.0, 9.0, 1, 0.0))):
        ticket = Ticket(number, 0.0)
        ledger.start(ticket, 0.0)
        ticket.sent = 0.1
        ledger.end(ticket, 0.175, Answer(Kind.ANSWERED, "", timing))
    silent = Ticket(2, 0.0)
    ledger.start(silent, 0.0)
    ledger.end(silent, 0.5, Answer(Kind.ANSWERED, "", Timing(0.010, 0.020, 4)))
    (tally,) = ledger.tallies
    assert (tally.outside.count, tally.answered) == (2, 3)
    assert tally.outside.most == pytest.approx(0.040)
    assert tally.outside.least == 0.0  # it cannot know of more than there was


def test_goodput_is_what_was_answered_within_the_slo_from_the_intended_time() -> None:
    ledger = Ledger(1, slo=0.05, timeout=9.0)
    for number, (started, ended) in enumerate(((0.0, 0.05), (0.04, 0.06))):
        ticket = Ticket(number, 0.0)
        ledger.start(ticket, started)
        ticket.sent = started
        ledger.end(ticket, ended, PLAIN_ANSWER)
    (tally,) = ledger.tallies
    assert (tally.answered, tally.good) == (2, 1)
    assert tally.service.most == pytest.approx(0.05)
    assert tally.response.most == pytest.approx(0.06)
    assert tally.start_lag.most == pytest.approx(0.04)


def test_slices_add_up_to_the_tally() -> None:
    ledger = Ledger(1, slo=0.05, timeout=9.0)
    offered = answered = good = 0
    for number in range(10):
        ticket = Ticket(number, float(number))
        ledger.start(ticket, number)
        ledger.end(ticket, number + (0.01 if number % 2 else 0.1), PLAIN_ANSWER)
        seen = ledger.cut()
        offered, answered, good = offered + seen.offered, answered + seen.answered, good + seen.good
    assert (offered, answered, good) == (10, 10, 5)
    assert ledger.cut().offered == 0


def test_merging_adds_everything() -> None:
    one, two = Tally(), Tally()
    for tally, kind in ((one, Kind.REFUSED), (two, Kind.ANSWERED)):
        ticket = Ticket(0, 0.0, images=3)
        ticket.sent = 0.1
        tally.start(ticket)
        tally.end(ticket, 1.0, Answer(kind, "overload" if kind is Kind.REFUSED else ""), None)
    one.merge(two)
    assert (one.offered, one.sent, one.answered, one.images) == (2, 2, 1, 3)
    assert one.refused == {"overload": 1}
    assert (one.response.count, one.refusal.count, one.send_lag.count) == (1, 1, 2)


# ---- coordinated omission

STALL = (2.0, 3.0)  # a server that answers in 1 ms, but not at all for one of ten seconds


def stalled(pace: OpenLoop | ClosedLoop, connections: float = inf) -> Tally:
    ledger = Ledger(1, slo=None, timeout=60.0)
    play(pace, ledger, Stalling(0.001, STALL), until=20.0, connections=connections)
    return ledger.tallies[0]


def test_an_open_loop_sees_what_a_stall_did_to_everybody() -> None:
    """A tenth of all requests came during the stall and waited half a second on average: p99 must say so."""
    tally = stalled(OpenLoop(Schedule((Phase(100, 10.0),), Constant())))
    assert tally.answered == 1000
    assert tally.response.percentile(0.99) > 0.85
    assert tally.response.percentile(0.95) == pytest.approx(0.5, rel=0.05)


def test_a_closed_loop_hardly_notices() -> None:
    """Its one client was the one request that waited: this is the omission."""
    tally = stalled(ClosedLoop(Closed(1, seconds=10.0, think=0.009)))
    assert 800 < tally.answered < 1000
    assert tally.response.percentile(0.99) < 0.01
    assert tally.response.most > 0.9


def test_waiting_for_a_connection_is_in_the_response_time_and_not_in_the_service_time() -> None:
    """With one connection the generator itself holds back; counting from the sending would hide the stall."""
    tally = stalled(OpenLoop(Schedule((Phase(100, 10.0),), Constant())), connections=1)
    assert tally.service.percentile(0.99) < 0.01
    assert tally.response.percentile(0.99) > 0.85
    assert tally.send_lag.percentile(0.99) > 0.85
    assert tally.start_lag.most == 0.0
