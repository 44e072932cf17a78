"""How the requests of a served version come to its driver.

Every served version has a route, and a caller that submits need not know which: `Direct` is that of a model,
`Spare` the one for background work. Beside it are the routes of sequences and of streams of answers, and
those of ensembles and pipelines, which are made of several models. Cached answers, and the share of each
version in a rollout, are decided before that, in the front ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.engine.run.batch import Work
from carpool.engine.run.driver import Driver


class Direct:
    """To the model's own driver, and nowhere else. `eager`: its queue timeout is a deadline, as in Triton."""

    __slots__ = ("_driver", "_eager", "cancel", "ready")

    def __init__(self, driver: Driver, *, eager: bool) -> None:
        self._driver = driver
        self._eager = eager
        self.ready = driver.ready
        self.cancel = driver.cancel

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route = self
            if self._eager and work.timeout:
                work.deadline = min(work.deadline, work.arrived + work.timeout)
        self._driver.submit(works)


class Spare:
    """The same model for work that nobody waits for: only its driver knows of it."""

    __slots__ = ("_driver", "cancel")

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.cancel = driver.cancel

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route = self
            self._driver.submit_spare(work)

    def ready(self, work: Work) -> None:
        """Its inputs were there when it came."""
