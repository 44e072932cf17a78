"""From tallies to numbers: rates, phases, several processes, and whether the generator was the bottleneck."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.load_report import Generator, Part, bound_ms, judge, report
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Histogram, Kind, Spread, Tally, Ticket, milliseconds

NOTHING = milliseconds(Histogram())


def tally(answered: int, refused: int = 0, response: float = 0.01, slo: float | None = None) -> Tally:
    found = Tally()
    for number in range(answered + refused):
        ticket = Ticket(number, 0.0)
        ticket.sent = 0.0
        found.start(ticket)
        kind = Answer(Kind.REFUSED, "overload") if number >= answered else PLAIN_ANSWER
        found.end(ticket, response, kind, slo)
    return found


def part(*tallies: Tally, seconds: float = 3.0, early: bool = False, last: float = 3.0) -> Part:
    return Part(list(tallies), seconds, last, early, 1.0, 4.0, Histogram([0.001]), {"connections": 2})


def test_rates_are_per_second_of_the_phase_and_the_warm_up_is_not_in_the_total() -> None:
    phases = (Phase(10, 1.0, warmup=True), Phase(10, 2.0), Phase(30, 1.0))
    plan = Plan(Open(phases), slo=0.05, batch=2)
    found = report(plan, [part(tally(10), tally(20), tally(20, 10), seconds=3.99)], "somewhere")
    assert [counts.answered_rps for counts in found.phases] == [10, 10, 20]
    total = found.total
    assert (total.offered, total.answered, total.refused, total.seconds) == (50, 40, {"overload": 10}, 3.0)
    assert total.attainment == pytest.approx(0.8)
    assert total.goodput_rps == total.answered_rps == pytest.approx(40 / 3, abs=1e-3)
    assert total.images_rps == pytest.approx(80 / 3, abs=1e-3)
    assert total.response_ms.p99 == pytest.approx(10, rel=0.01)


def test_processes_add_up() -> None:
    plan = Plan(Open((Phase(10, 2.0),)))
    found = report(plan, [part(tally(3)), part(tally(4, 1))], "x")
    assert (found.total.answered, found.total.offered) == (7, 8)
    g = found.generator
    assert (g.processes, g.connections, g.processor_seconds, g.busiest_core_share) == (2, 4, 2.0, 0.25)
    assert g.processor_us_per_request == 250_000


def test_phases_that_were_not_reached_have_no_length() -> None:
    plan = Plan(Open((Phase(10, 2.0), Phase(10, 2.0), Phase(10, 2.0))))
    found = report(plan, [part(tally(20), tally(5), tally(0), seconds=2.5, early=True)], "x")
    assert [counts.seconds for counts in found.phases] == [2.0, 0.5, 0.0]
    assert [counts.offered_rps for counts in found.phases] == [10, 10, 0]
    assert found.stopped_early


def test_a_closed_loop_lasts_until_its_last_answer() -> None:
    found = report(Plan(Closed(1, requests=4)), [part(tally(4), seconds=1.5, last=2.0)], "x")
    assert found.total.seconds == 2.0
    assert found.total.answered_rps == 2.0
    warm = report(
        Plan(Closed(1, requests=4, warmup=1.0)), [part(tally(2), tally(4), seconds=1.5, last=3.0)], "x"
    )
    assert [counts.seconds for counts in warm.phases] == [1.0, 2.0]


def test_it_is_one_json_object() -> None:
    found = report(Plan(Open((Phase(10, 2.0),)), slo=0.05), [part(tally(3))], "x").as_json()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found))
    assert found["answered"] == 3
    assert found["generator_late"] is False


# ---- the generator


def lag(p99: float) -> Spread:
    return replace(NOTHING, count=100, p99=p99)


GENERATOR = Generator(1, 1.0, 0.3, 50.0, lag(0.1), lag(0.2), lag(1.0), 16, 16, 0, 0)
PLAN = Plan(Open((Phase(100, 1.0),)), slo=0.02)


def test_a_generator_on_time_is_not_late() -> None:
    assert judge(GENERATOR, PLAN) == []
    assert bound_ms(None) == bound_ms(0.02) == 5.0
    assert bound_ms(0.2) == 20.0


def test_a_generator_that_had_too_much_to_do() -> None:
    (why,) = judge(replace(GENERATOR, start_lag_ms=lag(7), send_lag_ms=lag(7), busiest_core_share=0.97), PLAN)
    assert "p99 7.0 ms after their time, with 5 ms allowed" in why
    assert "more --processes" in why
    (why,) = judge(replace(GENERATOR, busiest_core_share=0.97), PLAN)
    assert "97 % of a core" in why


def test_a_generator_that_was_kept_from_running() -> None:
    (why,) = judge(replace(GENERATOR, start_lag_ms=lag(7), send_lag_ms=lag(7)), PLAN)
    assert "Other processes keep it from running" in why


def test_a_generator_without_a_free_connection() -> None:
    short = replace(GENERATOR, send_lag_ms=lag(80))
    (why,) = judge(short, PLAN)
    assert "with 16 of them. Give more --connections" in why
    (why,) = judge(replace(short, connection_limit=256), PLAN)
    assert "Opening more took so long" in why
    assert judge(short, Plan(Closed(8, seconds=1.0))) == []
