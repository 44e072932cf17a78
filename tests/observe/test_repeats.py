"""Warnings that repeat are counted, in virtual time."""

from __future__ import annotations

import json
import logging
import math
import os

import pytest

from carpool.observe import logs
from carpool.observe.logs import INTERVAL_S, MOST_OF_A_KIND, Event, LineHandler


class Written:
    """A handler on a pipe, and the clock it looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._handler = LineHandler(self._writing, as_json=True)
        monkeypatch.setattr(logs.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(LineHandler, "_wake_later", lambda _self, _now: None)

    def log(self, event: str, level: int = logging.WARNING, **fields: object) -> None:
        self._handler.handle(logging.LogRecord("carpool.x", level, "", 0, Event(event, fields), None, None))

    def end(self) -> None:
        self._handler.flush()

    def lines(self) -> list[dict[str, object]]:
        try:
            lines = os.read(self._reading, 1 << 20).splitlines()
        except BlockingIOError:
            return []
        return [json.loads(line) for line in lines]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(monkeypatch)


def test_a_full_disk_is_told_once_in_an_interval_with_a_count(written: Written) -> None:
    for _ in range(1444):
        written.log("trace-not-written", file="/t", error="No space left on device")
        written.now += 8 / 1444
    assert [line["event"] for line in written.lines()] == ["trace-not-written"]
    written.now += INTERVAL_S
    written.log("something-else")
    summary, other = written.lines()
    assert (summary["event"], summary["file"], summary["repeated"]) == ("trace-not-written", "/t", 1443)
    assert other["event"] == "something-else"
    written.log("trace-not-written", file="/t", error="No space left on device")
    assert len(written.lines()) == 1  # a new interval


def test_lines_that_differ_are_told_up_to_a_bound(written: Written) -> None:
    for number in range(100):
        written.log("slow", number=number)
    assert len(written.lines()) == MOST_OF_A_KIND
    written.end()
    [summary] = written.lines()
    assert (summary["number"], summary["more"]) == (99, 100 - MOST_OF_A_KIND)


def test_what_is_no_warning_is_always_told(written: Written) -> None:
    for _ in range(50):
        written.log("model-ready", logging.INFO, model="m")
    assert len(written.lines()) == 50


def test_nothing_is_added_where_nothing_was_held_back(written: Written) -> None:
    written.log("once")
    written.now = math.inf
    written.end()
    assert len(written.lines()) == 1


def test_the_count_comes_by_itself_when_no_other_line_does(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, then: object) -> None:
            waits.append(seconds)
            self.then = then

        def start(self) -> None:
            timers.append(self)

    timers: list[Timer] = []
    monkeypatch.setattr(logs.threading, "Timer", Timer)
    reading, writing = os.pipe()
    now = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    handler = LineHandler(writing, as_json=True)
    for _ in range(3):
        handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "broken %s", ("pipe",), None))
    assert waits == [INTERVAL_S]
    now = INTERVAL_S
    assert callable(timers[0].then)
    timers[0].then()
    first, second = map(json.loads, os.read(reading, 1 << 16).splitlines())
    assert (first["text"], "repeated" in first) == ("broken pipe", False)
    assert (second["text"], second["repeated"]) == ("broken pipe", 2)
    assert len(waits) == 1  # nothing is held back any more
