"""Implements the law of sequences: which request of which sequence may run, and where.

A sequence is a row of requests with one id, from one that starts it to one that ends it. It has a place, a
slot of one instance, for as long as it lives, since that is where its state is; a sequence that finds none
waits in the backlog, first come, first served. Of each sequence one request at a time is passed on to the
scheduler, in order of arrival. A sequence that gets no request for too long loses its place.

An id belongs to the client that uses it, over whatever connections: the holder of the key that came with it,
or else an address (`Job.payer`). Two clients may use the same one, and none continues another's sequence. It
is charged to that client. Where all places are taken and a client with fewer than its share waits, the one
with most gives up its stalest sequence, and no client may fill the backlog to the end.

A sequence that starts anew before it has ended stays where it is: what came before is run first. As in the
scheduler, the caller passes the time, and results are values.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple
from zlib import crc32

from carpool.core.job import ADDRESS, INFINITY, Job
from carpool.core.shares import OF_THE_REST, PlaceShare, who_yields

SequenceId = int | str
"""0 and "" are none."""
SequenceKey = tuple[str, SequenceId]
"""A client, and the id that it uses."""

_COMPACT_AT = 64
_LARGEST_ID = 2**31 - 1  # of ids that are made here: fits every type of number that a model may ask for
_REMEMBERED = 1024
"""Sequences that are known to have ended before their time; the first to do so are forgotten."""


class Why(enum.Enum):
    """A request of a sequence does not run, or a sequence has ended without its last request."""

    NOT_ONE = "more than one row"
    NO_ID = "no id"
    NO_START = "not started"
    FULL = "too many wait"
    CROWDED = "too many sequences wait"
    HEAVY = "the waiting requests use too much memory"
    DEADLINE = "its time passed"
    NO_PLACE = "no slot was free within its longest wait"
    NEVER_BEGAN = "the request that starts it was not run"
    IDLE = "idle for too long"
    LOST = "its instance is gone"
    YIELDED = "another client has its slot"
    TOLD = "stopped; the caller gives the reason"


class SequenceStep:
    """Represents one request of a sequence; its job's `payload`. Where it runs is said when it is passed on,
    and stays: the thread that runs it reads that, whatever becomes of its sequence meanwhile."""

    __slots__ = (
        *("closes", "end", "instance", "job", "name", "number", "sequence", "size", "slot", "start", "waits"),
    )

    def __init__(self, job: Job, sequence: LiveSequence, number: int, *, start: bool, end: bool) -> None:
        self.job = job
        self.sequence = sequence
        self.number = number  # in order of arrival, among all
        self.name = sequence.id
        self.start = start
        self.end = end
        self.closes = end  # the place is free after it: it is the end, or what was to follow has left
        self.waits = True  # else it was passed on, or has left
        self.size = 0  # bytes that it keeps while it waits
        self.instance = sequence.instance
        self.slot = sequence.slot


class SequenceShare(PlaceShare):
    """Counts what one client has: `places` without those that it is about to leave."""

    __slots__ = ("backlog", "sequences", "size", "waiting")

    def __init__(self, name: str, weight: float) -> None:
        super().__init__(name, weight)
        self.sequences = 0  # that are known
        self.backlog: list[tuple[int, LiveSequence]] = []  # by the request that starts each
        self.waiting = 0  # requests
        self.size = 0  # bytes that they keep


class LiveSequence:
    """Holds the requests of one id. Without a place (`instance` is -1) the first that waits is one that
    starts."""

    __slots__ = (
        *("id", "instance", "is_leaving", "is_next", "is_watched", "key", "open", "passed", "quiet_since"),
        *("share", "slot", "waiting"),
    )

    def __init__(self, key: SequenceKey, name: SequenceId, share: SequenceShare) -> None:
        self.key = key
        self.id = name  # as the model gets it
        self.share = share
        self.is_leaving = False  # its place is another's after the request that was passed on
        self.instance = -1
        self.slot = -1
        self.waiting: deque[SequenceStep] = deque()
        self.passed: SequenceStep | None = None  # with the scheduler
        self.open = True  # takes requests that do not start it
        self.quiet_since = 0.0
        self.is_next = False  # is among those whose turn it is
        self.is_watched = False  # is among those who may have been quiet for too long

    def settle(self) -> None:
        """Some have left: what is asked of the next that comes follows from the last that is there."""
        last = self.waiting[-1] if self.waiting else self.passed
        self.open = last is not None and not last.closes


class Dropped(NamedTuple):
    job: Job
    why: Why


@dataclass(slots=True)
class Turn:
    """Lists the requests to pass on and those to reject, and when to look again if nothing happens before."""

    passed: list[Job] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    look_again: float | None = None


class Bounds(NamedTuple):
    """Limits what waits. Seconds are those that a sequence waits for a place, if its client does not say
    less."""

    requests: int
    sequences: int
    size: int  # bytes
    seconds: float


class Sequences:
    """Holds the sequences of one model, whose instances have so many places each."""

    def __init__(
        self,
        instances: int,
        places: int,
        idle: float,
        bounds: Bounds,
        size_of: Callable[[Job], int] = lambda _job: 0,
    ) -> None:
        """`size_of` says how many bytes a request keeps; only of those that wait is it asked."""
        self._places = places
        self._idle = idle
        self._bounds = bounds
        self._size_of = size_of
        self._free: list[list[int] | None] = [list(range(places)) for _ in range(instances)]  # None: gone
        self._gaps = instances * places  # places that are free, of instances that are there
        self._known: dict[SequenceKey, LiveSequence] = {}
        self._shares: dict[str, SequenceShare] = {}  # of all of whom a sequence is known
        self._ids: set[SequenceId] = set()  # that the model gets
        self._leaving = 0  # sequences
        self._next: deque[LiveSequence] = deque()
        self._deadlines: list[tuple[float, int, SequenceStep]] = []
        self._quiet: list[tuple[float, int, LiveSequence]] = []
        self._passed: list[Job] = []  # whose turn came at once
        self._dropped: list[Dropped] = []  # not answered yet
        self._ended: dict[SequenceKey, Why] = {}
        self._number = 0
        self.waiting = 0  # requests that were not passed on yet
        self.size = 0  # bytes that they keep
        self.live = 0  # sequences with a place

    @property
    def backlog(self) -> int:
        """Returns the number of sequences without a place."""
        return len(self._known) - self.live

    def why_ended(self, name: SequenceId, client: str = "") -> Why | None:
        """Returns why a sequence ended early, if that was not too long ago."""
        return self._ended.get((client, name))

    # ---- what happened ------------------------------------------------------------------------------

    def offer(self, job: Job, name: SequenceId, now: float, *, start: bool, end: bool) -> Why | None:
        """A request has come: None, and it waits for its turn; or why not, and nothing is known of it."""
        if job.images != 1:
            return Why.NOT_ONE
        if not name:
            return Why.NO_ID
        key = job.origin.holder or job.origin.payer, name
        sequence = self._known.get(key)
        if not start and (sequence is None or not sequence.open):
            return Why.NO_START
        size = 0
        at_once = (  # nothing is before it
            self._gaps > 0 and not self._has_backlog
            if sequence is None
            else sequence.instance >= 0 and sequence.passed is None and not sequence.waiting
        )
        if not at_once:
            size = self._size_of(job)
            share = self._shares.get(job.origin.payer) if sequence is None else sequence.share
            full = self._is_full(share, size, new=sequence is None)
            if full is not None:
                return full
        if sequence is None:
            sequence = self._begin(key, job)
            if at_once:
                self._seat(sequence)
        if self._ended:
            self._ended.pop(key, None)
        self._number += 1
        job.payload = step = SequenceStep(job, sequence, self._number, start=start, end=end)
        sequence.open = not end
        if at_once:
            step.waits = False
            sequence.passed = step
            self._passed.append(job)
        else:
            step.size = size
            self._wait(step)
        return None

    def _begin(self, key: SequenceKey, job: Job) -> LiveSequence:
        share = self._shares.get(job.origin.payer)
        if share is None:
            share = self._shares[job.origin.payer] = SequenceShare(job.origin.payer, job.origin.weight)
        share.weight = job.origin.weight
        share.sequences += 1
        sequence = self._known[key] = LiveSequence(key, self._told(*key), share)
        self._ids.add(sequence.id)
        return sequence

    def _told(self, client: str, name: SequenceId) -> SequenceId:
        """Returns the id that the model gets in place of one that it knows as another client's: a model may
        store its state by that."""
        client = client.removeprefix(ADDRESS)
        if isinstance(name, str):
            while name in self._ids:
                name = f"{client}/{name}"
            return name
        if name not in self._ids:
            return name
        number = crc32(f"{client}/{name}".encode()) % _LARGEST_ID + 1
        while number in self._ids:
            number = number % _LARGEST_ID + 1
        return number

    @property
    def _has_backlog(self) -> bool:
        return any(share.backlog for share in self._shares.values())

    def _is_full(self, share: SequenceShare | None, size: int, *, new: bool) -> Why | None:
        if _is_used_up(self.waiting, self._bounds.requests, share, 0 if share is None else share.waiting):
            return Why.FULL
        waits = 0 if share is None else share.sequences - share.places
        if new and not self._gaps and _is_used_up(self.backlog, self._bounds.sequences, share, waits):
            return Why.CROWDED
        own = 0 if share is None else share.size
        return Why.HEAVY if _is_used_up(self.size + size - 1, self._bounds.size, share, own) else None

    def _wait(self, step: SequenceStep) -> None:
        sequence = step.sequence
        sequence.waiting.append(step)
        self._count(step, 1)
        if step.job.deadline < INFINITY:
            self._expect(step.job.deadline, step)
        if len(sequence.waiting) == 1:
            self._look_at(sequence)

    def until_free(self, now: float) -> float | None:
        """Returns the seconds until a place is free, if no idle sequence gets a request; None: unknown."""
        while self._quiet and not self._is_quiet(self._quiet[0][2]):
            heappop(self._quiet)[2].is_watched = False
        if not self._quiet:
            return None
        return max(0.0, self._quiet[0][2].quiet_since + self._idle - now)

    def passed_at_once(self) -> list[Job] | None:
        """Returns the requests to pass on, where no other request waits for anything; None: ask `turn`."""
        if self.waiting or self._dropped:
            return None
        passed, self._passed = self._passed, []
        return passed

    def cancel(self, job: Job) -> bool:
        """Its client has left. True: it waited here, and is forgotten; else the scheduler has it."""
        step: SequenceStep = job.payload
        if not step.waits:
            return False
        self._leave_out(step, Why.NEVER_BEGAN)
        return True

    def finished(self, job: Job, now: float, *, ran: bool) -> bool:
        """The scheduler is done with it: it `ran`, well or not; or was refused, given up or cancelled.
        Returns whether there is something to do before any time passes: ask `turn`."""
        step: SequenceStep = job.payload
        sequence = step.sequence
        if sequence.passed is not step:
            return True  # it was lost with its instance
        sequence.passed = None
        if step.start and not ran:
            step.closes = True
            self._drop_until_start(sequence, 0, Why.NEVER_BEGAN)
            sequence.settle()
            if not sequence.waiting:
                self._remember(sequence, Why.NEVER_BEGAN)
        if step.closes:
            self._release(sequence)
        elif sequence.waiting:
            self._look_at(sequence)
        else:
            sequence.quiet_since = now
            if not sequence.is_watched:
                self._watch(sequence)
        waits = self._gaps and len(self._known) > self.live and self._has_backlog
        return bool(self._passed or self._next or self._dropped or waits)

    def lost(self, instance: int) -> list[Job]:
        """An instance is gone, and what its sequences had there. Returns those that were passed on to it, for
        the scheduler to forget: they are not known here any more."""
        gone, self._free[instance] = self._free[instance], None
        self._gaps -= len(gone or ())
        passed: list[Job] = []
        for sequence in [one for one in self._known.values() if one.instance == instance]:
            if sequence.passed is not None:
                job, sequence.passed = sequence.passed.job, None
                if job in self._passed:  # not passed to the scheduler yet
                    self._passed.remove(job)
                    self._dropped.append(Dropped(job, Why.LOST))
                else:
                    passed.append(job)
            self._drop_until_start(sequence, 0, Why.LOST)
            sequence.settle()
            if not sequence.waiting:
                self._remember(sequence, Why.LOST)
            self._release(sequence)
        return passed

    def placed(self, instance: int) -> None:
        """The instance is back, empty."""
        if self._free[instance] is None:
            self._free[instance] = list(range(self._places))
            self._gaps += self._places

    def drop_waiting(self) -> None:
        """Drops all waiting requests: they are rejected at the next turn, and their sequences end."""
        for sequence in list(self._known.values()):
            for step in sequence.waiting:
                self._drop(step, Why.TOLD)
            sequence.waiting.clear()
            sequence.open = False
            if sequence.passed is None:
                self._release(sequence)
            else:
                sequence.passed.closes = True

    # ---- what to do ---------------------------------------------------------------------------------

    def turn(self, now: float) -> Turn:
        """Returns what follows from all that happened, and from the time."""
        deadlines, quiet = self._deadlines, self._quiet
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].waits):
            self._has_waited(heappop(deadlines)[2], now)
        while quiet and quiet[0][0] <= now:
            self._has_been_quiet(heappop(quiet)[2], now)
        self._give_places()
        turn = Turn(self._passed, self._dropped)
        self._passed, self._dropped = [], []
        while self._next:
            sequence = self._next.popleft()
            sequence.is_next = False
            if sequence.waiting and sequence.passed is None and sequence.instance >= 0:
                self._pass(sequence, turn.passed)
        if deadlines:
            turn.look_again = deadlines[0][0]
        if quiet and (turn.look_again is None or quiet[0][0] < turn.look_again):
            turn.look_again = quiet[0][0]
        return turn

    # ---- inside -------------------------------------------------------------------------------------

    def _pass(self, sequence: LiveSequence, passed: list[Job]) -> None:
        sequence.passed = step = sequence.waiting.popleft()
        step.instance, step.slot = sequence.instance, sequence.slot
        self._no_longer_waits(step)
        passed.append(step.job)

    def _no_longer_waits(self, step: SequenceStep) -> None:
        step.waits = False
        self._count(step, -1)

    def _count(self, step: SequenceStep, sign: int) -> None:
        share = step.sequence.share
        self.waiting += sign
        share.waiting += sign
        self.size += sign * step.size
        share.size += sign * step.size

    def _expect(self, at: float, step: SequenceStep) -> None:
        """Look at that time whether it still waits."""
        if len(self._deadlines) > _COMPACT_AT + 4 * self.waiting:
            self._deadlines[:] = [entry for entry in self._deadlines if entry[2].waits]
            heapify(self._deadlines)
        self._number += 1
        heappush(self._deadlines, (at, self._number, step))

    def _has_waited(self, step: SequenceStep, now: float) -> None:
        """Ends one that has waited for as long as its client said; or for a place, for as long as it may. Of
        one that came before its sequence ended, that wait began when it was the first: it was noted then."""
        if not step.waits:
            return
        if step.job.deadline <= now:
            why = Why.DEADLINE
        elif step.sequence.instance < 0 and step.sequence.waiting[0] is step:
            why = Why.NO_PLACE
        else:
            return
        self._dropped.append(Dropped(step.job, why))
        self._leave_out(step, why)

    def _seat(self, sequence: LiveSequence) -> None:
        """Gives a sequence a place where most places are free, of which there is one."""
        at = 0
        if len(self._free) > 1:
            at = max(range(len(self._free)), key=lambda i: len(self._free[i] or ()))
        free = self._free[at]
        assert free
        sequence.instance, sequence.slot = at, heappop(free)
        self._gaps -= 1
        self.live += 1
        sequence.share.places += 1

    def _look_at(self, sequence: LiveSequence) -> None:
        """Another is the first that waits."""
        if sequence.instance >= 0:
            if sequence.passed is None and not sequence.is_next:
                sequence.is_next = True
                self._next.append(sequence)
            return
        backlog = sequence.share.backlog
        if len(backlog) > _COMPACT_AT + 2 * sequence.share.sequences:
            backlog[:] = [entry for entry in backlog if _is_first(*entry)]
            heapify(backlog)
        first = sequence.waiting[0]
        heappush(backlog, (first.number, sequence))
        if self._bounds.seconds < INFINITY:
            self._expect(first.job.arrived + self._bounds.seconds, first)

    def _give_places(self) -> None:
        """Gives places to the client that has least for its weight; of equal ones, to who came first."""
        while True:
            shares = [share for share in self._shares.values() if _has_first(share.backlog)]
            if not shares:
                return
            share = min(shares, key=lambda one: (one.places_after, one.backlog[0][0]))
            if not self._gaps and not self._takes_one(share):
                return
            sequence = heappop(share.backlog)[1]
            self._seat(sequence)
            self._look_at(sequence)

    def _takes_one(self, taker: SequenceShare) -> bool:
        """Returns whether a client that has more gives up a place at once. If each of its sequences has a
        request with the scheduler, that comes first."""
        giver = None if self._leaving or len(self._shares) == 1 else who_yields(self._shares.values(), taker)
        if giver is None:
            return False
        held = [one for one in self._known.values() if one.share is giver and one.instance >= 0]
        stalest = min(held, key=lambda one: (one.passed is not None or bool(one.waiting), one.quiet_since))
        self._drop_until_start(stalest, 0, Why.YIELDED)
        passed = stalest.passed
        if passed is not None:
            passed.closes = stalest.is_leaving = True
            self._leaving += 1
            stalest.share.places -= 1
        stalest.settle()
        if not stalest.waiting:
            self._remember(stalest, Why.YIELDED)
        if passed is None:
            self._release(stalest)
        return self._gaps > 0

    def _release(self, sequence: LiveSequence) -> None:
        """It has run up to its end, or will not: the place is another's. The same id may start again behind
        it, which then waits for a place like all others."""
        share = sequence.share
        if sequence.instance >= 0:
            free = self._free[sequence.instance]
            if free is not None:
                heappush(free, sequence.slot)
                self._gaps += 1
            sequence.instance = sequence.slot = -1
            self.live -= 1
            if sequence.is_leaving:
                sequence.is_leaving = False
                self._leaving -= 1
            else:
                share.places -= 1
        if sequence.waiting:
            self._look_at(sequence)
            return
        del self._known[sequence.key]
        self._ids.discard(sequence.id)
        share.sequences -= 1
        if not share.sequences:
            del self._shares[share.name]

    def _leave_out(self, step: SequenceStep, why: Why) -> None:
        """One that waits leaves. The rest goes on without it, unless it was to start them."""
        sequence = step.sequence
        waiting = sequence.waiting
        at = waiting.index(step)
        del waiting[at]
        self._no_longer_waits(step)
        if step.start:
            self._drop_until_start(sequence, at, why)
        if step.start or step.closes:
            before = waiting[at - 1] if at else sequence.passed
            if before is not None:
                before.closes = True
            sequence.settle()
            if before is None:
                if not waiting and step.start:
                    self._remember(sequence, Why.NEVER_BEGAN)
                self._release(sequence)
                return
        if not waiting and sequence.passed is None:
            sequence.quiet_since = max(sequence.quiet_since, step.job.arrived)
            self._watch(sequence)

    def _drop_until_start(self, sequence: LiveSequence, at: int, why: Why) -> None:
        """Drops the waiting requests from here on, up to one that starts the sequence anew."""
        waiting = sequence.waiting
        while at < len(waiting) and not waiting[at].start:
            self._drop(waiting[at], why)
            del waiting[at]

    def _drop(self, step: SequenceStep, why: Why) -> None:
        self._no_longer_waits(step)
        self._dropped.append(Dropped(step.job, why))

    def _watch(self, sequence: LiveSequence) -> None:
        if not sequence.is_watched:
            if len(self._quiet) > _COMPACT_AT + 2 * len(self._known):
                self._quiet[:] = [entry for entry in self._quiet if self._known.get(entry[2].key) is entry[2]]
                heapify(self._quiet)
            sequence.is_watched = True
            self._number += 1
            heappush(self._quiet, (sequence.quiet_since + self._idle, self._number, sequence))

    def _has_been_quiet(self, sequence: LiveSequence, now: float) -> None:
        """It was once; since then requests may have come."""
        sequence.is_watched = False
        if not self._is_quiet(sequence):
            return
        if sequence.quiet_since + self._idle > now:
            self._watch(sequence)
        else:
            self._remember(sequence, Why.IDLE)
            self._release(sequence)

    def _is_quiet(self, sequence: LiveSequence) -> bool:
        return sequence.passed is None and not sequence.waiting and self._known.get(sequence.key) is sequence

    def _remember(self, sequence: LiveSequence, why: Why) -> None:
        if len(self._ended) >= _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._ended[sequence.key] = why


def _is_first(number: int, sequence: LiveSequence) -> bool:
    """Returns whether this request is still what the sequence waits to start with."""
    return sequence.instance < 0 and bool(sequence.waiting) and sequence.waiting[0].number == number


def _has_first(backlog: list[tuple[int, LiveSequence]]) -> bool:
    """Returns whether a sequence waits there: those that do not any more are taken away first."""
    while backlog and not _is_first(*backlog[0]):
        heappop(backlog)
    return bool(backlog)


def _is_used_up(used: int, bound: int, share: SequenceShare | None, own: int) -> bool:
    """Returns whether no more may wait. `own` is what its client has of what is used: at most so much that
    something is left for the next client, where clients are distinguished."""
    known = share is not None and share.name != ""
    return used >= bound or (known and own >= OF_THE_REST * (bound - used))
