"""A run in virtual time: the generator's own pace and ledger against a server that is a function."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from math import inf

from carpool.lab.load.load_plan import Pace
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Ledger, Ticket

Serve = Callable[[Ticket, float], tuple[float, Answer]]
"""When and how a request that is sent now will end; never, if that is at infinity."""


class Stalling:
    """Serves any number at once in `service` seconds, but nothing while it stalls."""

    def __init__(self, service: float, stall: tuple[float, float]) -> None:
        self._service = service
        self._stall = stall

    def __call__(self, _ticket: Ticket, now: float) -> tuple[float, Answer]:
        start, end = self._stall
        done = now + self._service
        return (end + self._service if now < end and done > start else done), PLAIN_ANSWER


def play(pace: Pace, ledger: Ledger, serve: Serve, *, until: float, connections: float = inf) -> None:
    """Everything that happens until then; what finds no connection waits for one."""
    ends: list[tuple[float, int, Ticket, Answer]] = []
    waiting: deque[Ticket] = deque()
    order = count()
    now = 0.0

    def send(ticket: Ticket) -> None:
        ticket.sent = now
        at, answer = serve(ticket, now)
        heapq.heappush(ends, (at, next(order), ticket, answer))

    while now <= until:
        for ticket in pace.due(now, 10**9):
            ledger.start(ticket, now)
            waiting.append(ticket)
        while waiting and len(ends) < connections:
            send(waiting.popleft())
        now = min(pace.next_at, ends[0][0] if ends else inf)
        if now == inf:
            break
        for _ in ledger.expire(now):
            pace.answered(now)
        while ends and ends[0][0] <= now:
            _, _, ticket, answer = heapq.heappop(ends)
            if ledger.end(ticket, now, answer):
                pace.answered(now)
    ledger.abandon(until)
