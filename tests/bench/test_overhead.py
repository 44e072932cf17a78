"""What overhead.py keeps of a comparison in which a server dies."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import overhead
from load.burst import Burst, LoadError
from load.slices import Plan
from peers.server import Recipe, Server, ServerError
from waiting import until

PLAN = Plan((1,), rounds=9, max_rounds=3, seconds=0.0, repeats=0, patience_s=0.0, limit_s=60.0)


class Peer:
    """Answers two slices, and dies in the third."""

    group = "http"

    def __init__(self, name: str, dies: Callable[[], None] = lambda: None) -> None:
        self.name, self._dies, self._slices = name, dies, 0

    def fire(self, _concurrency: int, _seconds: float) -> Burst:
        self._slices += 1
        if self._slices == 3:
            self._dies()
        return Burst(1, seconds=1.0, p50_ms=1.0, p99_ms=1.0, failures={}, cpu_seconds=0.0)

    def cpu(self) -> dict[int, float]:
        return {}


@pytest.mark.parametrize("seen_as", [ServerError, LoadError])
def test_the_turns_before_a_servers_death_are_kept(
    seen_as: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def dies() -> None:
        raise seen_as("triton was ended by signal 11")

    lanes: Any = [Peer("carpool"), Peer("triton", dies)]
    turns, died = overhead.measured(lanes, PLAN, end=1e12)
    assert died
    assert [set(turn.slices) for turn in turns] == [{"carpool", "triton"}] * 2
    assert "signal 11" in capsys.readouterr().err


def test_without_any_turn_there_is_nothing_to_keep() -> None:
    class Dead(Peer):
        def cpu(self) -> dict[int, float]:
            raise ServerError("it ended")

    lanes: Any = [Dead("triton")]
    with pytest.raises(ServerError):
        overhead.measured(lanes, PLAN, end=1e12)


def test_a_server_that_crashed_says_by_which_signal(tmp_path: Path) -> None:
    code = f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"
    server = Server(Recipe("Triton", [sys.executable, "-c", code], {}, ()), tmp_path)
    until(lambda: server._process.poll() is not None)
    with pytest.raises(ServerError, match="Triton was ended by signal 11"):
        server.cpu()
