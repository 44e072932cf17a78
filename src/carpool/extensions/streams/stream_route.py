"""The route of a decoupled model: clients share its places (places.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import cast

from carpool.core.job import INFINITY
from carpool.core.refusal_words import replaced
from carpool.engine.run.batch import Outcome, Work
from carpool.engine.run.driver import Driver, Reminder
from carpool.errors import Cancelled, CarpoolError, Unavailable
from carpool.extensions.streams.places import StreamPlaces


class StreamRoute:
    """Routes streamed requests; everything is called on the loop's thread. Requests that are charged to no
    client, such as those of a Python model, go to the driver on arrival."""

    def __init__(
        self, model: str, driver: Driver, places: int, loop: asyncio.AbstractEventLoop, *, eager: bool
    ) -> None:
        self._model = model
        self._driver = driver
        self._eager = eager
        self._loop = loop
        self.law = StreamPlaces(places, driver.scheduler.policy.max_queue)
        self._answers: dict[Work, Callable[[Work, Outcome], None]] = {}
        self._reminder = Reminder(loop, self._go)
        self._planned = False
        self._places = places
        self.ready = driver.ready
        self.why_no_background = ""
        self.idle = True  # a request waits here only while others run

    def turned(self) -> int:
        """Returns the requests that wait for a place."""
        return self.law.held

    def placed(self, instance: int) -> None:
        """Which instance a request gets is the driver's affair."""

    lost = placed

    def submit(self, works: Sequence[Work]) -> None:
        unpaid: list[Work] = []
        for work in works:
            work.route = self
            if self._eager and work.options.timeout:
                work.deadline = min(work.deadline, work.arrived + work.options.timeout)
            if not work.origin.payer:
                unpaid.append(work)
                continue
            older = self.law.older_frame(work)
            if older is not None:
                self._done(cast(Work, older), Outcome(error=replaced(self._model, work.origin.source)))
            if self.law.offer(work):
                self._answers[work], work.done = work.done, self._done
            else:
                full = f"{self.law.held} requests for {self._model} wait already"
                error = Unavailable(f"Exceeds maximum queue size: {full}", reason="queue-full")
                work.done(work, Outcome(error=error))
        if unpaid:
            self._driver.submit(unpaid)
        self._go()

    def cancel(self, work: Work) -> None:
        if self.law.is_held(work):
            self._done(work, Outcome(error=Cancelled("the client left")))
        else:
            self._driver.cancel(work)

    def stop(self, error: CarpoolError, *, until_placed: bool = False) -> None:
        """Rejects all requests that wait here. The driver rejects new ones."""
        for job in self.law.everybody_held():
            self._done(cast(Work, job), Outcome(error=error))

    async def drained(self, timeout: float | None) -> None:
        """Waits until no request waits here, but no longer than `timeout`."""
        until = INFINITY if timeout is None else monotonic() + timeout
        while self.law.held and monotonic() < until:
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        self._reminder.stop()

    def _go(self) -> None:
        self._planned = False
        now = monotonic()
        passed, ends = self.law.turn()
        if ends is not None:
            cast(
                Work, ends
            ).own_extras().gives_way = True  # its model's thread sees that before its next answer
        if passed:
            self._driver.submit(cast(Sequence[Work], passed))
        if self.law.held:
            self._look_at_time(now)

    def _look_at_time(self, now: float) -> None:
        """Passes on each request that has waited here for too long: the driver says why it is given up."""
        expires = self._driver.scheduler.policy.expires
        held = [cast(Work, job) for job in self.law.everybody_held()]
        late = [work for work in held if expires(work) <= now]
        for work in late:
            self.law.left(work)
            work.done = self._answers.pop(work)
        self._driver.submit(late)
        self._reminder.set(min([expires(work) for work in held if work not in late], default=INFINITY), now)

    def _done(self, work: Work, outcome: Outcome) -> None:
        """It has ended, wherever it was. Its place is another's in the next turn."""
        self.law.left(work)
        work.done = self._answers.pop(work)
        if work.extras.gives_way:
            what = f"{self._model}: the request was ended after {monotonic() - work.arrived:.1f} s"
            why = f"its client had more than its share of {self._places} slots, and others wait"
            error = Unavailable(f"{what}: {why}; retry", reason="place-yielded")
            outcome = Outcome(error=error, timing=outcome.timing)
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._go)
        work.done(work, outcome)


_LOOK_S = 0.01
