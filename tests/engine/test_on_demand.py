"""More models than memory: loaded when they are asked for, and freed for others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic

import pytest

from carpool.engine.engine import Engine
from carpool.engine.fleet.on_demand import OnDemand, free_memory, held_memory
from carpool.engine.loading.loading import Loading
from carpool.engine.profile.run_memory import RunMemory
from carpool.errors import ConfigError, InvalidInput, ModelError, NotFound, Unavailable
from carpool.link.catalog import ON_DEMAND
from engine.scripted import Stage, ask, model, run, scripted_stage, states, weights
from waiting import until_in_loop as until

__all__ = ["scripted_stage"]


class Memory:
    """As if each model that is loaded took a gigabyte; the clock stands still unless it is moved."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._began = monotonic()
        self.now = 0.0

    def time(self) -> float:
        """Returns the time as the counters have it, moved."""
        return self._began + self.now

    def used(self) -> int:
        return len(self._stage.open) * 10**9


async def started(folder: Path, stage: Stage, gigabytes: float = 2.5) -> tuple[Engine, Memory]:
    engine, memory = Engine(folder, on_demand=True), Memory(stage)
    engine.on_demand = OnDemand(engine.control, engine.fleet, gigabytes, now=memory.time, used=memory.used)
    await engine.start(patient=True)
    return engine, memory


def loaded(engine: Engine) -> list[str]:
    return sorted(served.name for served in engine.served.values())


def three(folder: Path) -> None:
    for number, name in enumerate("abc"):
        model(folder, name, v1=float(number))


def test_a_model_is_loaded_when_it_is_asked_for(tmp_path: Path, stage: Stage) -> None:
    three(tmp_path)

    async def story() -> None:
        engine, _ = await started(tmp_path, stage)
        assert stage.loads == []
        assert states(engine, "b") == {"": f"UNAVAILABLE: {ON_DEMAND}"}
        answers = await asyncio.gather(*(ask(engine, "b") for _ in range(3)))
        assert answers == [1.0] * 3
        assert stage.loads == [("b", 1.0)], "once for all who asked"
        assert states(engine, "b") == {"1": "READY"}
        with pytest.raises(NotFound):
            await ask(engine, "x")
        await engine.stop()

    run(story())


def test_the_least_lately_asked_makes_room_once_it_has_stayed(tmp_path: Path, stage: Stage) -> None:
    three(tmp_path)

    async def story() -> None:
        engine, memory = await started(tmp_path, stage)
        await ask(engine, "a")
        await ask(engine, "b")
        await ask(engine, "a")  # so that b is the one
        await asyncio.sleep(0)
        engine.on_demand._known["c"].bytes = 10**9  # type: ignore[union-attr] - as if it had been loaded before
        with pytest.raises(Unavailable, match="no room for c") as refused:
            await ask(engine, "c")
        assert refused.value.reason == "no-room"
        assert refused.value.retry_after_s == pytest.approx(10.0)
        assert loaded(engine) == ["a", "b"]
        memory.now = 11.0
        assert await ask(engine, "c") == 2.0
        assert loaded(engine) == ["a", "c"]
        assert states(engine, "b") == {"1": f"UNAVAILABLE: {ON_DEMAND}"}
        memory.now = 22.0
        assert await ask(engine, "b") == 1.0, "and is loaded again"
        assert loaded(engine) == ["b", "c"]
        await engine.stop()

    run(story())


def test_one_in_use_stays_for_a_while_longer(tmp_path: Path, stage: Stage) -> None:
    three(tmp_path)

    async def story() -> None:
        engine, memory = await started(tmp_path, stage, 1.5)
        await ask(engine, "a")
        engine.on_demand._known["b"].bytes = 10**9  # type: ignore[union-attr]
        for now, wait in ((30.0, 4.7), (58.0, 2.0)):  # it is asked all the time, and has stayed for long
            memory.now = now
            engine.find("a").counters.last_used = memory.time() - 0.3
            with pytest.raises(Unavailable, match="no room for b") as refused:
                await ask(engine, "b")
            assert refused.value.retry_after_s == pytest.approx(wait, abs=0.01)
        memory.now = 60.0
        engine.find("a").counters.last_used = memory.time() - 0.3
        assert await ask(engine, "b") == 1.0
        assert loaded(engine) == ["b"]
        await engine.stop()

    run(story())


def test_one_that_takes_more_than_was_thought_pushes_others_out(tmp_path: Path, stage: Stage) -> None:
    three(tmp_path)

    async def story() -> None:
        engine, memory = await started(tmp_path, stage)
        for name, there in (("a", ["a"]), ("b", ["a", "b"]), ("c", ["b", "c"])):
            await ask(engine, name)
            assert loaded(engine) == there
        with pytest.raises(Unavailable, match="no room for a") as refused:  # what it takes is known now
            await ask(engine, "a")
        assert refused.value.retry_after_s == pytest.approx(10.0)
        memory.now = 10.0
        await ask(engine, "a")
        assert loaded(engine) == ["a", "c"]
        await engine.stop()

    run(story())


def test_who_has_riders_is_not_freed(tmp_path: Path, stage: Stage) -> None:
    three(tmp_path)

    async def story() -> None:
        engine, memory = await started(tmp_path, stage, 1.5)
        rider = asyncio.create_task(ask(engine, "a", x=1.0))
        await until(lambda: "a" in loaded(engine) and not engine.find("a").runtime.driver.idle)
        memory.now = 100.0
        engine.on_demand._known["b"].bytes = 10**9  # type: ignore[union-attr]
        with pytest.raises(Unavailable, match="no room for b"):
            await ask(engine, "b")
        assert not rider.done()
        stage.riding.set()
        assert await rider == 0.0
        assert await ask(engine, "b") == 1.0
        assert loaded(engine) == ["b"]
        await engine.stop()

    run(story())


def test_what_does_not_load_is_tried_again_later_and_later(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "a", v1=1.0)
    weights(tmp_path, "a", 1, "broken")

    async def story() -> None:
        engine, memory = await started(tmp_path, stage)
        for wait in (10.0, 20.0):
            with pytest.raises(Unavailable, match="broken weights") as refused:
                await ask(engine, "a")
            assert refused.value.retry_after_s == pytest.approx(wait)
            memory.now += wait - 1
            weights(tmp_path, "a", 1, 3.0)
            with pytest.raises(Unavailable, match="broken weights") as refused:
                await ask(engine, "a")
            assert refused.value.retry_after_s == pytest.approx(1.0)
            assert "broken weights" in "".join(states(engine, "a").values())
            weights(tmp_path, "a", 1, "broken")
            memory.now += 1
        weights(tmp_path, "a", 1, 3.0)
        assert await ask(engine, "a") == 3.0
        await engine.stop()

    run(story())


def test_a_model_that_can_never_fit_is_refused_with_the_setting(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "a", v1=1.0)

    async def story() -> None:
        engine, _ = await started(tmp_path, stage, 0.5)
        engine.on_demand._known["a"].bytes = 10**9  # type: ignore[union-attr]
        with pytest.raises(InvalidInput, match="--memory-gb"):
            await ask(engine, "a")
        await engine.stop()

    run(story())


def test_a_device_that_is_full_makes_its_models_go(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(tmp_path)
    monkeypatch.setattr("carpool.engine.fleet.on_demand._is_on_device", lambda config: config.name != "b")

    async def story() -> None:
        engine, memory = await started(tmp_path, stage, 100.0)
        await ask(engine, "b")
        await ask(engine, "a")
        memory.now = 100.0
        real, tries = engine.control.load, []

        async def load(name: str) -> None:
            tries.append(name)
            if "a" in loaded(engine):
                raise ModelError("the device is full", reason="device-memory")
            await real(name)

        monkeypatch.setattr(engine.control, "load", load)
        assert await ask(engine, "c") == 2.0
        assert tries == ["c", "c"]
        assert loaded(engine) == ["b", "c"]
        await engine.stop()

    run(story())


def test_mistakes_in_settings_are_told_at_the_start(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, "a", v1=1.0)
    model(tmp_path, "b", v1=1.0)
    (tmp_path / "b" / "model.toml").write_text("nonsense = 1")

    async def story() -> None:
        engine, _ = await started(tmp_path, stage)
        assert "nonsense" in states(engine, "b")[""]
        assert await ask(engine, "a") == 1.0
        with pytest.raises(Unavailable, match="nonsense"):
            await ask(engine, "b")
        await engine.stop()
        with pytest.raises(ConfigError, match="nonsense"):
            await Engine(tmp_path, on_demand=True).start()

    run(story())


def test_memory_is_read_from_the_kernel() -> None:
    before = held_memory()
    kept = bytearray(b"\1" * (64 << 20))
    assert held_memory() - before > 32 << 20
    assert len(kept) < free_memory() < 1 << 50


def test_what_batches_take_counts_beside_the_weights(
    tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(tmp_path)
    monkeypatch.setattr(Loading, "_memory", lambda *_: RunMemory(0, 5 * 10**8))

    async def story() -> None:
        engine, memory = await started(tmp_path, stage, gigabytes=2.5)
        await ask(engine, "a")
        memory.now += 100.0
        await ask(engine, "b")  # 1.5 GB each: with both loaded, nothing would be left for their batches
        assert loaded(engine) == ["b"]
        await engine.stop()

    run(story())
