"""What is believed of each kind of work: how long its batches take, and how fast each instance is with it.

Requests of different shapes never share a batch, and need not cost alike: a picture's file that the device
has to decode, a large picture, a small one. What is learned from one kind says little about another, so each
has a belief of its own, which begins with the profile that was loaded.
"""

from __future__ import annotations

from collections.abc import Hashable

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve
from carpool.core.drift import Drift
from carpool.core.learning import Speed

_NEVER = float("-inf")


class Belief:
    """The curve that is believed, what has drifted from it, and a speed for each instance."""

    __slots__ = ("_begun", "_rested", "_tries", "curve", "drift", "ran", "speeds")

    def __init__(self, profile: BatchCurve, instances: int, now: float, constants: Constants) -> None:
        self.curve = profile
        self.drift = Drift(profile, constants)
        self.speeds = [Speed(constants) for _ in range(instances)]
        self.ran = _NEVER  # when a batch of this kind last started or ended
        self._begun = self._rested = now
        self._tries = constants.kind_tries

    def learn(self, index: int, images: int, took: float) -> None:
        """A batch took this instance so long, the way there and back included."""
        self.speeds[index].learn(took / self.curve.times[images])

    def adopt(self, curve: BatchCurve, factor: float) -> None:
        """The curve gives in to what was run, which was slower by this factor."""
        self.curve = curve
        for speed in self.speeds:
            speed.rebased(factor)

    def laid_aside(self, now: float) -> None:
        """Another kind comes first from now on."""
        self._rested = now

    def taken_up(self, now: float) -> None:
        """Time without this kind of work moves its speeds back as well, whatever else was run meanwhile: if
        nothing of this kind fitted, nothing could be learned of it."""
        for speed in self.speeds:
            speed.rested(max(0.0, now - self._rested))
        self._rested = now

    def is_overdue(self, images: int, now: float) -> bool:
        """So long without a batch that trying this one costs the other kinds next to nothing."""
        takes = max(speed.mean for speed in self.speeds) * self.curve.times[images]
        since = max(self.ran, self._begun)
        return since > _NEVER and takes <= self._tries * (now - since)


class Beliefs:
    """One for each kind. Shapes come from clients: there are at most so many, and the rest share one."""

    __slots__ = ("_constants", "_instances", "_kinds", "_others", "_profile")

    def __init__(self, profile: BatchCurve, instances: int, constants: Constants = CONSTANTS) -> None:
        self._profile = profile
        self._instances = instances
        self._constants = constants
        self._kinds: dict[Hashable, Belief] = {}
        self._others: Belief | None = None

    def __len__(self) -> int:
        return len(self._kinds) + (self._others is not None)

    def of(self, kind: Hashable, now: float) -> Belief:
        belief = self._kinds.get(kind)
        if belief is None:
            if len(self._kinds) >= self._constants.max_kinds:
                self._drop_unused(now)
            if len(self._kinds) < self._constants.max_kinds:
                belief = self._kinds[kind] = self._begin(now)
            else:
                belief = self._others = self._others or self._begin(now)
        return belief

    def _begin(self, now: float) -> Belief:
        return Belief(self._profile, self._instances, now, self._constants)

    def _drop_unused(self, now: float) -> None:
        since = now - self._constants.kind_memory_s
        for kind, belief in list(self._kinds.items()):
            if belief.ran < since:
                del self._kinds[kind]
