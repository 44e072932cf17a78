"""Every request that is under way, and what became of the others. Told the time, it waits for nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from carpool.lab.load.tally import Slice, Tally
from carpool.lab.load.ticket import Answer, Kind, Ticket

Record = Callable[[Ticket, float, Answer], None]

_TIMED_OUT = Answer(Kind.TIMED_OUT)
_UNANSWERED = Answer(Kind.UNANSWERED)


class Ledger:
    """Counts a request once, however many ends it seems to have."""

    def __init__(
        self, phases: int, *, slo: float | None, timeout: float, record: Record | None = None
    ) -> None:
        self.tallies = [Tally() for _ in range(phases)]
        self.open = 0
        self.last_answer = 0.0
        self._slo = slo
        self._timeout = timeout
        self._record = record
        self._waiting: deque[Ticket] = deque()  # in the order of their intended times; some have ended
        self._slice = Slice()

    def start(self, ticket: Ticket, now: float) -> None:
        """The generator got to a request that was due."""
        ticket.started = now
        self.open += 1
        self._slice.offered += 1
        self.tallies[ticket.phase].start(ticket)
        self._waiting.append(ticket)

    def end(self, ticket: Ticket, now: float, answer: Answer) -> bool:
        """Whether this was its end: what comes after a timeout is of no interest any more."""
        if ticket.done:
            return False
        ticket.done = True
        self.open -= 1
        good = self.tallies[ticket.phase].end(ticket, now, answer, self._slo)
        self._watch(ticket, now, answer, good)
        if self._record is not None:
            self._record(ticket, now, answer)
        return True

    def expire(self, now: float) -> list[Ticket]:
        """Those whose time is up, ended as timed out; to be called often."""
        found = []
        while self._waiting and (self._waiting[0].done or now - self._waiting[0].intended >= self._timeout):
            ticket = self._waiting.popleft()
            if self.end(ticket, now, _TIMED_OUT):
                found.append(ticket)
        return found

    def abandon(self, now: float) -> list[Ticket]:
        """Whoever is still open, ended as unanswered."""
        found = [ticket for ticket in self._waiting if self.end(ticket, now, _UNANSWERED)]
        self._waiting.clear()
        return found

    def cut(self) -> Slice:
        """What happened since the last cut."""
        done, self._slice = self._slice, Slice()
        return done

    def _watch(self, ticket: Ticket, now: float, answer: Answer, good: bool) -> None:
        seen = self._slice
        if answer.kind is Kind.ANSWERED:
            self.last_answer = now
            seen.answered += 1
            seen.good += good
            seen.response.add(now - ticket.intended)
        elif answer.kind is Kind.REFUSED:
            seen.refused += 1
        else:
            seen.failed += 1
