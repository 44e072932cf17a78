"""Models that come, change and go while they serve."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from absent import needs
from carpool.engine.engine import Engine
from carpool.engine.fleet.fleet import Publisher
from carpool.errors import (
    CarpoolError,
    ConfigError,
    InvalidInput,
    ModelError,
    NotFound,
    Unavailable,
)
from carpool.link.catalog import LoadingStep
from carpool.observe.prometheus import Exposition
from engine.scripted import (
    PATIENCE_S,
    Stage,
    ask,
    model,
    run,
    scripted_stage,
    settings,
    states,
    weights,
)
from waiting import until_in_loop as until

__all__ = ["scripted_stage"]


async def riding(engine: Engine, version: str = "") -> asyncio.Task[float]:
    """A request that rides until `stage.riding` is set."""
    driver = engine.find("m", version).runtime.driver
    rider = asyncio.create_task(ask(engine, version=version, x=1.0))
    await until(lambda: not driver.idle and not driver.scheduler.lanes.requests)
    return rider


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Stream:
    """Requests without a pause, one after the other, and what they were answered."""

    def __init__(self, engine: Engine, **asked: Any) -> None:
        self.answers: list[float] = []
        self._engine = engine
        self._asked = asked
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            self.answers.append(await ask(self._engine, **self._asked))

    async def more(self, count: int = 5) -> None:
        target = len(self.answers) + count
        await until(lambda: len(self.answers) >= target or self._task.done())
        assert not self._task.done(), self._task.exception()

    async def stop(self) -> None:
        await self.more()
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task


# ---- replacing


def test_the_old_one_serves_until_the_new_one_is_warm(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            stream = Stream(engine)
            await stream.more()
            weights(tmp_path, "m", 1, 2.0)
            stage.hold_loads()
            loading = asyncio.ensure_future(engine.load("m"))
            await until(lambda: stage.waiting)
            await stream.more()
            assert set(stream.answers) == {1.0}
            assert states(engine) == {"1": "READY"}
            stage.loading.set()
            await loading
            before = len(stream.answers)
            await stream.more()
            assert set(stream.answers[before + 1 :]) == {2.0}  # one may have been under way
            await stream.stop()
            await until(lambda: stage.open == [2.0])

    run(story())
    assert stage.open == []


def test_nothing_fails_while_a_model_is_loaded_again_and_again(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=0.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            streams = [Stream(engine) for _ in range(4)]
            for value in range(1, 20):
                weights(tmp_path, "m", 1, value)
                await engine.load("m")
            for stream in streams:
                await stream.stop()
                assert stream.answers == sorted(stream.answers)
                assert stream.answers[-1] == 19.0
            await until(lambda: stage.open == [19.0])

    run(story())


def test_the_old_one_is_freed_when_its_last_rider_has_left(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            rider = await riding(engine)
            waiting = asyncio.ensure_future(ask(engine))
            await asyncio.sleep(0)
            weights(tmp_path, "m", 1, 2.0)
            await engine.load("m")
            assert await ask(engine) == 2.0
            assert stage.open == [1.0, 2.0]
            assert list(engine.fleet.leaving) == [1]
            stage.riding.set()
            assert await rider == 1.0
            assert await waiting == 1.0
            await until(lambda: not engine.fleet.leaving)
            assert stage.open == [2.0]

    run(story())


def test_a_batch_that_outlives_the_engine_frees_its_model_and_raises_nothing(
    tmp_path: Path, stage: Stage
) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start()
        rider = await riding(engine)
        await engine.stop(0.0)
        with pytest.raises(Unavailable):
            await rider

    run(story())
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "m-instance")
    assert stage.open == [1.0]
    stage.riding.set()  # it reports to a loop that has ended
    thread.join(PATIENCE_S)
    assert stage.open == []


def test_what_leaves_is_kept_until_everybody_who_sends_knows(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        known = asyncio.Event()

        class Slow(Publisher):
            async def everyone_saw(self) -> None:
                await known.wait()

        async with Engine(tmp_path, publisher=Slow()) as engine:
            weights(tmp_path, "m", 1, 2.0)
            await engine.load("m")
            await some_turns()
            (old,) = engine.fleet.leaving.values()
            assert not stage.backends[0].closed
            assert old.runtime.driver.idle
            known.set()
            await until(lambda: stage.open == [2.0])

    run(story())


def test_an_instance_that_dies_while_its_model_leaves_is_replaced(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, v2=2.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            rider = await riding(engine, version="1")
            batch = [asyncio.ensure_future(ask(engine, version="1", x=13.0)) for _ in range(4)]
            after = asyncio.ensure_future(ask(engine, version="1"))
            await asyncio.sleep(0)
            settings(tmp_path, policy="[2]")
            await engine.load("m")
            stage.riding.set()
            assert await rider == 1.0
            for killer in batch:
                with pytest.raises(ModelError, match="died"):
                    await killer
            assert await after == 1.0
            await until(lambda: stage.open == [2.0])

    run(story())


# ---- versions


def test_versions_come_and_go_and_the_others_are_not_touched(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, v2=2.0, v3=3.0, policy="{ latest = 1 }")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            assert states(engine) == {"3": "READY"}
            third = engine.find("m")
            settings(tmp_path, policy='"all"')
            await engine.load("m")
            assert states(engine) == {"1": "READY", "2": "READY", "3": "READY"}
            assert [await ask(engine, version=v) for v in ("1", "2", "3", "")] == [1.0, 2.0, 3.0, 3.0]
            settings(tmp_path, policy="[1, 2]")
            await engine.load("m")
            assert await ask(engine) == 2.0
            with pytest.raises(NotFound, match="version 3"):
                await ask(engine, version="3")
            await until(lambda: states(engine)["3"] == "UNAVAILABLE: unloaded")
            assert third.state == "UNAVAILABLE"
            weights(tmp_path, "m", 4, 4.0)
            settings(tmp_path, policy="{ latest = 3 }")
            await engine.load("m")
            assert await ask(engine) == 4.0
            assert sorted(stage.loads) == [("m", 1.0), ("m", 2.0), ("m", 3.0), ("m", 3.0), ("m", 4.0)]
            await until(lambda: stage.open == [2.0, 3.0, 4.0])
            assert {str(served.config.versions) for served in engine.served.values()} == {
                "LatestVersions(count=3)"
            }

    run(story())


@needs("cache")
def test_only_the_version_whose_files_changed_is_loaded_again(tmp_path: Path, stage: Stage) -> None:
    folder = model(tmp_path, v1=1.0, v2=2.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 10.0)
            await engine.load("m")
            assert stage.loads == [("m", 1.0), ("m", 2.0), ("m", 10.0)]
            os.utime(folder / "model.toml")  # touched, but it says the same
            await engine.load("m")
            assert len(stage.loads) == 3
            (folder / "labels.txt").write_text("cat")  # for all versions
            await engine.load("m")
            assert len(stage.loads) == 5
            settings(tmp_path, head="device_weight = 2.0")
            await engine.load("m")
            assert len(stage.loads) == 7
            assert [await ask(engine, version=v) for v in ("1", "2")] == [10.0, 2.0]

    run(story())


def test_all_versions_change_at_once(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, v2=2.0)

    async def story() -> None:
        seen: list[list[float]] = []  # which of the instances serve, at every change

        class Looks(Publisher):
            def publish(self) -> None:
                executors = [s.runtime.driver._executors[0] for s in engine.served.values()]
                seen.append(sorted(executor._backend.value for executor in executors))  # type: ignore[attr-defined]

        engine = Engine(tmp_path, publisher=Looks())
        async with engine:
            seen.clear()
            weights(tmp_path, "m", 1, 10.0)
            weights(tmp_path, "m", 2, 20.0)
            await engine.load("m")
            assert set(map(tuple, seen)) == {(1.0, 2.0), (10.0, 20.0)}

    run(story())


# ---- what goes wrong


def test_a_load_that_fails_leaves_what_served(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, policy="{ latest = 1 }")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, "broken")
            with pytest.raises(ModelError, match="broken weights"):
                await engine.load("m")
            assert await ask(engine) == 1.0
            assert states(engine) == {"1": "READY: m: broken weights"}
            weights(tmp_path, "m", 2, "broken")
            with pytest.raises(ModelError):
                await engine.load("m")
            assert states(engine) == {"1": "READY", "2": "UNAVAILABLE: m: broken weights"}
            (tmp_path / "m" / "model.toml").write_text("sloms = 5")
            with pytest.raises(ConfigError, match="slo_ms"):
                await engine.load("m")
            assert "slo_ms" in states(engine)["1"]
            assert await ask(engine) == 1.0
            settings(tmp_path, policy="{ latest = 1 }")
            weights(tmp_path, "m", 2, 2.0)
            await engine.load("m")
            assert await ask(engine) == 2.0
            assert states(engine)["2"] == "READY"

    run(story())


def test_of_several_versions_all_are_replaced_or_none(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, v2=2.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 10.0)
            weights(tmp_path, "m", 2, "broken")
            with pytest.raises(ModelError):
                await engine.load("m")
            assert [await ask(engine, version=v) for v in ("1", "2")] == [1.0, 2.0]
            assert stage.open == [1.0, 2.0]

    run(story())


@pytest.mark.parametrize("how", ["weights", "settings", "vanished", "folder"])
def test_files_that_change_while_they_are_loaded_are_an_error(tmp_path: Path, stage: Stage, how: str) -> None:
    folder = model(tmp_path, v1=1.0)

    def change() -> None:
        if how == "weights":
            weights(tmp_path, "m", 1, 3.0)
        elif how == "settings":
            settings(tmp_path, policy="[1]")
        elif how == "vanished":
            (folder / "1" / "weights").unlink()
        else:
            shutil.move(folder, tmp_path.parent / f"{tmp_path.name}-old")
            model(tmp_path, v1=4.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 2.0)
            stage.hold_loads()
            loading = asyncio.ensure_future(engine.load("m"))
            await until(lambda: stage.waiting)
            change()
            stage.loading.set()
            with pytest.raises(
                Unavailable, match="changed while it was being loaded; load it again"
            ) as caught:
                await loading
            assert caught.value.reason == "changed-while-loading"
            assert await ask(engine) == 1.0
            assert "changed while" in states(engine)["1"]
            assert stage.open == [1.0]
            weights(tmp_path, "m", 1, 5.0)
            await engine.load("m")
            assert await ask(engine) == 5.0

    run(story())


def test_a_bug_in_a_backend_is_an_error_and_no_more(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path, v1=1.0)

    def explode(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of all things")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 2.0)
            monkeypatch.setattr("carpool.backends.load", explode)
            with pytest.raises(CarpoolError, match="ZeroDivisionError: of all things"):
                await engine.load("m")
            assert await ask(engine) == 1.0
            monkeypatch.setattr("carpool.backends.load", stage.load)
            await engine.load("m")
            assert await ask(engine) == 2.0

    run(story())


# ---- unloading


def test_an_unloaded_model_is_not_found_and_is_freed_by_its_last_rider(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    model(tmp_path, "other", v1=5.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            rider = await riding(engine)
            await engine.unload("m")
            with pytest.raises(NotFound):
                await ask(engine)
            assert states(engine) == {"1": "UNLOADING"}
            assert stage.open == [1.0, 5.0]
            stage.riding.set()
            assert await rider == 1.0
            await until(lambda: states(engine) == {"1": "UNAVAILABLE: unloaded"})
            assert stage.open == [5.0]
            with pytest.raises(NotFound):
                await ask(engine)
            assert await ask(engine, "other") == 5.0
            await engine.unload("m")  # it is not loaded, which is what was asked for
            await engine.load("m")
            assert await ask(engine) == 1.0

    run(story())


def test_an_unknown_model_cannot_be_loaded_and_need_not_be_unloaded(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(NotFound, match="no model 'n'; there are m"):
                await engine.load("n")
            await engine.unload("n")  # as in Triton
            model(tmp_path, "n", v1=7.0)  # it came after the start
            await engine.load("n")
            assert await ask(engine, "n") == 7.0

    run(story())


def test_counters_go_on_over_a_reload_and_end_with_the_model(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:

            def counted() -> list[str]:
                page = Exposition(engine.table, version="test").page().decode()
                return [line for line in page.splitlines() if line.startswith("nv_inference_count{")]

            await ask(engine)
            weights(tmp_path, "m", 1, 2.0)
            await engine.load("m")
            await ask(engine)
            await until(lambda: not engine.fleet.leaving)
            assert counted() == ['nv_inference_count{model="m",version="1"} 2']
            assert engine.find("m").counters.batches.document()[0]["compute_infer"]["count"] == 2
            await engine.unload("m")
            await until(lambda: not engine.fleet.leaving)
            assert counted() == []

    run(story())


# ---- the order of things


def test_models_are_loaded_side_by_side_and_each_serves_as_soon_as_it_can(
    tmp_path: Path, stage: Stage
) -> None:
    model(tmp_path, "quick", v1=1.0)
    model(tmp_path, "slow", v1=2.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "slow", 1, 3.0)
            stage.hold_loads()
            slow = asyncio.ensure_future(engine.load("slow"))
            await until(lambda: stage.waiting == ["slow"])
            weights(tmp_path, "quick", 1, 4.0)
            quick = asyncio.ensure_future(engine.load("quick"))
            await until(lambda: stage.waiting == ["slow", "quick"])
            stage.loading.set()
            await asyncio.gather(slow, quick)
            assert [await ask(engine, name) for name in ("slow", "quick")] == [3.0, 4.0]

    run(story())


def test_at_the_start_what_is_wrong_is_told_before_anything_is_loaded(tmp_path: Path, stage: Stage) -> None:
    for name in ("a", "b", "c"):
        model(tmp_path, name, v1=1.0)
    (tmp_path / "b" / "model.toml").write_text('backend = "fake"\nlabels = "none.txt"\n')
    settings(tmp_path, "c", head='task = "classify"')  # which its tensors cannot be
    told: list[LoadingStep] = []

    async def story() -> None:
        stage.hold_loads()
        engine = Engine(tmp_path)
        starting = asyncio.ensure_future(engine.start(told.append, patient=True))
        await until(lambda: stage.waiting == ["a"])
        assert states(engine, "a") == {"1": "LOADING"}
        assert "none.txt" in states(engine, "b")[""]
        assert states(engine, "c")["1"].startswith("UNAVAILABLE: ")
        stage.loading.set()
        assert sorted(await starting) == ["b", "c"]
        assert await ask(engine, "a") == 1.0
        await engine.stop()

    run(story())
    assert str(told[-1]) == "loading 3 of 3: a, measuring batches of 4"


def test_a_load_that_has_not_begun_is_shared_and_one_under_way_is_followed(
    tmp_path: Path, stage: Stage
) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 2.0)
            stage.hold_loads()
            first = asyncio.ensure_future(engine.load("m"))
            await until(lambda: stage.waiting)
            later = [asyncio.ensure_future(engine.load("m")) for _ in range(5)]
            await asyncio.sleep(0)
            stage.loading.set()
            await first
            weights(tmp_path, "m", 1, 3.0)
            await asyncio.gather(*later)
            assert await ask(engine) in (2.0, 3.0)
            assert len(stage.loads) <= 3

    run(story())


def test_unloading_does_not_wait_for_a_load(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    model(tmp_path, "slow", v1=2.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "slow", 1, 3.0)
            stage.hold_loads()
            loading = asyncio.ensure_future(engine.load("slow"))
            await until(lambda: stage.waiting)
            await engine.unload("m")
            assert not loading.done()
            await engine.unload("slow")  # nor for its own, which is given up
            with pytest.raises(Unavailable, match="unloaded before"):
                await loading
            stage.loading.set()
            await until(lambda: stage.open == [])

    run(story())


def test_a_caller_that_leaves_does_not_stop_the_load(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 2.0)
            stage.hold_loads()
            loading = asyncio.ensure_future(engine.load("m"))
            await until(lambda: stage.waiting)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            stage.loading.set()
            await until(lambda: stage.open == [2.0])
            assert await ask(engine) == 2.0

    run(story())


def test_unloading_and_a_server_that_stops_soon_give_up_a_load(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start()

        async def stop_soon() -> None:
            engine.control.give_up_loads()

        for end, why in ((lambda: engine.unload("m"), "unloaded before"), (stop_soon, "stopping")):
            weights(tmp_path, "m", 1, 2.0)
            stage.hold_loads()
            loading = asyncio.ensure_future(engine.load("m"))
            await until(lambda: stage.waiting)
            await end()  # although the load never ends
            with pytest.raises(Unavailable, match=why):
                await loading
            stage.loading.set()
            stage.waiting.clear()
        with pytest.raises(Unavailable, match="stopping"):
            await engine.load("m")
        await engine.stop()

    run(story())


def test_stopping_gives_up_a_load_and_leaves_nothing_behind(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start()
        weights(tmp_path, "m", 1, 2.0)
        stage.hold_loads()
        loading = asyncio.ensure_future(engine.load("m"))
        await until(lambda: stage.waiting)
        await engine.stop()
        with pytest.raises(Unavailable, match="stopping"):
            await loading
        with pytest.raises(Unavailable, match="stopping"):
            await engine.load("m")
        stage.loading.set()
        await until(lambda: len(stage.backends) == 2 and stage.open == [])

    run(story())


# ---- the start


def test_only_the_models_asked_for_are_loaded_at_the_start(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    model(tmp_path, "broken", v1=0.0)
    (tmp_path / "broken" / "model.toml").write_text("sloms = 1")

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start(only=["m"])
        assert states(engine, "m") == {"1": "READY"}
        assert states(engine, "broken") == {"": ""}  # found, and nobody has looked into it
        with pytest.raises(ConfigError, match="slo_ms"):
            await engine.load("broken")
        assert states(engine, "broken")[""].startswith("UNAVAILABLE: ")
        with pytest.raises(Unavailable, match="slo_ms"):
            await ask(engine, "broken")
        await engine.stop()
        with pytest.raises(ConfigError, match='no model "n"; valid here: broken, m'):
            await Engine(tmp_path).start(only=["n"])
        with pytest.raises(ConfigError, match="slo_ms"):
            await Engine(tmp_path).start()

    run(story())


def test_a_patient_start_takes_what_it_can_get(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    model(tmp_path, "broken", v1=0.0)
    weights(tmp_path, "broken", 1, "broken")

    async def story() -> None:
        engine = Engine(tmp_path)
        failed = await engine.start(only=["broken", "m"], patient=True)
        assert list(failed) == ["broken"]
        assert await ask(engine) == 1.0
        assert "broken weights" in states(engine, "broken")["1"]
        await engine.stop()

    run(story())


def test_an_empty_repository_is_a_mistake_only_where_nothing_can_come(tmp_path: Path, stage: Stage) -> None:
    async def story() -> None:
        with pytest.raises(ConfigError, match="no models"):
            await Engine(tmp_path).start()
        engine = Engine(tmp_path)
        await engine.start(some=False)
        assert engine.index() == []
        await engine.stop()

    run(story())


# ---- following folders


def test_looking_loads_what_is_new_or_changed_and_unloads_what_is_gone(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, policy="{ latest = 1 }")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            look = engine.control.look
            await look()
            assert len(stage.loads) == 1
            weights(tmp_path, "m", 2, 2.0)
            await look()
            assert await ask(engine) == 2.0
            shutil.rmtree(tmp_path / "m" / "2")
            await look()
            assert await ask(engine) == 1.0
            model(tmp_path, "n", v1=3.0)
            await look()
            assert await ask(engine, "n") == 3.0
            shutil.move(tmp_path / "n", tmp_path.parent / f"{tmp_path.name}-n")
            await look()
            assert await ask(engine, "n") == 3.0  # its folder may just be on its way
            await look()
            with pytest.raises(NotFound):
                await ask(engine, "n")
            await until(lambda: stage.open == [1.0])
            await look()
            assert states(engine, "n") == {}

    run(story())


def test_what_does_not_load_is_tried_again_only_when_it_changed(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            look = engine.control.look
            weights(tmp_path, "m", 1, "broken")
            await look()
            assert await ask(engine) == 1.0
            assert "broken" in states(engine)["1"]
            stage.hold_loads()
            await look()  # would wait for ever if it tried
            stage.loading.set()
            weights(tmp_path, "m", 1, 2.0)
            await look()
            assert await ask(engine) == 2.0
            assert states(engine) == {"1": "READY"}

    run(story())


def test_files_that_changed_while_they_were_loaded_are_loaded_at_the_next_look(
    tmp_path: Path, stage: Stage
) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            weights(tmp_path, "m", 1, 2.0)
            stage.hold_loads()
            looking = asyncio.ensure_future(engine.control.look())
            await until(lambda: stage.waiting)
            weights(tmp_path, "m", 1, 3.0)
            stage.loading.set()
            await looking
            assert await ask(engine) == 1.0
            await engine.control.look()
            assert await ask(engine) == 3.0

    run(story())


def test_a_repository_that_cannot_be_read_changes_nothing(tmp_path: Path, stage: Stage) -> None:
    home = tmp_path / "models"
    model(home, v1=1.0)

    async def story() -> None:
        async with Engine(home) as engine:
            home.rename(tmp_path / "away")
            for _ in range(3):
                with pytest.raises(ConfigError, match="no such file or folder"):
                    await engine.control.look()
            assert await ask(engine) == 1.0

    run(story())


def test_two_models_of_one_name_are_told_of_and_the_first_goes_on(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path / "a", v1=1.0)
    (tmp_path / "b").mkdir()

    async def story() -> None:
        engine = Engine(tmp_path / "a", tmp_path / "b")
        await engine.start(some=False)
        model(tmp_path / "b", v1=2.0)
        weights(tmp_path / "a", "m", 1, 3.0)
        with pytest.raises(ConfigError, match="two models are called"):
            await engine.load("m")
        assert await ask(engine) == 1.0
        shutil.rmtree(tmp_path / "b" / "m")
        await engine.load("m")
        assert await ask(engine) == 3.0
        await engine.stop()

    run(story())


# ---- settings and files that come with the request

CONFIG = """{
    "backend": "fake", "max_batch_size": 2,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]
}"""


def test_an_override_lasts_until_the_files_change(tmp_path: Path, stage: Stage) -> None:
    """As in Triton, and no longer than the model is loaded."""
    model(tmp_path, v1=1.0, v2=2.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.load("m", config=CONFIG)
            assert engine.find("m").signature.max_batch == 2
            assert sorted(s.version for s in engine.served.values()) == ["2"]  # latest, as Triton has it
            with pytest.raises(ConfigError, match="max_batch_sice"):
                await engine.load("m", config='{"max_batch_sice": 2}')
            with pytest.raises(ConfigError, match='"other" is not the model to be loaded'):
                await engine.load("m", config='{"name": "other"}')
            assert engine.find("m").signature.max_batch == 2
            await engine.load("m")
            assert engine.find("m").signature.max_batch == 2
            assert sorted(s.version for s in engine.served.values()) == ["2"]
            touch_settings(tmp_path)
            await engine.load("m")
            assert engine.find("m").signature.max_batch == 4
            assert sorted(s.version for s in engine.served.values()) == ["1", "2"]
            await engine.load("m")
            assert engine.find("m").signature.max_batch == 4

    run(story())


def touch_settings(folder: Path) -> None:
    path = folder / "m" / "model.toml"
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now + 10**9, now + 10**9))


def test_an_override_goes_when_the_model_is_unloaded(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.load("m", config=CONFIG)
            await engine.unload("m")
            await engine.load("m")
            assert engine.find("m").signature.max_batch == 4

    run(story())


def test_an_override_that_fails_leaves_the_one_before_it(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.load("m", config=CONFIG)
            with pytest.raises(ConfigError):
                await engine.load("m", config='{"max_batch_size": -3}')
            await engine.load("m")
            assert engine.find("m").signature.max_batch == 2

    run(story())


def test_a_promise_of_the_command_line_holds_for_overrides_too(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)

    async def story() -> None:
        async with Engine(tmp_path, slo_ms=500) as engine:
            await engine.load("m", config=CONFIG)
            assert engine.find("m").config.mode == "promise"

    run(story())


def test_a_model_can_come_as_files_and_goes_with_them(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "models", v1=1.0)
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "private"))

    def folders() -> list[Path]:
        return list((tmp_path / "private").iterdir())

    async def story() -> None:
        async with Engine(tmp_path / "models") as engine:
            await engine.load("m", config=CONFIG, files={"7/weights": b"7"})
            assert await ask(engine, version="7") == 7.0
            assert (folders()[0].stat().st_mode & 0o777) == 0o700
            await engine.load("new", config=CONFIG, files={"1/weights": b"8"})  # in no repository at all
            assert await ask(engine, "new") == 8.0
            assert len(folders()) == 2
            with pytest.raises(InvalidInput, match="needs its settings too"):
                await engine.load("m", files={"1/weights": b"9"})
            with pytest.raises(ModelError):
                await engine.load("m", config=CONFIG, files={"1/weights": b"broken"})
            assert len(folders()) == 2
            await engine.load("m")
            assert await ask(engine) == 1.0
            await engine.unload("new")
            await until(lambda: not folders())

    run(story())
