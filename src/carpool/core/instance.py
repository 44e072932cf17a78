"""Tracks the instances of one model: who is running what, until when, and how fast each really is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from carpool.core.job import Job
from carpool.core.learning import Belief, Speed

HANDOVER: Final = 1.25
"""If a batch and handing it over took longer than they do as a rule, a quarter of that counts as its own
time: late news of its end must not make the instance look slow."""

_MUCH_FASTER = 0.8  # speeds closer than this are noise, and their instances are equals

_INFINITY = float("inf")
_REST_S = 0.001  # forgetting takes seconds: in a flood that meets an idle instance, few need look


class BatchTurn:
    """Represents the account on which a batch uses a shared device."""

    __slots__ = ()

    def began(self, batch: Batch, now: float) -> None:
        raise NotImplementedError

    def ended(self, batch: Batch, now: float) -> None:
        raise NotImplementedError

    def is_background(self) -> bool:
        """Returns whether no client waits for its batches: `finished` then says what of them is done."""
        return False

    def finished(self, batch: Batch, now: float, seconds: float | None) -> list[Job]:
        raise NotImplementedError


class DeviceTurn(BatchTurn):
    """A model's place on a shared device (see arbiter.py): its instances there ask before they run."""

    __slots__ = ("big_of", "cheap_of", "device", "step", "step_of")

    def __init__(self, device: object) -> None:
        self.device = device  # turns with the same one run one after the other; None: shared with no model
        self.step_of: frozenset[str] = frozenset()  # models whose steps it is one of
        self.step = 0  # its place among the steps of those; the highest where it has several
        self.cheap_of: frozenset[str] = frozenset()  # models of steps whose promise rests on it
        self.big_of: frozenset[str] = frozenset()  # models of steps that are answered without it under load

    def granted(self, now: float) -> bool:
        """May a batch of this model start now? A model that may not is woken when that changes."""
        raise NotImplementedError

    def declines(self) -> None:
        """It might have run, and did not want to: the others need not wait for it."""
        raise NotImplementedError

    def gives_way(self) -> None:
        """An instance here is gone: what waits because it was to go first need not wait any longer."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Batch:
    """Describes a batch that an instance was given to run."""

    instance: Instance
    jobs: list[Job]
    images: int
    size: int  # with padding: what the engine runs
    started: float
    belief: Belief  # of its kind: what it takes is learned there, whatever is run by then
    turn: BatchTurn | None = None  # whose turn on a shared device it is


class Instance:
    """One executor of the model; `free_at` is when it is expected to take the next batch, `speed` how fast it
    is with the kind of work that is run now.

    Where other models use the same device, it runs when it is their `turn`, counts on `share` of the time,
    and on no batch that takes longer than `longest` seconds.
    """

    __slots__ = ("available", "batch", "free_at", "idle_since", "index", "longest", "share", "speed", "turn")

    def __init__(self, index: int, speed: Speed) -> None:
        self.index = index
        self.speed = speed
        self.free_at = float("-inf")
        self.idle_since = float("-inf")
        self.batch: Batch | None = None
        self.available = True
        self.turn: DeviceTurn | None = None
        self.share = 1.0
        self.longest = float("inf")

    @property
    def idle(self) -> bool:
        return self.batch is None and self.available


class Instances:
    """Holds all instances of a model, with what every arrival asks for kept ready."""

    __slots__ = (
        *("_all", "_belief", "_curve", "_rested"),
        *("gone", "idle", "longest", "next_free", "pace", "several", "uneven"),
    )

    def __init__(self, belief: Belief) -> None:
        self._all = [Instance(index, speed) for index, speed in enumerate(belief.speeds)]
        self.several = len(self._all) > 1
        self._belief = belief
        self._curve = belief.curve
        self._rested = float("-inf")
        self.refresh()

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Instance:
        return self._all[index]

    def refresh(self) -> None:
        """Work out again what follows from the instances' state: after every dispatch and finish.

        While all are `gone`, the forecasts are those for when they are back as they were, so that every
        question has an answer. That counts as `uneven`: the gate need not ask about it at every arrival.
        """
        among = self._all
        self.gone = True
        for instance in among:
            if instance.available:
                self.gone = False
                break
        pace, longest, next_free = 0.0, _INFINITY, None
        fastest, slowest = _INFINITY, 0.0
        idle: list[Instance] = []
        for i in among:  # one plain loop: this runs three times for each request
            if not (i.available or self.gone):
                continue
            mean = i.speed.mean
            pace += i.share / mean
            fastest = mean if mean < fastest else fastest
            slowest = mean if mean > slowest else slowest
            longest = i.longest if i.longest < longest else longest
            if next_free is None or i.free_at < next_free.free_at:
                next_free = i
            if i.batch is None and i.available:
                idle.append(i)
        if len(idle) > 1 and fastest < slowest:
            idle.sort(key=lambda i: i.speed.mean)
        assert next_free is not None  # there is one instance at least
        self.pace = pace  # instances at the profile's speed
        self.longest = longest
        self.uneven = self.gone or fastest < _MUCH_FASTER * slowest
        self.next_free, self.idle = next_free, idle

    def start(
        self, instance: Instance, jobs: list[Job], now: float, background: BatchTurn | None = None
    ) -> Batch:
        """Starts a batch, on the account of background work if it is that."""
        images = 0
        for job in jobs:
            images += job.images
        turn = background or instance.turn
        instance.batch = Batch(instance, jobs, images, self._curve.padded(images), now, self._belief, turn)
        instance.free_at = now + instance.speed.mean * self._curve.times[images]
        self._belief.ran = now
        self.refresh()
        if turn is not None:
            turn.began(instance.batch, now)
        return instance.batch

    def finish(self, batch: Batch, now: float, seconds: float | None) -> None:
        """`seconds` is what the batch took; None when it says nothing about the device (it failed)."""
        instance = batch.instance
        instance.batch = None
        instance.free_at = instance.idle_since = batch.belief.ran = now
        if seconds is not None:
            # Including the way there and back, which the batch's requests wait for; but late news of the end
            # must not make the instance look slow.
            handover = batch.belief.handover
            occupied = max(seconds, now - batch.started)
            handover.seen(occupied - seconds)
            took = min(occupied, HANDOVER * (seconds + handover.seconds))
            batch.belief.learn(instance.index, batch.images, took)
        self.refresh()
        if batch.turn is not None:
            batch.turn.ended(batch, now)

    def believe(self, belief: Belief) -> None:
        """From now on this is what is believed."""
        self._belief, self._curve = belief, belief.curve
        for instance, speed in zip(self._all, belief.speeds, strict=True):
            instance.speed = speed
        self.refresh()

    def differ(self, belief: Belief) -> bool:
        """Returns the same as `uneven`, for another kind of work than the one that is run now."""
        means = [belief.speeds[i.index].mean for i in self._all if i.available] or [1.0]
        return min(means) < _MUCH_FASTER * max(means)

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
        """Returns the largest batch that this instance finishes in this time, noise included."""
        return self._curve.fits(seconds / instance.speed.cautious)

    def idle_at(self, index: int | None) -> list[Instance]:
        """Returns the idle ones; with an index that one alone, if it is idle."""
        return self.idle if index is None else [one for one in self.idle if one.index == index]

    def free_within(self, seconds: float, now: float) -> int:
        soon = now + seconds
        return sum(1 for i in self._all if i.available and i.free_at <= soon) or 1
