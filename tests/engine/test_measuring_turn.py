"""Models are measured one at a time, and one that never ends keeps no other from being loaded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from carpool.engine.profile.measuring_turn import _LONGEST_S, MeasuringTurn

PATIENCE_S = 60.0


def test_one_that_never_ends_is_waited_for_no_longer_than_a_turn_takes() -> None:
    now = 1.0
    turn, entered = MeasuringTurn(lambda: now, look_s=0.001), threading.Event()

    def measure() -> None:
        with turn:
            entered.set()

    with ThreadPoolExecutor(1) as threads:
        with turn:
            waiting = threads.submit(measure)
            assert not entered.wait(0.01)
            now += _LONGEST_S
            waiting.result(PATIENCE_S)
            entered.clear()
            now += 1.0
        with turn:  # the one that went in beside it has not ended this turn
            waiting = threads.submit(measure)
            assert not entered.wait(0.01)
        waiting.result(PATIENCE_S)
    assert entered.is_set()
