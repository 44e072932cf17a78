"""Closed loops in virtual time: how many are asked, by how many clients, until when."""

from __future__ import annotations

from math import inf

import pytest

from carpool.lab.load.load_plan import Closed, ClosedLoop, Open, OpenLoop, Pace, Phase, pace_of
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Ledger, Tally, Ticket
from carpool.sim.arrivals import Constant
from lab.load.playing import play


def after(seconds: float) -> object:
    def serve(_ticket: Ticket, now: float) -> tuple[float, Answer]:
        return now + seconds, PLAIN_ANSWER

    return serve


def played(pace: Pace, service: float, until: float = 100.0, timeout: float = 60.0) -> list[Tally]:
    ledger = Ledger(2, slo=None, timeout=timeout)
    play(pace, ledger, after(service), until=until)  # type: ignore[arg-type]
    return ledger.tallies


def test_so_many_clients_and_no_more_at_once() -> None:
    pace = ClosedLoop(Closed(4, seconds=1.0))
    assert len(pace.due(0.0, 100)) == 4
    assert pace.due(0.5, 100) == []
    pace.answered(0.6)
    assert len(pace.due(0.6, 100)) == 1


def test_it_asks_as_fast_as_it_is_answered() -> None:
    tallies = played(ClosedLoop(Closed(4, seconds=1.0)), 0.0999)
    assert tallies[0].answered == 4 * 11  # and the last ones are waited for


def test_thinking_slows_it_down() -> None:
    assert played(ClosedLoop(Closed(1, seconds=1.0, think=0.3)), 0.1999)[0].answered == 3


def test_a_number_of_requests_is_sent_exactly() -> None:
    pace = ClosedLoop(Closed(8, requests=21))
    assert played(pace, 0.1)[0].offered == 21
    assert pace.finished


def test_processes_share_clients_and_requests() -> None:
    plan = Closed(5, requests=17)
    parts = [ClosedLoop(plan, part, 3) for part in range(3)]
    assert [len(part.due(0.0, 100)) for part in parts] == [2, 2, 1]
    parts = [ClosedLoop(plan, part, 3) for part in range(3)]
    assert sum(played(part, 0.1)[0].offered for part in parts) == 17


def test_the_warm_up_does_not_count() -> None:
    tallies = played(ClosedLoop(Closed(1, requests=5, warmup=1.0)), 0.1999)
    assert (tallies[0].offered, tallies[1].offered) == (6, 5)


def test_a_server_that_never_answers_does_not_make_it_endless() -> None:
    pace = ClosedLoop(Closed(2, seconds=3.0))
    pace.due(0.0, 100)
    assert pace.next_at == 3.0
    assert pace.due(3.0, 100) == []
    assert pace.finished
    assert pace.next_at == inf


def test_clients_whose_request_timed_out_ask_again() -> None:
    tallies = played(ClosedLoop(Closed(1, seconds=1.0)), 50.0, timeout=0.3)
    assert tallies[0].timed_out >= 1


@pytest.mark.parametrize("load", [Open((Phase(10, 1.0),), Constant()), Closed(3, seconds=1.0)])
def test_stopped_is_finished(load: Open | Closed) -> None:
    pace = pace_of(load)
    assert isinstance(pace, ClosedLoop if isinstance(load, Closed) else OpenLoop)
    assert pace.due(0.0, 1)
    pace.stop()
    assert pace.finished
    assert pace.next_at == inf
    assert pace.due(5.0, 100) == []
