"""Three servers behind real balancers: what must not fail does not, and how it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleet
from load.balancers import program
from load.real_prometheus import PROGRAM


def behind(kind: str) -> list[str]:
    if program(kind) is None:
        pytest.skip(f"no {kind} here: make fleet fetches it")
    return [kind]


@pytest.mark.conformance
@pytest.mark.parametrize("part", ["kill", "tls", "broken"])
@pytest.mark.parametrize("kind", fleet.KINDS)
def test_a_killed_or_broken_replica_costs_no_request(kind: str, part: str, tmp_path: Path) -> None:
    (row,) = fleet.DO[part](behind(kind), fleet.QUICK, tmp_path)
    assert (row.failed, row.why) == (0, "")
    assert row.requests > 100


@pytest.mark.conformance
@pytest.mark.parametrize("kind", fleet.KINDS)
def test_overload_leaves_nobody_out(kind: str, tmp_path: Path) -> None:
    (row,) = fleet.overload(behind(kind), fleet.QUICK, tmp_path)
    assert (row.failed, row.why) == (0, "")
    assert row.least_part is not None
    assert row.least_part > 0.2


@pytest.mark.conformance
@pytest.mark.parametrize("kind", fleet.KINDS)
def test_restarts_in_turn_cost_no_request(kind: str, tmp_path: Path) -> None:
    rows = fleet.restart(behind(kind), fleet.QUICK, tmp_path)
    expected = [(kind, 0, ""), (f"{kind}, no retries, lame duck", 0, "")]
    assert [(row.balancer, row.failed, row.why) for row in rows] == expected[: 1 + (kind != "nginx")]


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["haproxy", "envoy"])
def test_a_killed_replica_costs_no_call_over_grpc(kind: str, tmp_path: Path) -> None:
    (row,) = fleet.grpc(behind(kind), fleet.QUICK, tmp_path)
    assert (row.failed, row.why) == (0, "")
    assert row.requests > 100


@pytest.mark.conformance
@pytest.mark.parametrize("kind", fleet.KINDS)
def test_a_killed_replica_costs_no_photo(kind: str, tmp_path: Path) -> None:
    (row,) = fleet.jpeg(behind(kind), fleet.QUICK, tmp_path)
    assert (row.failed, row.why) == (0, "")
    assert row.requests > 100


@pytest.mark.conformance
def test_two_pools_are_switched_and_back_without_a_failure(tmp_path: Path) -> None:
    (row,) = fleet.switch(behind("haproxy"), fleet.QUICK, tmp_path)
    assert (row.failed, row.why) == (0, "")
    assert row.requests > 100


@pytest.mark.conformance
def test_prometheus_wants_as_many_replicas_as_the_plan_says(tmp_path: Path) -> None:
    if not PROGRAM.is_file():
        pytest.skip("no prometheus here: make fleet fetches it")
    rows = fleet.scale([], fleet.QUICK, tmp_path)
    assert [row.planned for row in rows] == sorted(row.planned or 0 for row in rows)
    for row in rows:
        assert row.as_wished, row


COUNTS = {
    "offered": 100,
    "good": 90,
    "goodput_rps": 45.0,
    "refused": {"overload": 5, "http-503": 1, "not-serving": 1},
    "failed": {"http-502": 2},
    "timed_out": 0,
    "unanswered": 1,
}


@pytest.mark.conformance
def test_a_second_replica_measures_nothing(tmp_path: Path) -> None:
    (row,) = fleet.second([], fleet.QUICK, tmp_path)
    assert row.measured == 0


def test_refusals_for_want_of_time_are_answers_and_all_else_is_a_failure() -> None:
    row = fleet.row("kill", "nginx", COUNTS)
    assert (row.failed, row.in_time, row.goodput) == (5, 0.9, 45.0)
    assert row.why == "2 × http-502, 1 × http-503, 1 × not-serving, 1 × no answer"
    assert not row.as_wished
    assert "NOT as wished" in fleet.as_text([row])


def test_parts_of_a_restart_add_up() -> None:
    total = fleet._sum([COUNTS, COUNTS])
    assert (total["offered"], total["refused"]["overload"], total["failed"]["http-502"]) == (200, 10, 4)
    assert total["goodput_rps"] == 45.0


@pytest.mark.parametrize("kind", fleet.KINDS)
def test_without_retries_nothing_is_asked_twice(kind: str) -> None:
    from carpool.extensions.deploy.balancer_config import Address, balancer_config
    from load.balancers import without_retries

    plain = without_retries(kind, balancer_config(kind, [Address("a", 1)], Address("b", 2)))
    off = {"haproxy": "retries 0", "envoy": "num_retries: 0", "nginx": "proxy_next_upstream off;"}[kind]
    on = {"haproxy": "retries 1", "envoy": "num_retries: 1", "nginx": "error_page 503"}[kind]
    assert off in plain
    assert on not in plain


def test_what_the_rows_of_the_rules_and_of_the_simulator_wish() -> None:
    row = fleet.row("scale", "1 times the load", COUNTS, wanted=3.1, planned=5)
    assert row.as_wished
    assert "3.10 replicas wanted, 5 planned" in fleet.as_text([row])
    assert not fleet.row("scale", "", COUNTS, wanted=3.1, planned=6).as_wished
    good = COUNTS | {"refused": {}, "failed": {}, "unanswered": 0}
    assert fleet.row("ways", "haproxy, leastconn", good, of_three=0.9, simulated=0.98).as_wished
    assert not fleet.row("ways", "haproxy, leastconn", good, of_three=0.9, simulated=1.04).as_wished


def test_without_retries_only_the_lines_about_them_go(tmp_path: Path) -> None:
    from carpool.extensions.deploy.balancer_config import Address, balancer_config
    from load.balancers import without_retries

    text = balancer_config("haproxy", [Address("a", 1)], Address("b", 2))
    plain = without_retries("haproxy", text)
    assert "retry-on" not in plain.replace("# ", "")
    assert plain.count("retries 0") == 1
    assert [line for line in plain.splitlines() if line.startswith("    server ")] == [
        "    server replica-1 a:1"
    ]
