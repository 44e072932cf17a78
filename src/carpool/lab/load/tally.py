"""Counts and histograms of requests: added up while they end, and merged over processes."""

from __future__ import annotations

from collections import Counter

from carpool.lab.load.histogram import Histogram
from carpool.lab.load.ticket import Answer, Kind, Ticket


class Slice:
    """What happened in a short while, by the clock: for somebody who watches."""

    __slots__ = ("answered", "failed", "good", "offered", "refused", "response")

    def __init__(self) -> None:
        self.offered = 0
        self.answered = 0
        self.good = 0
        self.refused = 0
        self.failed = 0  # and everything else that went wrong
        self.response = Histogram()

    def merge(self, other: Slice) -> None:
        self.offered += other.offered
        self.answered += other.answered
        self.good += other.good
        self.refused += other.refused
        self.failed += other.failed
        self.response.merge(other.response)


class Tally:
    """The requests of one phase, whenever they ended. Every one that was offered is in one of five counts."""

    def __init__(self) -> None:
        self.offered = 0
        self.sent = 0
        self.answered = 0
        self.good = 0  # answered within the SLO
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.timed_out = 0
        self.unanswered = 0
        self.images = 0  # of those answered
        self.response = Histogram()  # of those answered, from the intended time
        self.service = Histogram()  # of those answered, from the time they were sent
        self.refusal = Histogram()  # of those refused, from the intended time
        self.start_lag = Histogram()  # from the intended time until the generator got to it
        self.send_lag = Histogram()  # from the intended time until it was sent
        self.queue = Histogram()
        self.infer = Histogram()
        self.outside = Histogram()  # of the service time, what the server does not know of
        self.batch = Histogram()

    def start(self, ticket: Ticket) -> None:
        self.offered += 1
        self.start_lag.add(ticket.started - ticket.intended)

    def end(self, ticket: Ticket, now: float, answer: Answer, slo: float | None) -> bool:
        """Whether it was answered in time."""
        if ticket.sent is not None:
            self.sent += 1
            self.send_lag.add(ticket.sent - ticket.intended)
        response = now - ticket.intended
        if answer.kind is Kind.ANSWERED:
            self._answer(ticket, now, answer, response)
            if slo is None or response <= slo:
                self.good += 1
                return True
        elif answer.kind is Kind.REFUSED:
            self.refused[answer.reason] += 1
            self.refusal.add(response)
        elif answer.kind is Kind.FAILED:
            self.failed[answer.reason] += 1
        elif answer.kind is Kind.TIMED_OUT:
            self.timed_out += 1
        else:
            self.unanswered += 1
        return False

    def _answer(self, ticket: Ticket, now: float, answer: Answer, response: float) -> None:
        self.answered += 1
        self.images += ticket.images
        self.response.add(response)
        service = now - (ticket.intended if ticket.sent is None else ticket.sent)
        self.service.add(service)
        timing = answer.timing
        if timing is not None:
            self.queue.add(timing.queue)
            self.infer.add(timing.infer)
            self.batch.add(timing.batch)
            if timing.inside is not None:
                self.outside.add(service - timing.inside)

    def merge(self, other: Tally) -> None:
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
            elif isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                getattr(self, name).merge(value)
