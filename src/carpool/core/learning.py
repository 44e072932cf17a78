"""What the scheduler learns as it serves: how fast each instance really is, and how much is asked of it."""

from __future__ import annotations

from math import exp

from carpool.core.constants import CONSTANTS, Constants


class Speed:
    """Actual over profiled time of one instance: its running mean, and how far above that it may come out.

    `cautious` is close to the 0.9 quantile: what a deadline is checked against. Both forget (see `rested`).
    """

    __slots__ = ("_constants", "_surprises", "cautious", "mean")

    def __init__(self, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self.mean = 1.0
        self.cautious = constants.cautious_start
        self._surprises: list[float] = []

    def learn(self, ratio: float) -> None:
        """A batch took `ratio` times what its profile says."""
        c = self._constants
        if self._is_new_regime(ratio):
            self._move_to(sum(self._surprises) / len(self._surprises))
            self._surprises.clear()
            return
        self._move_to(self.mean + c.mean_weight * (ratio - self.mean))
        step = c.cautious_up if ratio > self.cautious else -c.cautious_down
        self.cautious += step * self.mean
        self.cautious = min(max(self.cautious, self.mean), c.cautious_max * self.mean)

    def rested(self, seconds: float) -> None:
        """Time without work moves the belief back to the profile: what slowed the device may be over."""
        self._move_to(1.0 + (self.mean - 1.0) * exp(-seconds / self._constants.forget_s))

    def rebased(self, factor: float) -> None:
        """The profile was replaced by one that is slower by this factor: the same speed in new terms."""
        self._move_to(self.mean / factor)
        self._surprises.clear()

    def _move_to(self, mean: float) -> None:
        self.cautious *= mean / self.mean
        self.mean = mean

    def _is_new_regime(self, ratio: float) -> bool:
        """Several batches in a row, far off on the same side, are no noise: the device has changed."""
        off = ratio / self.mean
        limit = 1.0 + self._constants.surprise
        if 1 / limit < off < limit:
            self._surprises.clear()
            return False
        if self._surprises and (self._surprises[-1] > self.mean) != (ratio > self.mean):
            self._surprises.clear()
        self._surprises.append(ratio)
        return len(self._surprises) >= self._constants.surprises


class Doubt:
    """How much later than foreseen requests are finished, in seconds: few are later than this.

    One figure for all that can go wrong on the way (what is ahead, the input, the batch itself), so that
    caution is taken once and not for each of them. It rises fast and falls slowly; if all end earlier than
    was foreseen, it is below zero.
    """

    __slots__ = ("_at", "_constants", "_most", "_value")

    def __init__(self, slo: float, constants: Constants = CONSTANTS) -> None:
        self._constants = constants
        self._most = constants.doubt_most * slo
        self._value = constants.doubt_start * slo
        self._at = float("-inf")

    def seen(self, late: float, now: float) -> None:
        """One was finished so much later than foreseen, or would have been."""
        c = self._constants
        value = self.at(now)
        value += c.doubt_rise * self._most if late > value else -c.doubt_fall * self._most
        self._value = min(max(value, -self._most), self._most)
        self._at = now

    def at(self, now: float) -> float:
        """Half forgotten when nobody was finished for a while: a gate that is shut for it learns nothing."""
        silent = now - self._at - self._constants.doubt_memory_s
        if silent <= 0.0 or self._at == float("-inf"):
            return self._value
        return self._value * exp(-silent / self._constants.doubt_memory_s)


class Lag:
    """How long requests take for a part of their way to the scheduler."""

    __slots__ = ("_at", "_memory", "_value", "_weight")

    def __init__(self, memory: float, weight: float = CONSTANTS.lag_weight) -> None:
        self._memory = memory
        self._weight = weight
        self._value = 0.0
        self._at = 0.0

    def seen(self, seconds: float, now: float) -> None:
        self._value += self._weight * ((seconds if seconds > 0.0 else 0.0) - self._value)
        self._at = now

    def at(self, now: float) -> float:
        """Forgotten when nobody comes: a gate that is shut for it would never learn that it is over."""
        return self._value * exp(-max(0.0, now - self._at) / self._memory)


class Rate:
    """Images offered per second, refusals included: exponential with a short memory, decayed when read."""

    __slots__ = ("_at", "_memory", "_value")

    def __init__(self, memory: float = CONSTANTS.rate_memory_s) -> None:
        self._memory = memory
        self._value = 0.0
        self._at = 0.0

    def add(self, images: float, now: float) -> None:
        if now != self._at:  # many come at once
            self._value = self.at(now)
            self._at = now
        self._value += images / self._memory

    def at(self, now: float) -> float:
        waited = now - self._at
        return self._value * exp(-waited / self._memory) if waited > 0 else self._value
