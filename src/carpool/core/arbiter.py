"""Divides one device between several models: decides whose turn it is, by weight, so that a busy one cannot
starve another.

Time-division, by start tags: the model that has used least of its share goes next, and none saves up what it
did not use. A batch that runs is never interrupted, so while another model with a promise is active no batch
may take longer than half of that promise: the other half is for the batch of the request that had to wait.

Where models are steps of one pipeline, the later step goes first: what was done for a request is lost if the
rest of it comes too late. Weights divide between pipelines, and between them and other models.

In a cascade whose cheap model answers where there is no time for the big one, that holds only until too much
waits for the cheap one, which the promise rests on: then it goes first.

Work that no client waits for takes turns as well, which count for nothing here: see background.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from carpool.core.background import NO_ROOM, BackgroundRoom, BackgroundTurn, Slack
from carpool.core.constants import CONSTANTS
from carpool.core.instance import Batch, DeviceTurn, Instance
from carpool.core.job import planned
from carpool.core.learning import Rate
from carpool.core.scheduler_state import SchedulerState

CHEAP_FIRST: Final = 0.25
"""Where the cheap model of a cascade answers for the big one under load, it goes first on their device
when what waits for it would take this part of its promise. Until then the big one does: with equal turns
it would get 0.58 of the hard requests at 1.3 times the load, and not 0.68."""

_INFINITY = float("inf")
_LEAST_LEFT = 0.05  # of a device, to a step whose later ones go first


class ModelTurn(DeviceTurn):
    """Represents the place of one model on a device that an arbiter divides."""

    __slots__ = ("_arbiter", "_declined", "_recent", "instances", "scheduler", "tag", "wake", "weight")

    def __init__(
        self,
        arbiter: Arbiter,
        scheduler: SchedulerState,
        instances: list[Instance],
        weight: float,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(arbiter if arbiter.exclusive else None)
        self._arbiter = arbiter
        self._declined = False  # it was asked, and waits for something else than the device
        self._recent = Rate(scheduler.constants.lane_memory_s)  # seconds of device per second
        self.scheduler = scheduler
        self.instances = instances
        self.weight = weight
        self.wake = wake
        self.tag = 0.0  # device time it has had, over its weight

    def goes_before(self, other: ModelTurn) -> bool:
        """Returns whether it goes first when it matters: it is a later step of the same model, or requests
        are answered with it alone where the other has no time."""
        if not self.cheap_of.isdisjoint(other.big_of):
            return True
        if not self.big_of.isdisjoint(other.cheap_of):
            return False
        return self.step > other.step and not self.step_of.isdisjoint(other.step_of)

    def precedes(self, other: ModelTurn, now: float) -> bool:
        """Returns the same for this moment: a big model goes first while the cheap one has slack."""
        if not self.cheap_of.isdisjoint(other.big_of):
            return self._pressed(now)
        if not self.big_of.isdisjoint(other.cheap_of):
            return not other._pressed(now)
        return self.goes_before(other)

    def _pressed(self, now: float) -> bool:
        return self.scheduler.saturation(now) > CHEAP_FIRST

    def granted(self, now: float) -> bool:
        self._declined = False
        return self._arbiter.grants(self, now)

    def declines(self) -> None:
        self._declined = True
        self._arbiter.wake_others(self)

    def gives_way(self) -> None:
        self._arbiter.wake_others(self)

    def began(self, batch: Batch, now: float) -> None:
        self._arbiter.began(self, batch, now)

    def ended(self, batch: Batch, now: float) -> None:
        self._arbiter.ended(self, batch, now)

    @property
    def wants(self) -> bool:
        """Returns whether jobs are ready and an instance here could run them."""
        waiting = self.scheduler.lanes.ready and not self._declined
        return bool(waiting) and any(instance.idle for instance in self.instances)

    def used(self, seconds: float, now: float) -> None:
        self.tag += seconds / self.weight
        self._recent.add(seconds, now)

    def use(self, now: float) -> float:
        """Returns the part of the device that it has taken lately."""
        return self._recent.at(now)

    def active(self, now: float) -> bool:
        """Returns whether requests came lately: the next must find the others' batches short enough."""
        since = now - self.scheduler.constants.lately_s
        return any(lane.seen > since for lane in self.scheduler.lanes)

    def longest_of_others(self, now: float) -> float:
        """Returns the seconds that a batch of another model may take without breaking the promise of this
        one, of which a part passes before its requests are here and after their batch."""
        core = self.scheduler
        if core.slo == _INFINITY:
            return _INFINITY
        on_the_way = planned(core.outside.at(now) + core.lag.at(now), core.slo, core.constants)
        return (core.slo - on_the_way) / (2 * core.constants.guard_margin)


class Arbiter:
    """Represents one device. It runs as many batches at once as its busiest model has instances there.

    One that is not `exclusive` is no device, but the processors that several models share without turns: all
    run as they like, except beside background work.
    """

    def __init__(self, *, exclusive: bool = True) -> None:
        self.exclusive = exclusive
        self._turns: list[ModelTurn] = []
        self._backgrounds: list[BackgroundTurn] = []
        self._slack = Slack(CONSTANTS)
        self._running: dict[int, tuple[Batch, float]] = {}  # by id, with the seconds that were expected
        self._tag = 0.0  # of the batch that started last

    def join(
        self,
        scheduler: SchedulerState,
        instances: list[Instance],
        weight: float = 1.0,
        wake: Callable[[], None] = lambda: None,
    ) -> ModelTurn:
        """Adds these instances of that model to this device. `wake` has it decide again."""
        turn = ModelTurn(self, scheduler, instances, weight, wake)
        for instance in instances:
            instance.turn = turn
        self._turns.append(turn)
        return turn

    def join_background(
        self, scheduler: SchedulerState, instances: list[Instance], wake: Callable[[], None] = lambda: None
    ) -> BackgroundTurn:
        """Returns the turn for background work of a model on its instances here: `Scheduler.background`."""
        turn = BackgroundTurn(self, scheduler, instances, wake)
        self._backgrounds.append(turn)
        return turn

    def leave_background(self, turn: BackgroundTurn) -> None:
        self._backgrounds.remove(turn)
        self.wake_others(turn)

    def leave(self, turn: ModelTurn) -> None:
        """The model is gone; what it still had running counts no more."""
        self._turns.remove(turn)
        self._slack.forget(turn.scheduler)
        for number, (batch, _) in list(self._running.items()):
            if batch.instance in turn.instances:
                del self._running[number]
        for instance in turn.instances:
            instance.turn = None
        if len(self._turns) == 1:
            self._alone(self._turns[0])
        self.wake_others(turn)

    # ---- for the turns ------------------------------------------------------------------------------

    def grants(self, turn: ModelTurn, now: float) -> bool:
        several = len(self._turns) > 1 and self.exclusive
        if several:
            self._divide(turn, now)
        elif not self._backgrounds:
            return True
        if not self.has_room:
            return False
        first = self._first(turn, now) if several else turn
        if first is not turn:
            first.wake()
        return first is turn

    def _first(self, turn: ModelTurn, now: float) -> ModelTurn:
        """Returns the model whose turn it is, if this one asks."""
        wanting = [other for other in self._turns if other.wants]
        first = min(wanting, key=self._start_tag, default=turn)
        if self._start_tag(first) >= self._start_tag(turn):
            first = turn
        ahead = [other for other in wanting if other.precedes(first, now)]
        return max(ahead, key=lambda other: (other.step, other is turn), default=first)

    def began(self, turn: ModelTurn, batch: Batch, now: float) -> None:
        expected = batch.instance.free_at - now
        self._tag = turn.tag = self._start_tag(turn)
        turn.used(expected, now)
        self._running[id(batch)] = (batch, expected)
        if len(self._turns) > 1 and self.exclusive:
            self._hold(now)

    def ended(self, turn: ModelTurn, batch: Batch, now: float) -> None:
        known = self._running.pop(id(batch), None)
        if known is None:
            return
        turn.used(now - batch.started - known[1], now)
        if len(self._turns) > 1 and self.exclusive:
            self._hold(now)
        self.wake_others(turn)

    def wake_others(self, turn: ModelTurn | BackgroundTurn) -> None:
        for other in self._turns:
            if other is not turn and other.wants:
                other.wake()
        for background in self._backgrounds:
            if background is not turn and background.wants:
                background.wake()

    # ---- for background work -----------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Returns whether there is room for one more batch. Where models take no turns, background work
        and theirs exclude each other."""
        if self.exclusive:
            return len(self._running) < self._width
        return not any(isinstance(batch.turn, BackgroundTurn) for batch, _ in self._running.values())

    def slack(self, now: float) -> BackgroundRoom:
        """Returns the room for a batch of background work that would start now. Ready requests go first,
        however little time the batch would cost: else a promise of many small batches is late by one of these
        again and again."""
        turns = self._turns
        busy = any(turn.scheduler.lanes.ready for turn in turns) or not self.has_room
        if not self.exclusive:
            busy = busy or any(instance.batch for turn in turns for instance in turn.instances)
        return NO_ROOM if busy else self._slack.room(turns, self._width, now)

    def background_began(self, batch: Batch, now: float) -> None:
        expected = batch.instance.free_at - now
        self._slack.used(expected, now)
        self._running[id(batch)] = (batch, expected)
        self._hold(now)

    def background_ended(self, turn: BackgroundTurn, batch: Batch, now: float) -> None:
        known = self._running.pop(id(batch), None)
        if known is not None:
            self._slack.used(now - batch.started - known[1], now)
            self._hold(now)
            self.wake_others(turn)

    # ---- inside -------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return max((len(turn.instances) for turn in self._turns), default=1)

    def _start_tag(self, turn: ModelTurn) -> float:
        return max(self._tag, turn.tag)

    def _hold(self, now: float) -> None:
        """Sets when idle instances start: when the device is free, which is what their models must reckon
        with."""
        free = now
        if not self.has_room:
            free = max(now, min(batch.instance.free_at for batch, _ in self._running.values()))
        for turn in self._turns:
            for instance in turn.instances:
                if instance.idle:
                    instance.free_at = free
            turn.scheduler.instances.refresh()

    def _divide(self, turn: ModelTurn, now: float) -> None:
        """Sets what this model may count on: what the others leave, and at least its weight's part."""
        others = [other for other in self._turns if other is not turn and other.active(now)]
        beside = [other for other in others if not turn.goes_before(other)]  # who does not wait for it
        equals = sum(other.weight for other in beside if not other.goes_before(turn))
        first = sum(other.use(now) for other in beside if other.goes_before(turn)) / self._width
        least = turn.weight / (turn.weight + equals) * max(_LEAST_LEFT, 1.0 - first)
        left = 1.0 - sum(other.use(now) for other in beside) / self._width
        share = min(1.0, max(least, left))
        longest = min((other.longest_of_others(now) for other in others), default=_INFINITY)
        for instance in turn.instances:
            instance.share, instance.longest = share, longest
        turn.scheduler.instances.refresh()

    @staticmethod
    def _alone(turn: ModelTurn) -> None:
        for instance in turn.instances:
            instance.share, instance.longest = 1.0, _INFINITY
        turn.scheduler.instances.refresh()
