"""How the requests of a served version come to its driver, and which version requests mean that name none.

Every served version has a route, and a caller that submits need not know which: `Direct` is that of a model,
`Spare` the one for background work. Ensembles have theirs in journey.py, which asks several others, and
models that take sequences in sequence_route.py. Cached answers, and the share of each version in a rollout,
are decided before that, in the front ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from carpool.engine.batch import Work
from carpool.engine.driver import Driver

if TYPE_CHECKING:
    from carpool.engine.models.served import Served


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


def newest(versions: Mapping[int, Served], preferred: Mapping[str, str]) -> dict[str, int]:
    """By name, the key of the version that serves requests which name none: the one that is `preferred`, as
    while another is to take over from it, or else the newest."""

    def rank(key: int) -> tuple[bool, int]:
        one = versions[key]
        return one.version == preferred.get(one.name), int(one.version)

    chosen: dict[str, int] = {}
    for key, one in versions.items():
        known = chosen.get(one.name)
        if known is None or rank(key) > rank(known):
            chosen[one.name] = key
    return chosen
