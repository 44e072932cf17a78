from __future__ import annotations

import asyncio

from carpool.lab.load.generator import run
from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.tally import PLAIN_ANSWER, Clock, Tell, Ticket
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


def test_each_process_opens_its_share_of_connections() -> None:
    assert Plan(Closed(100, requests=1)).at_once(of=8) == 13
    surge = Open((Phase(100.0, 1.0), Phase(30_000.0, 2.0)))
    assert Plan(surge, slo=0.05).at_once(of=6) == 250
    assert Plan(surge).at_once() == 16
