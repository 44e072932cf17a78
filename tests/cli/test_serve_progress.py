"""How far a start is, as people and logs are told; the loop's clock is played by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from carpool.cli import serve_command
from carpool.cli.serve_command import LoadingProgress
from carpool.link.catalog import LoadingStep


class Clock:
    """Stands in for the loop and for time: what is due is run when the hands are moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(serve_command.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)

    def call_later(self, seconds: float, then: Callable[[], None]) -> Clock:
        self._due.append((self.now + seconds, then))
        return self

    def cancel(self) -> None:
        self._due.clear()

    def move_to(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            self.now, then = self._due.pop(0)
            then()
        self.now = now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_terminal_sees_every_model_and_that_time_goes_on(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress = LoadingProgress()
    progress.step(LoadingStep("a", "loading instance 1 of 1", 1, 5))
    clock.move_to(1.0)
    progress.step(LoadingStep("a", "measuring batches of 1", 1, 5))
    clock.move_to(2.0)
    progress.step(LoadingStep("u2netp", "measuring batches of 2", 2, 5))
    clock.move_to(11.0)
    progress.end()
    clock.move_to(60.0)
    progress.step(LoadingStep("a", "again", 1, 5))
    assert capsys.readouterr().out.splitlines() == [
        "  loading 1 of 5: a, loading instance 1 of 1 (0 s)",
        "  loading 2 of 5: u2netp, measuring batches of 2 (2 s)",
        "  loading 2 of 5: u2netp, measuring batches of 2 (5 s)",
        "  loading 2 of 5: u2netp, measuring batches of 2 (10 s)",
    ]


def test_a_log_gets_a_line_now_and_then(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "carpool")
    progress = LoadingProgress()
    for number in range(90):
        progress.step(LoadingStep("ab"[number // 45], f"step {number}", 1 + number // 45, 2))
        clock.move_to(number / 6)
    progress.end()
    assert caplog.messages == ['loading model=b step="step 60" number=2 of=2 seconds=10']
    assert capsys.readouterr().out == ""
