"""What the benchmark makes of what it saw; the runs themselves need a machine with nothing else to do."""

import argparse
from dataclasses import replace

import pytest

from load.neighbour import Neighbour
from overload_real import Turn, row_names, summarise_row
from waiting import until

_TURN = Turn(
    order=0,
    row="3×",
    offered_rps=300.0,
    goodput_rps=95.0,
    of_capacity=0.85,
    of_left=0.95,
    p50_ms=150.0,
    p99_ms=250.0,
    refused=0.6,
    told_ms=10.0,
    failed=0.0,
    wasted=0.01,
    server_cpu=0.9,
    generator_cpu=0.1,
    neighbour_cpu=0.0,
    others_cpu=0.0,
    late=0.0,
    quiet=True,
)


def test_disturbed_rounds_do_not_count_where_there_are_quiet_ones() -> None:
    turns = [_TURN, replace(_TURN, quiet=False, p99_ms=900.0), replace(_TURN, p99_ms=252.0)]
    row = summarise_row("3×", turns, 250.0)
    assert (row.turns, row.quiet_turns, row.figures["p99_ms"]) == (3, 2, 251.0)
    assert all(row.ok.values())


@pytest.mark.parametrize(
    ("field", "value", "fails"),
    [
        ("of_left", 0.89, "goodput"),
        ("p99_ms", 263.0, "p99"),
        ("wasted", 0.06, "wasted"),
        ("told_ms", 51.0, "told"),
    ],
)
def test_each_of_the_four_can_fail_alone(field: str, value: float, fails: str) -> None:
    row = summarise_row("3×", [replace(_TURN, **{field: value})], 250.0)
    assert [name for name, ok in row.ok.items() if not ok] == [fails]


def test_rows_are_named_as_the_table_shows_them() -> None:
    assert row_names("0.9x, 12×,clients") == ("0.9", "12", "clients")
    with pytest.raises(argparse.ArgumentTypeError, match="no row 'many'"):
        row_names("many")


def test_the_neighbour_works_only_when_told_to_and_ends_with_its_pipe() -> None:
    neighbour = Neighbour()
    try:
        neighbour.go()
        until(lambda: sum(neighbour.cpu().values()) >= 0.1)
    finally:
        neighbour.close()
    assert not neighbour.cpu()
