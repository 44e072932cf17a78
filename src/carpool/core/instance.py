"""The instances of one model: who is running what, until when, and how fast each really is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from carpool.core.constants import Constants
from carpool.core.curve import BatchCurve
from carpool.core.job import Job
from carpool.core.learning import Speed

if TYPE_CHECKING:
    from carpool.core.arbiter import Turn

_MUCH_FASTER = 0.8  # speeds closer than this are noise, and their instances are equals

_REST_S = 0.001  # forgetting takes seconds: of a flood that finds somebody idle, not each arrival need look


@dataclass(slots=True, eq=False)
class Batch:
    """What an instance was told to run."""

    instance: Instance
    jobs: list[Job]
    images: int
    size: int  # with padding: what the engine runs
    started: float


class Instance:
    """One executor of the model; `free_at` is when it is expected to take the next batch.

    Where other models use the same device, it runs when it is their `turn`, counts on `share` of the time,
    and on no batch that takes longer than `longest` seconds.
    """

    __slots__ = ("available", "batch", "free_at", "idle_since", "index", "longest", "share", "speed", "turn")

    def __init__(self, index: int, constants: Constants) -> None:
        self.index = index
        self.speed = Speed(constants)
        self.free_at = float("-inf")
        self.idle_since = float("-inf")
        self.batch: Batch | None = None
        self.available = True
        self.turn: Turn | None = None
        self.share = 1.0
        self.longest = float("inf")

    @property
    def idle(self) -> bool:
        return self.batch is None and self.available


class Instances:
    """The group, with what every arrival asks for kept ready."""

    __slots__ = ("_all", "_curve", "_handover", "_rested", "idle", "longest", "next_free", "pace", "uneven")

    def __init__(self, count: int, curve: BatchCurve, constants: Constants) -> None:
        self._all = [Instance(index, constants) for index in range(count)]
        self._curve = curve
        self._handover = constants.handover
        self._rested = float("-inf")
        self.refresh()

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Instance:
        return self._all[index]

    def refresh(self) -> None:
        """Work out again what follows from the instances' state: after every dispatch and finish."""
        available = [i for i in self._all if i.available] or self._all
        means = [i.speed.mean for i in available]
        self.pace = sum(i.share / i.speed.mean for i in available)  # instances at the profile's speed
        self.longest = min(i.longest for i in available)
        self.uneven = min(means) < _MUCH_FASTER * max(means)
        self.next_free = min(available, key=lambda i: i.free_at)
        self.idle = sorted((i for i in available if i.idle), key=lambda i: i.speed.mean)

    def start(self, instance: Instance, jobs: list[Job], now: float) -> Batch:
        images = sum(job.images for job in jobs)
        instance.batch = Batch(instance, jobs, images, self._curve.padded(images), now)
        instance.free_at = now + instance.speed.mean * self._curve.times[images]
        self.refresh()
        if instance.turn is not None:
            instance.turn.began(instance.batch, now)
        return instance.batch

    def finish(self, batch: Batch, now: float, seconds: float | None) -> None:
        """`seconds` is what the batch took; None when it says nothing about the device (it failed)."""
        instance = batch.instance
        instance.batch = None
        instance.free_at = instance.idle_since = now
        if seconds is not None:
            # With the way there and back, which riders wait for: but whoever is late to hear of the end must
            # not think that the instance is slow.
            took = min(max(seconds, now - batch.started), self._handover * seconds)
            instance.speed.learn(took / self._curve.times[batch.images])
        self.refresh()
        if instance.turn is not None:
            instance.turn.ended(batch, now)

    def adopt(self, curve: BatchCurve, factor: float) -> None:
        """From now on this is what is believed, which is slower by this factor."""
        self._curve = curve
        for instance in self._all:
            instance.speed.rebased(factor)
        self.refresh()

    def rest(self, now: float) -> None:
        """Let idle instances forget, up to now."""
        if now - self._rested < _REST_S:
            return
        self._rested = now
        for instance in self.idle:
            if now > instance.free_at > float("-inf"):
                instance.speed.rested(now - instance.free_at)
                instance.free_at = now
        self.refresh()

    def fits(self, instance: Instance, seconds: float) -> int:
        """The largest batch that this instance finishes in this time, noise included."""
        return self._curve.fits(seconds / instance.speed.cautious)

    def free_within(self, seconds: float, now: float) -> int:
        soon = now + seconds
        return sum(1 for i in self._all if i.available and i.free_at <= soon) or 1
