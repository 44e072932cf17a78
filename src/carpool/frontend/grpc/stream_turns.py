"""Turns of the streams of a front end: of what they bring, so much is begun in one turn of the loop.

A message of five bytes can take as long to answer as a tensor, and the next one is here already:
without turns, the loop would do nothing else until all streams are read to their end. Clients take turns, and
one whose messages are mostly mistakes rests while there are others."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol

from carpool.frontend.clients.accounts import Accounts, FairQueue

TURN_S = 0.001
_LONGEST_REST_S = 0.1


class OpenStream(Protocol):
    """A stream, as the front end knows it while it is open."""

    client: str
    over: bool

    def go_on(self, now: float) -> bool:
        """Begin its next message; whether that was a mistake."""

    def stop(self) -> None:
        """The server stops: what was read is answered."""

    def keys_changed(self) -> None:
        """Other keys are in force: without its own it ends."""


class StreamTurns:
    """Belongs to the loop's thread."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._queue: FairQueue[OpenStream] = FairQueue(lambda one: not one.over)
        self._next_turn: asyncio.Handle | None = None

    def push(self, stream: OpenStream) -> None:
        """It has a message, or has said all."""
        self._queue.push(stream.client, 0.0, stream)
        self._schedule(0.0)

    def _schedule(self, after_s: float) -> None:
        if self._next_turn is None:
            loop = asyncio.get_running_loop()
            self._next_turn = loop.call_later(after_s, self._next) if after_s else loop.call_soon(self._next)

    def _next(self) -> None:
        self._next_turn = None
        accounts, now, rests = self._accounts, monotonic(), [_LONGEST_REST_S]
        ends = now + TURN_S

        def may(one: OpenStream) -> bool:
            rest_s = accounts.rest_s(one.client, now)
            if rest_s > 0.0:
                rests.append(rest_s)
            return rest_s <= 0.0

        while True:
            found = self._queue.pop(may)
            if found is None:
                if len(rests) > 1:
                    self._schedule(min(rests))
                return
            client, stream = found
            began, mistaken = now, stream.go_on(now)
            now = monotonic()
            self._queue.ended(client, now - began)
            if mistaken:
                accounts.spend(accounts.account(client, now), now - began, now)
            if now >= ends:
                break
        self._schedule(0.0)
