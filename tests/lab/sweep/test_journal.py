from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.errors import InvalidInput
from carpool.lab.sweep.sweep_runs import Journal, digest
from lab.sweep.samples import run

ASKED: dict[str, Any] = {"model": "m", "rates": [1.0, 2.0], "settings": [{"kind": "promise"}]}
FOUND = {"slo_ms": 50.0}


def begun(folder: Path) -> Journal:
    journal = Journal.open(folder, ASKED)
    journal.begin(ASKED, FOUND)
    return journal


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = begun(tmp_path / "new" / "out")
    assert first.runs == []
    made = [run("a", 10.0), run("a", 20.0, 1, void=("late",), ms=[])]
    for one in made:
        first.add(one)
    again = Journal.open(tmp_path / "new" / "out", ASKED)
    assert again.runs == made
    assert again.basis == FOUND


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    journal = begun(tmp_path)
    journal.add(run("a", 10.0))
    journal.add(run("a", 20.0))
    file = tmp_path / "runs.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    again = Journal.open(tmp_path, ASKED)
    assert [found.rate for found in again.runs] == [10.0]
    again.add(run("a", 20.0))
    assert [found.rate for found in Journal.open(tmp_path, ASKED).runs] == [10.0, 20.0]


@pytest.mark.parametrize(
    "line", ["[]", "7", "{}", '{"digest": "OWN"}', "nonsense", '{"digest": "other"}', "\0"]
)
def test_lines_that_are_not_of_this_sweep_do_not_count(tmp_path: Path, line: str) -> None:
    begun(tmp_path).add(run("a", 10.0))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(line.replace("OWN", digest(ASKED)) + "\n")
    assert len(Journal.open(tmp_path, ASKED).runs) == 1


def test_other_settings_are_refused_and_the_difference_is_said(tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(InvalidInput, match=r"rates was \[1.0, 2.0\] and is \[3.0\] now; seconds was null"):
        Journal.open(tmp_path, ASKED | {"rates": [3.0], "seconds": 5})


def test_a_sweep_that_did_not_get_far_is_begun_again(tmp_path: Path) -> None:
    for name in ("server-1.log", "server-12.log", "sweep.json.part"):
        (tmp_path / name).write_text("it died")
    assert begun(tmp_path).runs == []


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidInput, match="no sweep"):
        Journal.open(tmp_path, ASKED)
    with pytest.raises(InvalidInput, match="--out"):
        Journal.open(tmp_path / "thesis.txt" / "below", ASKED)
    (tmp_path / "sweep.json").write_text("[1]")
    with pytest.raises(InvalidInput, match="not of a sweep"):
        Journal.open(tmp_path, ASKED)


def test_the_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest(ASKED) == digest(dict(reversed(ASKED.items())))
    assert digest(ASKED) != digest(ASKED | {"model": "n"})
