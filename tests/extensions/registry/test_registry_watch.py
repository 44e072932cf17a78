"""Models that follow a registry: aliases move, are deleted, point to rubbish; the registry goes and comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from backends.onnx_models import arithmetic, identity
from carpool.config.repository import find_models
from carpool.config.server import ServerSettings
from carpool.config.toml import read_toml
from carpool.engine.engine import Engine
from carpool.errors import ConfigError
from carpool.extensions.registry.followed_model import Registries
from carpool.extensions.registry.registry_watch import MakeFollower, RegistryWatch
from carpool.extensions.registry.settings import RegistrySettings, registry_settings
from carpool.extensions.registry.source import Pin, RegistryDown
from carpool.observe.prometheus import Exposition
from extensions.registry.stand_in import StandIn, standing_in


class SwapAtOnce:
    """Loads what the stable address points to, which takes over as after a load by hand."""

    def __init__(self, watch: RegistryWatch) -> None:
        self._watch = watch

    async def moved(self, model: str, stable: Pin | None, candidate: Pin | None) -> None:
        if stable is not None:
            await self._watch.swap(model, stable.version)

    async def moved_back(self, model: str) -> None:
        """Nothing is ever begun and not finished."""


SETTINGS = '[registry]\nstable = "models:/detector@champion"\n'


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[StandIn]:
    with standing_in() as found:
        for version in (1, 2, 3):
            found.register(version, identity(tmp_path / f"{version}.onnx").read_bytes() + b"\x72\x00")
        found.versions[3]["model.onnx"] = b"this is no model"
        found.aliases["champion"] = 1
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "detector"
    made.mkdir(parents=True)
    (made / "model.toml").write_text(SETTINGS)
    return made


def prepared(mlflow: StandIn, folder: Path, cache: Path) -> None:
    _, [model], _ = Registries(mlflow.url, cache, {}).folders([folder])
    model.prepare()


class Running:
    """An engine and its watch, looked at by hand."""

    def __init__(self, engine: Engine, watch: RegistryWatch) -> None:
        self.engine = engine
        self.watch = watch

    async def look(self) -> None:
        [watched] = self.watch._watched.values()
        await self.watch.look(watched)

    @property
    def version(self) -> str:
        return self.engine.find("detector").version

    def metric(self, name: str) -> float | None:
        page = Exposition(self.engine.table, "0").page().decode()
        lines = [line for line in page.splitlines() if line.startswith(name)]  # also of versions that leave
        return max((float(line.rpartition(" ")[2]) for line in lines), default=None)


@asynccontextmanager
async def running(
    mlflow: StandIn, folder: Path, cache: Path, follower: MakeFollower = SwapAtOnce
) -> AsyncIterator[Running]:
    settings = ServerSettings(registry=mlflow.url, cache_dir=cache)
    async with Engine(folder.parent) as engine:
        watch = RegistryWatch(engine, settings, follower)
        await watch._find()
        yield Running(engine, watch)


Story = Callable[[Running], Awaitable[None]]


def play(mlflow: StandIn, folder: Path, story: Story, follower: MakeFollower = SwapAtOnce) -> None:
    async def whole() -> None:
        async with running(mlflow, folder, folder.parents[1] / "cache", follower) as found:
            await story(found)

    prepared(mlflow, folder, folder.parents[1] / "cache")
    asyncio.run(asyncio.wait_for(whole(), 120))


def test_an_alias_that_moves_is_followed_there_and_back(mlflow: StandIn, folder: Path) -> None:
    async def story(server: Running) -> None:
        assert server.version == "1"
        await server.look()
        assert server.version == "1"
        assert server.metric("carpool_registry_moves_total") == 0
        mlflow.aliases["champion"] = 2
        await server.look()
        assert server.version == "2"
        assert mlflow.tags[2]["carpool.state"] == "full"
        mlflow.aliases["champion"] = 1
        mlflow.asked.clear()
        await server.look()
        assert server.version == "1"
        assert not any("model.onnx" in path for path in mlflow.asked)
        assert server.metric("carpool_registry_moves_total") == 2
        assert server.metric("carpool_registry_up") == 1
        assert (server.metric("carpool_registry_age_seconds") or 99) < 60

    play(mlflow, folder, story)


def test_what_does_not_load_changes_nothing_and_is_not_tried_for_ever(mlflow: StandIn, folder: Path) -> None:
    async def story(server: Running) -> None:
        mlflow.aliases["champion"] = 3
        await server.look()
        assert server.version == "1"
        mlflow.asked.clear()
        await server.look()
        assert len(mlflow.asked) == 1
        assert server.version == "1"
        mlflow.aliases["champion"] = 2
        await server.look()
        assert server.version == "2"

    play(mlflow, folder, story)


def test_a_deleted_alias_and_a_registry_that_is_down_are_warnings(mlflow: StandIn, folder: Path) -> None:
    async def story(server: Running) -> None:
        del mlflow.aliases["champion"]
        await server.look()
        assert server.version == "1"
        assert server.metric("carpool_registry_up") == 1
        mlflow.instead = lambda _path: (500, {}, b"")
        waits = []
        for _ in range(10):
            await server.look()
            [watched] = server.watch._watched.values()
            waits.append(watched.due - asyncio.get_running_loop().time())
        assert server.metric("carpool_registry_up") == 0
        assert max(waits) <= 60 * 1.25
        assert waits[0] <= 1.25 < 40 < waits[-1]
        assert server.version == "1"
        mlflow.instead, mlflow.aliases["champion"] = (lambda _path: None), 2
        await server.look()
        assert server.version == "2"
        assert server.metric("carpool_registry_up") == 1

    play(mlflow, folder, story)


def test_a_version_that_is_being_registered_is_waited_for(mlflow: StandIn, folder: Path) -> None:
    async def story(server: Running) -> None:
        mlflow.aliases["champion"], mlflow.status[2] = 2, "PENDING_REGISTRATION"
        await server.look()
        assert server.version == "1"
        mlflow.status[2] = "READY"
        await server.look()
        assert server.version == "2"

    play(mlflow, folder, story)


class Notes:
    """A follower that only takes notes."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def moved(self, model: str, stable: Pin | None, candidate: Pin | None) -> None:
        self.told.append((model, *(None if pin is None else pin.version for pin in (stable, candidate))))

    async def moved_back(self, model: str) -> None:
        self.told.append(f"back {model}")


def test_who_rolls_out_hears_of_every_move_once(mlflow: StandIn, folder: Path) -> None:
    (folder / "model.toml").write_text(
        SETTINGS + 'candidate = "models:/detector@challenger"\nmove_alias = true\n'
    )

    notes = Notes()

    async def story(server: Running) -> None:
        await server.look()
        assert notes.told == []  # there is no challenger: a warning, no more
        mlflow.aliases["challenger"] = 2
        await server.look()
        await server.look()
        assert notes.told == [("detector", None, 2)]
        assert (folder / "2" / "model.onnx").is_file()
        mlflow.aliases["challenger"] = 1
        await server.look()
        assert notes.told[1:] == ["back detector"]
        mlflow.aliases["challenger"] = 2
        await server.look()
        mlflow.register(4, mlflow.versions[1]["model.onnx"])
        mlflow.aliases["challenger"] = 4
        await server.look()
        assert notes.told[2:] == [("detector", None, 2), ("detector", None, 4)]
        assert server.version == "1"
        del mlflow.aliases["challenger"]  # nothing else happens
        await server.look()
        assert len(notes.told) == 4
        await server.watch.adopt("detector", (1, 4), state="canary", rollout="r-1")
        assert mlflow.tags == {1: {"carpool.state": "canary", "carpool.rollout": "r-1"}}
        await server.look()
        await server.watch.adopt("detector", (4,), state="full", rollout="r-1", instead_of=1)
        assert mlflow.tags[4] == {"carpool.state": "full", "carpool.rollout": "r-1"}
        assert mlflow.aliases["champion"] == 4  # since move_alias is on
        await server.look()
        assert len(notes.told) == 4

    play(mlflow, folder, story, lambda _watch: notes)


def test_a_model_of_which_nothing_had_come_is_loaded_when_the_registry_is_back(
    mlflow: StandIn, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "models" / "other" / "1").mkdir(parents=True)
    arithmetic(tmp_path / "models" / "other" / "1" / "model.onnx")
    with pytest.raises(ConfigError, match="models:/detector@champion was not fetched"):
        find_models([folder])

    async def whole() -> None:
        settings = ServerSettings(registry=mlflow.url, cache_dir=tmp_path / "cache")
        engine = Engine(folder.parent)
        failed = await engine.start(patient=True)
        try:
            assert list(failed) == ["detector"]
            watch = RegistryWatch(engine, settings, SwapAtOnce)
            await watch._find()
            await Running(engine, watch).look()
            assert engine.find("detector").version == "1"
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_a_start_without_the_registry_serves_what_was_there(folder: Path, tmp_path: Path) -> None:
    with standing_in() as mlflow:
        mlflow.register(1, identity(tmp_path / "1.onnx").read_bytes())
        mlflow.aliases["champion"] = 1
        prepared(mlflow, folder, tmp_path / "cache")
    with pytest.raises(RegistryDown):
        prepared(mlflow, folder, tmp_path / "cache")
    [source], _ = find_models([folder])
    assert [version.number for version in source.versions] == [1]


def test_a_move_while_nobody_looked_is_not_taken_over_at_the_start(mlflow: StandIn, folder: Path) -> None:
    """Whoever changes versions under load sees to it."""
    cache = folder.parents[1] / "cache"
    prepared(mlflow, folder, cache)
    mlflow.aliases["champion"] = 2

    async def story(server: Running) -> None:
        assert server.version == "1"
        await server.look()
        assert server.version == "2"

    play(mlflow, folder, story)


# ---- settings


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "registry.stable is needed"),
        ('stable = "models:/a"', "registry.stable must be like"),
        ('stable = "models:/a@b"\npoll_s = 0', "poll_s"),
        ('stable = "models:/a@b"\nallow_pickle = "yes"', "allow_pickle"),
        ('stable = "models:/a@b"\ncandidate = "models:/c@d"', "of the same model as stable: a and c"),
        ('stable = "models:/a@b"\npolls = 3', "did you mean"),
    ],
)
def test_what_is_wrong_with_the_table_is_named(tmp_path: Path, table: str, said: str) -> None:
    (tmp_path / "model.toml").write_text(f"[registry]\n{table}\n")
    with pytest.raises(ConfigError, match=said):
        read_toml(tmp_path / "model.toml")


def test_the_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(SETTINGS + "poll_s = 5\nmove_alias = true\nwrite_back = false\n")
    assert registry_settings(read_toml(tmp_path / "model.toml")) == RegistrySettings(
        "models:/detector@champion", "", 5.0, False, True, False
    )
    (tmp_path / "model.toml").write_text(f"versions = [1]\n{SETTINGS}")
    with pytest.raises(ConfigError, match="contradict"):
        read_toml(tmp_path / "model.toml")


def test_a_folder_state_that_somebody_edited_counts_as_unknown(mlflow: StandIn, folder: Path) -> None:
    cache = folder.parents[1] / "cache"
    for text in ("", "[]", "{", '{"serve": "1"}', '{"serve": [true, -1, "../1"], "stable": 3}'):
        (folder / ".registry.json").write_text(text)
        with pytest.raises(ConfigError):
            find_models([folder])
        prepared(mlflow, folder, cache)
        [source], _ = find_models([folder])
        assert [version.number for version in source.versions] == [1]
