"""Lets models measure one at a time: beside another they would seem slower than they are.

A model whose run never ends would keep all others from being loaded, until it is unloaded. So no model waits
longer for its turn than any measurement takes: then times are taken beside the other, and `contention`
detects that they are disturbed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic

from carpool.observe.logs import logger

_LONGEST_S = 120.0
_LOOK_S = 1.0

log = logger("engine")


class MeasuringTurn(AbstractContextManager[None]):
    """Is entered by threads that load models; a thread has it once."""

    def __init__(self, clock: Callable[[], float] = monotonic, look_s: float = _LOOK_S) -> None:
        self._clock = clock
        self._look_s = look_s
        self._lock = threading.Lock()
        self._since = 0.0  # when the turn began that lasts now
        self._mine = threading.local()

    def __enter__(self) -> None:
        self._mine.held = True
        while not self._lock.acquire(timeout=self._look_s):
            if self._clock() - self._since >= _LONGEST_S:
                self._mine.held = False
                log.warning("measured-beside-another", seconds=round(self._clock() - self._since))
                return
        self._since = self._clock()

    def __exit__(self, *_: object) -> None:
        if self._mine.held:
            self._lock.release()
