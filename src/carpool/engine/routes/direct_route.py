"""Leads the requests of a served version to its driver.

Every served version has a route, and a caller that submits need not know which. That of most models is their
driver; `Eager` and `Background` stand before it, for deadlines and for background work. Extensions put others
before it (`Stand`), and have routes of their own for what is made of several models (`Stepped`). Cached
answers, and the share of each version in a rollout, are decided earlier, in the front ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.engine.run.batch import Outcome, Work
from carpool.engine.run.driver import Driver
from carpool.errors import Unavailable


class Eager:
    """To a driver whose model takes a queue timeout for a deadline, as Triton does."""

    __slots__ = ("_driver", "cancel", "ready")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.ready = driver.ready
        self.cancel = driver.cancel

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.options.timeout:
                work.deadline = min(work.deadline, work.arrived + work.options.timeout)
        self._driver.submit(works)


class Background:
    """Routes background work to the same model: only its driver knows of it."""

    __slots__ = ("_driver", "cancel")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.cancel = driver.cancel

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route = self
            self._driver.submit_background(work)

    def ready(self, work: Work) -> None:
        """Its inputs were there when it came."""


class _Unloaded:
    """Represents the route of a version that is gone."""

    def submit(self, works: Sequence[Work]) -> None:
        error = Unavailable("the model was unloaded meanwhile", reason="unloading")
        for work in works:
            work.done(work, Outcome(error=error))

    def ready(self, work: Work) -> None:
        """It was answered when it came."""

    cancel = ready


NO_ROUTE = _Unloaded()
