from __future__ import annotations

import asyncio

from carpool.lab.load.outcome import PLAIN_ANSWER, Ticket
from carpool.lab.load.plan import Closed, Plan
from carpool.lab.load.run import run
from carpool.lab.load.target import Clock, Tell
from lab.load.stub import in_loop


class Prompt:
    """Answers in the next turn of the loop."""

    name = "prompt"

    async def open(self, tell: Tell, clock: Clock, expected: int) -> None:
        self._tell, self._clock = tell, clock

    def send(self, ticket: Ticket) -> None:
        ticket.sent = self._clock()
        asyncio.get_running_loop().call_soon(self._tell, ticket, PLAIN_ANSWER)

    def let_go(self, ticket: Ticket) -> None: ...

    async def close(self) -> None: ...

    def facts(self) -> dict[str, int]:
        return {}


def test_a_single_client_that_thinks_asks_again() -> None:
    found = in_loop(run(Plan(Closed(1, requests=20, think=0.002)), Prompt()))
    assert found.total.answered == 20
