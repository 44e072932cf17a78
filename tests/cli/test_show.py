"""Progress without a terminal: nothing for what is soon over, then a line now and then."""

from __future__ import annotations

import pytest

from carpool.cli import show


def test_a_line_now_and_then_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(show.time, "monotonic", lambda: clock[0])
    with show.steps("simulating", 6) as step:
        for clock[0] in (101.0, 102.5, 103.0, 108.0, 109.0, 120.0):
            step()
    assert capsys.readouterr().err.splitlines() == [
        "carpool: simulating: 2 of 6",
        "carpool: simulating: 4 of 6",
    ]
    with show.status("measuring") as tell:
        tell("batches of 2")
        clock[0] += 3.0
        tell("batches of 4")
    assert capsys.readouterr().err == "carpool: batches of 4\n"


def test_lines_are_not_wrapped_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = " ".join(["word"] * 60)
    show.table(["name", "why"], [["a", long], ["b", long]], left=["name", "why"])
    show.paragraph(long)
    show.paragraph(long, "· ")
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert found[1:] == [f"a     {long}", f"b     {long}", long, f"· {long}"]
    monkeypatch.setenv("COLUMNS", "80")
    show.paragraph(long)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
