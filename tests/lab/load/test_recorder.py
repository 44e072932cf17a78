"""Single requests in a file."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from carpool.errors import InvalidInput
from carpool.lab.load.tally import COLUMNS, Answer, Kind, Ticket, Timing, request_log


def record(path: Path) -> None:
    with request_log(path) as recorder:
        sent = Ticket(0, 0.5, 1, 4, "cam,1")
        sent.sent = 0.51
        recorder(sent, 0.6, Answer(Kind.ANSWERED, "", Timing(0.01, 0.02, 8)))
        recorder(Ticket(1, 0.7), 10.7, Answer(Kind.TIMED_OUT))


def test_json_lines(tmp_path: Path) -> None:
    record(tmp_path / "a.jsonl")
    first, second = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert tuple(first) == COLUMNS
    assert (first["source"], first["images"], first["queue_ms"], first["batch"]) == ("cam,1", 4, 10.0, 8)
    assert (second["outcome"], second["sent_s"], second["batch"]) == ("timed-out", None, None)


def test_csv(tmp_path: Path) -> None:
    record(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["source"], first["outcome"], first["ended_s"]) == ("cam,1", "answered", "0.6")
    assert second["sent_s"] == ""


@pytest.mark.parametrize("name", ["a.txt", "no/such/folder.csv"])
def test_files_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="--save"), request_log(tmp_path / name):
        pass
