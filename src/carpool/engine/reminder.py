"""A timer that is set again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import ceil

from carpool.core.job import INFINITY


class Reminder:
    """Calls at the earliest time that it was set to, once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self.at = INFINITY

    def set(self, at: float | None, now: float) -> None:
        """One that rings before that is left alone: who it calls finds nothing to do and sets the next."""
        if at is not None and at < self.at:
            self.stop()
            self.at = at
            # Timers tick in milliseconds: round up, or the call would come early and spin.
            delay = ceil(max(0.0, at - now) * 1e3) / 1e3
            self._timer = self._loop.call_later(delay, self._ring)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.at = INFINITY

    def _ring(self) -> None:
        self.stop()
        self._call()
