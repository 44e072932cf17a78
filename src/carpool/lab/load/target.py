"""Whom the generator asks: a client that takes tickets and tells what became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from carpool.lab.load.ticket import Answer, Ticket

Tell = Callable[[Ticket, Answer], None]
"""Called once for each ticket, unless it was let go before."""
Clock = Callable[[], float]
"""Seconds from the start of the run."""


class Target(Protocol):
    """A client of one server. To be used on one event loop."""

    name: str  # for people: the address and what is asked there

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        """Get ready for about `expected` requests at once."""

    def send(self, ticket: Ticket) -> None:
        """Send it now, or when there is a connection; `ticket.sent` is set to when that was."""

    def let_go(self, ticket: Ticket) -> None:
        """Nobody waits for this one any more."""

    async def close(self) -> None: ...

    def facts(self) -> dict[str, int]:
        """Numbers of its own for the report, like how many connections there were."""
