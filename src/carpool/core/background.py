"""Runs work that no client waits for, such as a new version's answers that are only compared, in the time
that the models on a device leave over, without any of them noticing.

It starts when no request is ready to run, and is short enough for those that come while it runs: a tenth of
their promise. From seven tenths of what the models can answer in time on, or while a gate rejects any
request, there is none at all: production is then as it would be alone, batch by batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Final, NamedTuple, Protocol

from carpool.core.constants import Constants
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.instance import Batch, BatchTurn, Instance
from carpool.core.job import DONE, GONE, INFINITY, READY, RUNNING, Job, Reason, planned
from carpool.core.learning import Rate, Speed
from carpool.core.scheduler_state import SchedulerState

BACKGROUND_LOAD: Final = 0.7
BACKGROUND_DELAY: Final = 0.1
BACKGROUND_QUIET_S: Final = 1.0
"""Work that no client waits for runs while less than this share is asked of what the models on its device can
answer in time, and no request was rejected for a second; it takes what is left of the share, and no batch of
it takes more than a tenth of a promise. 0.9 would gain next to nothing."""

BACKGROUND_RARE: Final = 0.005
BACKGROUND_LONG_S: Final = 20.0
BACKGROUND_UNSEEN: Final = 0.01
"""Longer batches of it may run, within half of the slack of the most urgent request, as long as all such work
takes this share of twenty seconds: fewer requests meet one than the slowest hundredth. Where less than a
hundredth of a request comes within a promise, they may take all of that slack."""

BACKGROUND_PROMISES: Final = 10.0
BACKGROUND_PROMISE_S: Final = 0.5
"""It is skipped when it has waited for ten promises. A model without one is treated as if it promised half a
second, and is left alone while any request waits for it."""

_MOST_WAITING = 32  # requests of one model: they hold memory, and more than a few batches would only get old
_LOOK_S = 0.02  # between two looks for slack while nothing happens: whatever ends has it looked for, too
_NOT_LOAD = (Reason.TOO_LARGE, Reason.REPLACED)  # refusals that say nothing about the device


class BackgroundRoom(NamedTuple):
    """Holds the seconds that a batch of background work may take: a usual one, and a rare one, which few
    requests meet. Without that, a model that needs more than the first for one picture would
    never run."""

    usual: float
    rare: float


NO_ROOM = BackgroundRoom(0.0, 0.0)


class Beside(Protocol):
    """Defines what background work sees of a model on the same device."""

    @property
    def scheduler(self) -> SchedulerState: ...

    @property
    def instances(self) -> Sequence[Instance]: ...

    def use(self, now: float) -> float:
        """Returns the part of the device that the model has taken lately."""


class Device(Protocol):
    """Defines what background work asks of its device, and reports to it."""

    def slack(self, now: float) -> BackgroundRoom: ...

    def background_began(self, batch: Batch, now: float) -> None: ...

    def background_ended(self, turn: BackgroundTurn, batch: Batch, now: float) -> None: ...


class BackgroundTurn(BatchTurn):
    """Represents the background work of one model: its own queue, and its place on the device, which no
    other turn counts."""

    __slots__ = (
        *("_device", "_gone", "_instances", "_jobs", "_patience", "_speed", "core", "look_again"),
        *("ran", "skipped", "wake"),
    )

    def __init__(
        self, device: Device, core: SchedulerState, instances: Sequence[Instance], wake: Callable[[], None]
    ) -> None:
        self._device = device
        self.core = core
        self._instances = instances  # those on the device
        self.wake = wake  # has the model decide again
        self._jobs: deque[Job] = deque()  # those that have left are passed over
        self._gone: list[Job] = []  # skipped, and not reported yet
        promise = core.slo if core.slo < INFINITY else BACKGROUND_PROMISE_S
        self._patience = BACKGROUND_PROMISES * promise
        self._speed = Speed()  # what it learns is its own: production believes nothing of it
        self.look_again: float | None = None
        self.ran = 0
        self.skipped = 0

    def offer(self, job: Job, now: float) -> bool:
        """Queues a job, or returns False if it is skipped at once. It is due after some promises, since no
        client waits for it."""
        if len(self._jobs) >= _MOST_WAITING:
            self._jobs = deque(job for job in self._jobs if job.state is READY)
        if len(self._jobs) >= _MOST_WAITING or job.images > self.core.policy.max_images:
            job.state = GONE
            self.skipped += 1
            return False
        job.due = now + self._patience
        job.state = READY
        self._jobs.append(job)
        return True

    def cancel(self, job: Job) -> bool:
        """Cancels a job that is no longer wanted; returns whether that saved the work."""
        waited = job.state is READY
        job.state = GONE
        return waited

    def told(self) -> Sequence[Job]:
        """Returns the jobs that were skipped since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def everybody(self) -> list[Job]:
        return [job for job in self._jobs if job.state is READY]

    @property
    def wants(self) -> bool:
        """Returns whether a job waits and an instance could run it."""
        return self._head() is not None and self._idle() is not None

    def room(self, now: float) -> int:
        """Returns how many images may run now; 0 if no job waits, or there is no slack even for the first."""
        head, instance = self._head(), self._idle()
        if head is None or instance is None:
            return 0
        factor = max(instance.speed.mean, self._speed.mean)
        slack = self._device.slack(now)
        room = self.core.curve.fits(slack.usual / factor)
        if room < head.images:
            room = head.images if factor * self.core.curve.times[head.images] <= slack.rare else 0
        return room

    def start(self, now: float) -> Batch | None:
        """Returns a batch, if there is slack. Else `look_again` says when to ask, unless no job waits."""
        self._expire(now)
        self.look_again = None
        head = self._head()
        if head is None:
            return None
        room, instance = self.room(now), self._idle()
        if not room or instance is None:
            self.look_again = min(head.due, now + _LOOK_S)
            return None
        return self.core.instances.start(instance, self._take(head, room), now, self)

    def began(self, batch: Batch, now: float) -> None:
        self._device.background_began(batch, now)

    def ended(self, batch: Batch, now: float) -> None:
        self._device.background_ended(self, batch, now)

    def is_background(self) -> bool:
        return True

    def finished(self, batch: Batch, now: float, seconds: float | None) -> list[Job]:
        """Returns the jobs that are to be answered."""
        self.core.instances.finish(batch, now, None)
        if seconds is not None:
            self._speed.learn(seconds / self.core.curve.times[batch.images])
        done = [job for job in batch.jobs if job.state is RUNNING]
        for job in done:
            job.state = DONE
        self.ran += len(done)
        return done

    def _head(self) -> Job | None:
        while self._jobs and self._jobs[0].state is not READY:
            self._jobs.popleft()
        return self._jobs[0] if self._jobs else None

    def _idle(self) -> Instance | None:
        return next((instance for instance in self._instances if instance.idle), None)

    def _take(self, head: Job, room: int) -> list[Job]:
        """Takes the first ones of one shape that fit."""
        jobs, left = [], room
        for job in self._jobs:
            if job.state is READY and job.shape == head.shape and job.images <= left:
                left -= job.images
                job.state = RUNNING
                jobs.append(job)
        return jobs

    def _expire(self, now: float) -> None:
        while (head := self._head()) is not None and head.due <= now:
            head.state = GONE
            self.skipped += 1
            self._gone.append(head)


class Slack:
    """Computes how long a batch of background work may be on one device. Asked rarely: only while such work
    waits."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._lately = Rate(constants.lane_memory_s)  # seconds of background work per second
        self._long = Rate(BACKGROUND_LONG_S)
        self._watched: dict[SchedulerState, _WatchedModel] = {}

    def used(self, seconds: float, now: float) -> None:
        self._lately.add(seconds, now)
        self._long.add(seconds, now)

    def forget(self, core: SchedulerState) -> None:
        self._watched.pop(core, None)

    def room(self, turns: Sequence[Beside], width: int, now: float) -> BackgroundRoom:
        """Returns the room that there is for the sake of each model there, and of all of them together."""
        free = BACKGROUND_LOAD - sum(self._share(turn, now) for turn in turns)
        if self._lately.at(now) / width >= free:
            return NO_ROOM
        rooms = [self._beside(turn.scheduler, now) for turn in turns]
        usual = min((room.usual for room in rooms), default=INFINITY)
        if self._long.at(now) / width >= BACKGROUND_RARE:
            return BackgroundRoom(usual, 0.0)
        return BackgroundRoom(usual, min((room.rare for room in rooms), default=INFINITY))

    def _share(self, turn: Beside, now: float) -> float:
        """Returns the part of what a model could answer in time that is asked of it: infinite while it
        rejects requests, and in the first second that it is looked at."""
        core = turn.scheduler
        if not core.ledger.offered:
            return 0.0
        watched = self._watched.get(core)
        if watched is None:
            watched = self._watched[core] = _WatchedModel(now)
        if core.instances.gone or now - watched.troubled(core, now) < BACKGROUND_QUIET_S:
            return INFINITY
        if core.slo == INFINITY:  # its capacity is not known: how busy it is must do
            return turn.use(now) / len(turn.instances)
        rate = max(core.rate(now), sum(lane.rate.at(now) for lane in core.lanes))
        return rate / (watched.answerable(core) or rate or 1.0)

    def _beside(self, core: SchedulerState, now: float) -> BackgroundRoom:
        """Returns the room until it would hurt: a tenth of the promise, and half of the slack of the most
        urgent request, whose input may be on its way, once a batch with all that come meanwhile is taken off.
        Rarely it is all of that slack, while hardly any request comes: else a model that promises just what
        it can would never run any."""
        c = self._constants
        if core.slo == INFINITY:
            promise = BACKGROUND_PROMISE_S
            return NO_ROOM if core.lanes.waiting else BackgroundRoom(BACKGROUND_DELAY * promise, promise)
        tenth = BACKGROUND_DELAY * c.guard_margin * core.slo  # with room for noise
        gathered = ceil(core.lanes.waiting + core.rate(now) * tenth)
        size = max(1, min(gathered, core.curve.max_batch))
        takes = c.guard_margin * core.instances.next_free.speed.cautious * core.curve.times[size]
        newcomer = now + core.slo - planned(core.outside.at(now), core.slo, c)
        due = min((job.due for job in core.lanes.coming), default=newcomer)
        half = (min(due, newcomer) - now - takes) / 2
        rare = half
        if core.rate(now) * core.slo < BACKGROUND_UNSEEN and not (core.lanes.waiting or core.lanes.coming):
            rare = max(half, newcomer - now - core.instances.next_free.speed.mean * core.curve.times[1])
        return BackgroundRoom(min(tenth, half), rare)


class _WatchedModel:
    """Holds what is remembered of a model between two looks."""

    __slots__ = ("_answerable", "_curve", "_noes", "_since")

    def __init__(self, now: float) -> None:
        self._since = now
        self._noes = -1
        self._curve: BatchCurve | None = None
        self._answerable = 0.0

    def troubled(self, core: SchedulerState, now: float) -> float:
        """Returns when the model was last observed to reject a request."""
        ledger = core.ledger
        noes = sum(ledger.refused.values()) + sum(ledger.given_up.values())
        noes -= sum(ledger.refused[reason] + ledger.given_up[reason] for reason in _NOT_LOAD)
        if noes != self._noes:
            self._noes, self._since = noes, now
        return self._since

    def answerable(self, core: SchedulerState) -> float:
        """Returns images per second within the promise, at the speed of now."""
        if core.curve is not self._curve:
            self._curve, self._answerable = core.curve, slo_capacity(core.curve, core.slo)
        return self._answerable * sum(1 / i.speed.mean for i in core.instances if i.available)
