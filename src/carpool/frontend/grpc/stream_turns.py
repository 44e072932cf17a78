"""Turns of the streams of a front end: of what they bring, so much is begun in one turn of the loop.

A message of five bytes can take as long to answer as a tensor, and the next one is here already:
without turns, the loop would do nothing else until all streams are read to their end. Clients take turns, and
one whose messages are mostly mistakes rests while there are others."""

from __future__ import annotations

import asyncio
from time import monotonic

from carpool.frontend.clients.accounts import Account, Accounts
from carpool.frontend.clients.fair_queue import FairQueue

TURN_S = 0.001
_AT_A_TIME = 4  # streams that go on in one turn: each begins a message at least
_LONGEST_REST_S = 0.1


class StreamTurns:
    """Of the loop's thread."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._queue: FairQueue[tuple[str, asyncio.Future[None]]] = FairQueue(lambda one: not one[1].done())
        self._ends = 0.0  # of this turn; 0 while none has begun
        self._next_turn: asyncio.Handle | None = None

    async def begin(self, account: Account) -> float:
        """Wait for a turn, if this one is used up or the client rests. Returns the time."""
        now = monotonic()
        if (self._ends and now >= self._ends) or self._accounts.spend(account, 0.0, now) > 0.0:
            waiter = asyncio.get_running_loop().create_future()
            self._queue.push(account.name, 0.0, (account.name, waiter))
            self._schedule(0.0)
            await waiter
            now = monotonic()
        if not self._ends:
            self._ends = now + TURN_S
            self._schedule(0.0)
        return now

    def ended(self, account: Account, seconds: float, *, failed: bool) -> None:
        """A message was begun, or was a mistake; so long that took."""
        self._queue.served(account.name, seconds)
        if failed:
            self._accounts.spend(account, seconds, monotonic())

    def _schedule(self, after_s: float) -> None:
        if self._next_turn is None:
            loop = asyncio.get_running_loop()
            self._next_turn = loop.call_later(after_s, self._next) if after_s else loop.call_soon(self._next)

    def _next(self) -> None:
        self._next_turn = None
        self._ends = 0.0
        now, rests = monotonic(), [_LONGEST_REST_S]

        def may(one: tuple[str, asyncio.Future[None]]) -> bool:
            rest_s = self._accounts.rest_s(one[0], now)
            if rest_s > 0.0:
                rests.append(rest_s)
            return rest_s <= 0.0

        for _ in range(_AT_A_TIME):
            found = self._queue.pop(may)
            if found is None:
                if len(rests) > 1:
                    self._schedule(min(rests))
                return
            self._queue.ended(found[0], 0.0)
            found[1][1].set_result(None)
        self._schedule(0.0)
