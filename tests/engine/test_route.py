"""Where requests go: which version is chosen, and that something else may stand in a model's place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from carpool.engine.engine import Engine
from carpool.engine.fleet.fleet import newest
from carpool.engine.run.batch import Outcome, Route, Work
from engine.scripted import Stage, ask, model, run, scripted_stage

__all__ = ["scripted_stage"]


@dataclass
class Version:
    name: str
    version: str


def test_the_newest_version_is_chosen_by_its_number() -> None:
    versions = {1: Version("a", "9"), 2: Version("a", "10"), 3: Version("b", "1"), 4: Version("a", "2")}
    assert newest(versions, {}) == {"a": 2, "b": 3}
    assert newest({}, {}) == {}


class Remembering:
    """A cache, as it might be: what was answered once is answered again without the model."""

    def __init__(self, behind: Route) -> None:
        self._behind = behind
        self._known: dict[bytes, Outcome] = {}

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            key = work.inputs["x"].tobytes()
            if key in self._known:
                work.done(work, self._known[key])
            else:
                self._ask(work, key)

    def _ask(self, work: Work, key: bytes) -> None:
        done = work.done

        def keep(work: Work, outcome: Outcome) -> None:
            self._known[key] = outcome
            done(work, outcome)

        work.done = keep
        self._behind.submit([work])

    def ready(self, work: Work) -> None:
        self._behind.ready(work)

    def cancel(self, work: Work) -> None:
        self._behind.cancel(work)


@pytest.mark.usefixtures("stage")
def test_a_route_of_another_kind_stands_around_the_models_own(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=7.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            (key,) = engine.fleet.offered
            engine.fleet.routes[key] = Remembering(engine.fleet.routes[key])
            assert [await ask(engine) for _ in range(3)] == [7.0, 7.0, 7.0]
            assert await ask(engine, x=2.0) == 7.0
            (served,) = engine.fleet.offered.values()
            assert served.scheduler.ledger.offered == 2
            assert np.isclose(stage.backends[0].value, 7.0)

    run(story())
