"""Divides the places of a decoupled model, whose answers to one request may go on for ever.

Requests wait here while all places are taken. The next place is for the client (a key's holder, or else an
address: `Job.payer`) that has least for its weight; where one has fewer than its share, the client with most
gives up the stream that has run longest. No client may fill the queue to the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.job import Job
from carpool.core.shares import OF_THE_REST, PlaceShare, who_yields


class StreamShare(PlaceShare):
    """Counts what one client has: `places` without the one that it is about to leave."""

    __slots__ = ("held", "running")

    def __init__(self, name: str, weight: float) -> None:
        super().__init__(name, weight)
        self.held: dict[Job, int] = {}  # who waits, and in which order they came
        self.running: dict[Job, None] = {}  # the longest first


class StreamPlaces:
    """Divides the places of one model between clients: decides which of the waiting requests may run."""

    def __init__(self, places: int, most_held: int) -> None:
        self._places = places
        self._most_held = most_held
        self._shares: dict[str, StreamShare] = {}
        self._leaving: Job | None = None
        self._running = self._number = 0
        self.held = 0

    def offer(self, job: Job) -> bool:
        """It waits for its turn; or too many of its client's do."""
        share = self._shares.get(job.origin.payer)
        own = 0 if share is None else len(share.held)
        rest = self._most_held - self.held
        if rest <= 0 or own >= OF_THE_REST * rest:
            return False
        if share is None:
            share = self._shares[job.origin.payer] = StreamShare(job.origin.payer, job.origin.weight)
        share.weight = job.origin.weight
        self._number += 1
        share.held[job] = self._number
        self.held += 1
        return True

    def is_held(self, job: Job) -> bool:
        share = self._shares.get(job.origin.payer)
        return share is not None and job in share.held

    def older_frame(self, job: Job) -> Job | None:
        """Returns what waits of the same live source."""
        held = self.everybody_held() if job.options.latest else []
        return next(
            (one for one in held if one.options.latest and one.origin.source == job.origin.source), None
        )

    def everybody_held(self) -> list[Job]:
        return [job for share in self._shares.values() for job in share.held]

    def left(self, job: Job) -> None:
        """It has ended, or does not wait any more."""
        share = self._shares[job.origin.payer]
        if job in share.held:
            del share.held[job]
            self.held -= 1
        else:
            del share.running[job]
            self._running -= 1
            if job is self._leaving:
                self._leaving = None
            else:
                share.places -= 1
        if not share.held and not share.running:
            del self._shares[share.name]

    def turn(self) -> tuple[Sequence[Job], Job | None]:
        """Returns who runs from now on, and who is to end for the sake of another. One at a time: its place
        is another's when it has `left`."""
        passed: list[Job] = []
        while self.held:
            waiting = [share for share in self._shares.values() if share.held]
            share = min(waiting, key=lambda one: (one.places_after, next(iter(one.held.values()))))
            if self._running >= self._places:
                return passed, self._yielding(share)
            job = next(iter(share.held))
            del share.held[job]
            self.held -= 1
            share.running[job] = None
            share.places += 1
            self._running += 1
            passed.append(job)
        return passed, None

    def _yielding(self, taker: StreamShare) -> Job | None:
        giver = None if self._leaving is not None else who_yields(self._shares.values(), taker)
        if giver is None:
            return None
        giver.places -= 1
        self._leaving = next(iter(self._shares[giver.name].running))
        return self._leaving
