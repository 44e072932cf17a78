"""Any sequence of changes, loads and unloads, against a simple picture of what must be served after each."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as bounded
from hypothesis import strategies as st

from carpool.engine.engine import Engine
from carpool.errors import CarpoolError, ModelError
from engine.scripted import Stage, ask, model, run, settings, states, weights
from later import many
from waiting import until_in_loop as until

VERSIONS = (1, 2, 3)
POLICIES = {
    '"all"': VERSIONS,
    "{ latest = 1 }": (3,),
    "{ latest = 2 }": (2, 3),
    "[1, 3]": (1, 3),
    "[2]": (2,),
}

steps = st.one_of(
    st.tuples(st.just("load"), st.just(0), st.just("")),
    st.tuples(st.just("unload"), st.just(0), st.just("")),
    st.tuples(st.just("look"), st.just(0), st.just("")),
    st.tuples(st.just("write"), st.sampled_from(VERSIONS), st.just("")),
    st.tuples(st.just("break"), st.sampled_from(VERSIONS), st.just("")),
    st.tuples(st.just("policy"), st.just(0), st.sampled_from(sorted(POLICIES))),
)


@dataclass
class Picture:
    """What lies in the folder, what was tried last, and what is served."""

    policy: str = '"all"'
    files: dict[int, float | str] = field(default_factory=dict)
    touched: bool = True  # since the last attempt
    served: dict[int, float] = field(default_factory=dict)

    def load(self) -> bool:
        """Whether it works."""
        self.touched = False
        chosen = {version: self.files[version] for version in POLICIES[self.policy]}
        if "broken" in chosen.values():
            return False
        self.served = {version: float(value) for version, value in chosen.items()}
        return True


async def play(home: Path, stage: Stage, story: list[tuple[str, int, str]]) -> None:
    picture = Picture(files={version: float(version) for version in VERSIONS})
    model(home, v1=1.0, v2=2.0, v3=3.0)
    written = 10.0
    async with Engine(home) as engine:
        assert picture.load()
        for what, version, policy in story:
            picture.touched |= what in ("write", "break", "policy")
            if what == "write":
                written += 1
                picture.files[version] = written
                weights(home, "m", version, written)
            elif what == "break":
                picture.files[version] = "broken"
                weights(home, "m", version, "broken")
            elif what == "policy":
                picture.policy = policy
                settings(home, policy=policy)
            elif what == "unload":
                picture.served = {}
                await engine.unload("m")
            elif what == "look":
                if picture.touched:
                    picture.load()
                await engine.control.look()
            elif picture.load():
                await engine.load("m")
            else:
                with pytest.raises(ModelError):
                    await engine.load("m")
            await check(engine, picture)
        await until(lambda: stage.open == sorted(picture.served.values()))
    assert stage.open == []


async def check(engine: Engine, picture: Picture) -> None:
    for version in VERSIONS:
        wanted = picture.served.get(version)
        if wanted is None:
            with pytest.raises(CarpoolError):
                await ask(engine, version=str(version))
        else:
            assert await ask(engine, version=str(version)) == wanted
    if picture.served:
        assert await ask(engine) == picture.served[max(picture.served)]
    ready = [version for version, state in states(engine).items() if state.startswith("READY")]
    assert sorted(ready) == sorted(map(str, picture.served))


@given(st.lists(steps, max_size=12))
@bounded(max_examples=many(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_after_every_step_exactly_what_should_be_served_is(story: list[tuple[str, int, str]]) -> None:
    stage = Stage()
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr("carpool.backends.load", stage.load)
        run(play(Path(home), stage, story))


@given(st.lists(st.sampled_from(["load", "unload", "write"]), min_size=2, max_size=8))
@bounded(max_examples=many(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_orders_that_come_together_end_as_if_they_had_come_in_turn(orders: list[str]) -> None:
    stage = Stage()

    async def story(home: Path) -> None:
        model(home, v1=1.0)
        async with Engine(home) as engine:
            tasks = []
            for number, order in enumerate(orders):
                if order == "write":
                    weights(home, "m", 1, 100.0 + number)
                else:
                    asked = engine.load("m") if order == "load" else engine.unload("m")
                    tasks.append(asyncio.ensure_future(asked))
                    await asyncio.sleep(0)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:  # what was written while a load was under way, or unloaded, fails it
                reason = getattr(result, "reason", "")
                assert result is None or reason in ("changed-while-loading", "unloading")
            last = [order for order in orders if order != "write"][-1:]
            loaded = bool(states(engine).get("1", "").startswith("READY"))
            if last == ["unload"]:
                assert not loaded
            elif last == ["load"] and results[-1] is None:
                assert loaded
            await until(lambda: len(stage.open) == loaded)

    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr("carpool.backends.load", stage.load)
        run(story(Path(home)))
