"""A front end that falls behind: requests grow old before it reads them, where no scheduler sees them."""

from __future__ import annotations

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.front_shares import FrontLane, FrontShares

_MOST_MODELS = 256


class Backlog:
    """Whether newcomers of one model would be late, so that somebody has to be turned away unread.

    A wait that passes is no reason: whoever came during a stall can still make it. One that stands is: the
    front end gets more than it can do, and everybody would be late. From then on, until there was quiet for a
    while, it is too long whenever it is.

    `share` is how much of what the front end did lately it can go on doing. It falls for as long as the wait
    stands although those who ask for more than their part of it are turned away.
    """

    __slots__ = ("_asked", "_constants", "_cut_at", "_since", "_strict_until", "share")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._asked = float("-inf")
        self._since = float("inf")  # it has been too long
        self._strict_until = float("-inf")
        self._cut_at = float("-inf")
        self.share = constants.backlog_share

    def is_too_long(self, waited: float, slo: float, now: float) -> bool:
        """`waited` is how long requests that were read lately had been lying there."""
        c = self._constants
        silent, self._asked = now - self._asked > c.backlog_memory_s, now
        if waited <= c.most_unread * slo:
            self._since = float("inf")
            self._cut_at = now
            return False
        if silent or self._since > now:
            self._since = now
        strict = now < self._strict_until
        if not strict and now - self._since < c.backlog_promises * slo:
            return False
        self._strict_until = now + c.backlog_memory_s
        if not strict:
            self.share, self._cut_at = c.backlog_share, now
        elif now - self._cut_at >= c.backlog_promises * slo:
            self.share, self._cut_at = self.share * c.backlog_step, now
        return True


class FairBacklog:
    """Who is turned away while some model's newcomers would be late: those who cause it, of any model.

    A front end has one loop for all. Whoever asks for more of it than a fair share goes first, with a promise
    or without one; the others only if that does not suffice. Where there are others, those who are to blame
    keep the wait well below the limit: it is the others' time that they would use up.
    """

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._backlogs: dict[int, Backlog] = {}
        self._limit = float("inf")  # of the wait, for the model with the shortest promise that is behind
        self._share = 1.0
        self._until = float("-inf")  # this holds
        self.shares = FrontShares(constants)

    def turns_away(self, model: int, slo: float | None, lane: FrontLane, waited: float, now: float) -> bool:
        if slo is not None:
            self._judge(model, slo, waited, now)
        if waited <= self._constants.backlog_spare * self._limit or not self.is_to_blame(lane, now):
            return False
        if waited <= self._limit and not self.shares.spares_somebody:
            return False
        self._until = now + self._constants.backlog_memory_s
        return True

    def is_to_blame(self, lane: FrontLane, now: float) -> bool:
        """Whether the front end was behind just now, and this lane asks for more than its share."""
        return now < self._until and self.shares.asks_too_much(lane, self._share, now)

    def _judge(self, model: int, slo: float, waited: float, now: float) -> None:
        backlog = self._backlogs.get(model)
        if backlog is None:
            if len(self._backlogs) >= _MOST_MODELS:
                self._backlogs.clear()
            backlog = self._backlogs[model] = Backlog(self._constants)
        over = now >= self._until
        if backlog.is_too_long(waited, slo, now):
            limit = self._constants.most_unread * slo
            if over or limit <= self._limit:
                self._limit, self._share = limit, backlog.share
                self._until = now + self._constants.backlog_memory_s
        elif over:
            self._limit = float("inf")
