"""Implements the engine client of a front end: what outlives the engine at the other end of the link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, cast

from carpool.errors import CarpoolError
from carpool.frontend.engine_state import EngineState
from carpool.frontend.front_link import Asks, FrontLink, RemoteBooking, RemoteCall, failed_call
from carpool.link.advice import Gate, open_gate
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Ask, Hears
from carpool.memory.arena import Arena
from carpool.memory.pulse import HOPELESS_S, STALE_S
from carpool.observe.logs import logger

_log = logger("link")

_LOOKS_EVERY = 20  # beats, at memory that long bodies have used


def _nowhere(entry: ModelEntry) -> RemoteBooking:
    """Books without an engine: whatever is asked through it fails."""
    return RemoteBooking(None, 0, entry)


class LinkClient(EngineState):
    """Implements `EngineClient`. `broken` is called when the engine cannot be understood, which only a
    restart mends."""

    def __init__(
        self,
        arena: Arena,
        *,
        max_answer_bytes: int,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(arena)
        self._max_answer_bytes = max_answer_bytes
        self.refuses: Gate = open_gate
        self.infer: Asks = self._no_engine  # the link's, while there is one; so is this:
        self.begin_booking: Callable[[ModelEntry], RemoteBooking] = _nowhere
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._link: FrontLink | None = None
        self._beats = 0
        self._gives_back = False  # memory that long bodies have used

    def advise(self, gate: Gate) -> None:
        """Ask this before a body is read."""
        self.refuses = gate

    def engine_stood_still(self, seconds: float) -> None:
        """Is called every `BEAT_S`: an engine that hangs has not closed its link, and may never do so."""
        if (seconds >= STALE_S) != (self.still >= STALE_S):
            _log.warning("engine-stalled" if seconds >= STALE_S else "engine-recovered")
        self.still = seconds
        self.judge()
        self._beats += 1
        if self._beats % _LOOKS_EVERY == 0 or self._gives_back:
            self._gives_back = self.arena.give_back()
        if self._link is not None:
            self._link.look_at_time(monotonic(), hopeless=seconds >= HOPELESS_S)

    def drain(self) -> None:
        """Not serving any more, although what has begun is still carried through."""
        self.draining = True
        self.judge()

    async def attach(self, sock: socket.socket) -> None:
        """Attaches a new engine: the one before, if there was any, is dead."""
        self.close()
        link = FrontLink(self, self._opened, self._lost, self._loop, self._max_answer_bytes)
        await self._loop.create_unix_connection(lambda: cast(asyncio.Protocol, link), sock=sock)

    def close(self) -> None:
        """End the link, and with it whatever still waits."""
        if self._link is not None:
            self._link.close()

    def rejected_here(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        """Does nothing here: `RecordingClient` records rejected requests."""

    def answered_here(self, entry: ModelEntry, arrived: float, images: int, source: str) -> None:
        """Does the same."""

    def _no_engine(self, ask: Ask, hears: Hears) -> RemoteCall:
        return failed_call(self._loop, RemoteCall(ask, hears), self.trouble())

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if self._link is None or self.still >= STALE_S:
            raise self.trouble()
        return await self._link.ask(what, arguments)

    # For the link.

    def _opened(self, link: FrontLink) -> None:
        self._link = link
        self.connected = True
        self.infer, self.begin_booking = link.infer, link.begin_booking
        self.still = 0.0
        self.forget()

    def _lost(self, link: FrontLink, error: str | None) -> None:
        """`error` says what the engine did wrong; without it, it has died."""
        if self._link is link:
            self._link = None
            self.connected = False
            self.infer, self.begin_booking = self._no_engine, _nowhere
            self.forget()
        if error is not None:
            _log.error("link-broken", error=error)
            self._broken()
