"""Decides when a server that does not answer is not asked any more, and when it is tried again. The time is
an argument."""

from __future__ import annotations

from math import inf

TIMEOUTS = 3  # in a row
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class CircuitBreaker:
    """While it is closed, the server is asked. Three timeouts in a row, or a connection that is lost, open
    it: the server is not asked until the pause is over, and then by one probe. A probe that fails doubles the
    pause; an answer in time to a question makes it short again. A probe that succeeds does not: a server may
    accept a connection, and still be too slow for questions. It begins open, with a probe due: a server is
    probed before it is asked."""

    def __init__(self, longest: float | None = None) -> None:
        self._longest = LONGEST_PAUSE_S if longest is None else longest
        self.open_until: float | None = -inf  # None: closed
        self._probing = False
        self.in_a_row = 0  # timeouts
        self._pause = FIRST_PAUSE_S

    @property
    def is_open(self) -> bool:
        return self.open_until is not None

    def answered(self) -> None:
        """Notes an answer in time."""
        self.in_a_row = 0
        self._pause = FIRST_PAUSE_S

    def timed_out(self, now: float) -> bool:
        """Returns whether that opens it."""
        self.in_a_row += 1
        if self.is_open or self.in_a_row < TIMEOUTS:
            return False
        self.failed(now)
        return True

    def failed(self, now: float) -> None:
        """Notes that the connection, or a probe, failed."""
        if self.is_open and not self._probing:
            return
        self.open_until = now + self._pause
        self._pause = min(2 * self._pause, self._longest)
        self.in_a_row = 0
        self._probing = False

    def may_probe(self, now: float) -> bool:
        """Returns whether a probe is due. Its caller then reports what came of it: `close` or `failed`."""
        if self.open_until is None or self._probing or now < self.open_until:
            return False
        self._probing = True
        return True

    def close(self) -> None:
        """The probe came through."""
        self.open_until = None
        self._probing = False
        self.in_a_row = 0
