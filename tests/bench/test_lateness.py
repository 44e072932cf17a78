"""Late answers against what the runner did: which step is blamed, and how a log is read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from carpool.lab.load.tally import Slice
from chip.lateness import NOTHING, Bin, Slices, Step, blamed, steps, told

AT = 1_800_000_000.0


def at(seconds: float) -> str:
    return datetime.fromtimestamp(AT + seconds, UTC).isoformat()


def write_log(path: Path) -> Path:
    events = [
        {"event": "compiler-imported", "began": AT + 1.0, "seconds": 2.0, "time": at(3.0)},
        {"event": "long-collections", "seen": str([{"at": AT + 2.0, "seconds": 0.1}])},
        {
            "event": "batch-size-compiled",
            "size": 8,
            "time": at(5.0),
            "steps": str([{"began": AT + 3.0, "compile": 1.0, "capture": 0.5}]),
        },
    ]
    lines = ["a line of somebody else", "[]", "{}", *(json.dumps(event) for event in events)]
    path.write_text("\n".join(lines))
    return path


def test_a_log_becomes_steps_in_their_order(tmp_path: Path) -> None:
    found = [
        (step.name, step.began - AT, step.ended - AT) for step in steps(write_log(tmp_path / "serve.log"))
    ]
    assert [name for name, _, _ in found] == ["import", "collector", "compile 8", "capture 8", "planned 8"]
    assert found[3][1:] == pytest.approx((4.0, 4.5))


def test_what_went_on_is_blamed_and_shared_where_it_overlaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bins = [
        Bin(AT, 10, 10),
        Bin(AT + 1.5, 10, 4),
        Bin(AT + 1.75, 8, 4, refused=2),
        Bin(AT + 9.0, 5, 3, failed=1),
    ]
    found = blamed(bins, [Step("import", AT + 1.0, AT + 3.0), Step("collector", AT + 1.9, AT + 2.0)])
    assert found == {"import": 9, "collector": 3, NOTHING: 3}
    out = tmp_path / "slices.json"
    assert told(bins, write_log(tmp_path / "serve.log"), out)["import"] > 0
    assert "late or refused" in capsys.readouterr().out
    assert [Bin(**one) for one in json.loads(out.read_text())["bins"]] == bins


def test_the_parts_of_all_generating_processes_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chip.lateness.time.time", lambda: AT)
    slices, part = Slices(), Slice()
    part.answered, part.good = 3, 2
    slices(0.3, part)
    slices(0.3, part)
    assert [(one.answered, one.bad) for one in slices.bins] == [(6, 2)]
