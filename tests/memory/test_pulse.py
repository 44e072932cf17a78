"""Signs of life, at times that the test sets."""

from __future__ import annotations

from typing import Any, cast

import pytest

from carpool.link.child_process import Child, Watchdog
from carpool.memory.pulse import BEAT_S, STALE_S, START_S, Pulses, Watch, pulse_bytes
from carpool.observe.logs import logger


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Process:
    """One that can be looked at, and shot."""

    pid = 7

    def __init__(self, kill_after: float = 10.0) -> None:
        self.clock = Clock()
        self.pulses = Pulses(bytearray(pulse_bytes(2)))
        self.killed = 0
        self.watch = Watch(lambda: self.pulses.read(1), self.clock)
        self.guard = Watchdog(cast(Child, self), self.watch, kill_after, logger("supervisor"), "process")
        self.up = True

    def kill(self) -> None:
        self.killed += 1

    def beat(self) -> None:
        self.pulses.beat(1)

    def pass_time(self, seconds: float, *, beats: bool = False) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.clock.now += BEAT_S
            if beats:
                self.beat()
            self.guard.look(patient=not self.up)
            if self.killed:
                return


@pytest.fixture
def process() -> Process:
    return Process()


def test_who_counts_is_left_alone(process: Process) -> None:
    process.pass_time(100, beats=True)
    assert not process.killed


def test_who_stands_still_is_told_of_and_then_killed(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.pass_time(1, beats=True)
    process.pass_time(2 * STALE_S)
    assert "process-stalled" in caplog.text
    assert not process.killed
    process.pass_time(10)
    assert process.killed == 1
    assert "process-hangs" in caplog.text


def test_who_moves_again_is_forgiven(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.pass_time(1, beats=True)
    for _ in range(5):
        process.pass_time(8)
        process.pass_time(1, beats=True)
    assert not process.killed
    assert caplog.text.count("process-stalled") == 5


def test_zero_kills_nobody() -> None:
    process = Process(kill_after=0)
    process.pass_time(1, beats=True)
    process.pass_time(1000)
    assert not process.killed


@pytest.mark.parametrize("began", [True, False])
def test_one_that_is_not_up_may_take_its_time(
    process: Process, began: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It imports, from whatever disk there is."""
    process.up = False
    if began:
        process.pass_time(0.5, beats=True)
    process.pass_time(START_S - 1)
    assert "process-stalled" not in caplog.text
    assert not process.killed
    process.pass_time(2)
    assert process.killed


def test_who_was_asleep_itself_blames_nobody(process: Process) -> None:
    """A laptop that was closed, or SIGSTOP to everybody: the watcher's clock has moved, too."""
    process.pass_time(1, beats=True)
    for _ in range(20):
        process.clock.now += 3600.0
        process.guard.look(patient=False)
        process.pass_time(0.2, beats=True)
    assert not process.killed


def test_another_process_begins_anew() -> None:
    pulses = Pulses(bytearray(pulse_bytes(2)))
    pulses.beat(1)
    pulses.clear(1)
    watch: Any = Watch(lambda: pulses.read(1), Clock())
    watch.look()
    assert not watch.begun
