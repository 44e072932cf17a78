"""A front end that falls behind: requests grow old before it reads them, where no scheduler sees them."""

from __future__ import annotations

from carpool.core.constants import CONSTANTS, Constants


class Backlog:
    """Whether newcomers are to be turned away unread, which costs far less than to serve them.

    A wait that passes is no reason: whoever came during a stall can still make it. One that stands is: the
    front end gets more than it can do, and everybody would be late. From then on, until there was quiet for a
    while, all who come while the wait is too long are turned away.
    """

    __slots__ = ("_asked", "_constants", "_since", "_strict_until")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._asked = float("-inf")
        self._since = float("inf")  # it has been too long
        self._strict_until = float("-inf")

    def turns_away(self, waited: float, slo: float, now: float) -> bool:
        """`waited` is how long requests that were read lately had been lying there."""
        c = self._constants
        silent, self._asked = now - self._asked > c.backlog_memory_s, now
        if waited <= c.most_unread * slo:
            self._since = float("inf")
            return False
        if silent or self._since > now:
            self._since = now
        if now >= self._strict_until and now - self._since < c.backlog_promises * slo:
            return False
        self._strict_until = now + c.backlog_memory_s
        return True
