"""A server that follows a registry: aliases move, rollouts begin and end, and the registry hears of it."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.onnx_models import identity
from carpool.extensions.registry.followed_model import Registries
from carpool.extensions.registry.registry_watch import RegistryWatch
from extensions.registry.stand_in import StandIn, standing_in
from frontend.whole_server import WholeServer, whole_server
from waiting import until

PATIENCE_S = 60.0
REGISTRY = (
    '[registry]\nstable = "models:/detector@champion"\ncandidate = "models:/detector@challenger"\n'
    "poll_s = 86400\n"  # the tests look by hand
)
HELD = "[rollout]\nshadow = 0\ncanary = [0.5]\ncanary_h = 24\nstandby_h = 24\n"
AT_ONCE = "[rollout]\nshadow = 0\ncanary = []\nstandby_h = 24\n"
ALL_THE_WAY = AT_ONCE.replace("standby_h = 24", "standby_h = 0")


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[StandIn]:
    with standing_in() as found:
        for version in (1, 2, 3):
            model = identity(tmp_path / f"{version}.onnx").read_bytes()
            found.register(version, model, **{"notes.txt": str(version).encode()})
        found.aliases["champion"] = 1
        yield found


@dataclass
class Followed:
    server: WholeServer
    mlflow: StandIn

    @property
    def watch(self) -> RegistryWatch:
        found = self.server.host.parts.needed("registry")
        assert isinstance(found, RegistryWatch)
        self.until(found.opened.is_set)
        return found

    def look(self) -> None:
        watch = self.watch
        [watched] = watch._watched.values()
        self.server.wait_for(watch.look(watched))

    def rollout(self, **sent: Any) -> dict[str, Any]:
        url = f"http://{self.server.url}/v2/models/detector/rollout"
        body = json.dumps(sent).encode() if sent else None
        with urllib.request.urlopen(url, body, timeout=PATIENCE_S) as answer:
            return dict(json.load(answer))

    def until(self, come_true: Callable[[], object], work: Callable[[], None] | None = None) -> None:
        until(come_true, lambda: (self.rollout(), self.mlflow.tags, self.mlflow.aliases), work=work)

    def comes_to(self, *states: str) -> dict[str, Any]:
        self.until(lambda: self.rollout()["state"] in states)
        return self.rollout()

    def tagged(self, version: int, state: str) -> None:
        self.until(lambda: self.mlflow.tags.get(version, {}).get("carpool.state") == state)

    @property
    def version(self) -> str:
        return str(self.server.host.engine.find("detector").version)


@contextlib.contextmanager
def following(mlflow: StandIn, tmp_path: Path, settings: str) -> Iterator[Followed]:
    folder = tmp_path / "models" / "detector"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.toml").write_text(settings)
    _, [model], _ = Registries(mlflow.url, tmp_path / "cache", {}).folders([folder])
    model.prepare()
    given = {"registry": mlflow.url, "cache_dir": tmp_path / "cache", "state_dir": tmp_path / "state"}
    with whole_server(folder.parent, allow_rollouts=True, **given) as server:
        yield Followed(server, mlflow)


def test_an_alias_that_moves_is_rolled_out_and_the_registry_hears_of_it(
    mlflow: StandIn, tmp_path: Path
) -> None:
    with following(mlflow, tmp_path, f"{REGISTRY}move_alias = true\n{HELD}") as one:
        mlflow.aliases["challenger"] = 2
        one.look()
        found = one.comes_to("canary")
        assert (found["stable"], found["candidate"], found["share"]) == ("1", "2", 0.5)
        assert one.version == "1"
        one.tagged(2, "canary")
        assert mlflow.tags[2]["carpool.rollout"].startswith("1 to 2, begun 20")
        one.until(  # numbers are told behind the tag
            lambda: (
                ("run2", "carpool.share", 0.5)
                in [(sent["run_id"], sent["key"], sent["value"]) for sent in mlflow.metrics]
            )
        )
        assert mlflow.aliases["champion"] == 1
        one.look()  # nothing is told twice
        one.rollout(action="promote")
        assert one.comes_to("standby")["candidate"] == "2"
        one.tagged(2, "standby")
        assert one.version == "2"
        one.until(lambda: mlflow.aliases["champion"] == 2)
        one.look()
        one.rollout(action="promote")
        one.comes_to("done")
        one.tagged(2, "done")
        one.tagged(1, "retired")
        one.look()
        assert [line["to"] for line in one.rollout()["history"]].count("loading") == 1
        assert one.version == "2"


def test_moved_back_is_rolled_back_and_moved_again_begins_anew(mlflow: StandIn, tmp_path: Path) -> None:
    with following(mlflow, tmp_path, REGISTRY + HELD) as one:
        mlflow.aliases["challenger"] = 2
        one.look()
        one.comes_to("canary")
        mlflow.aliases["challenger"] = 1
        one.look()
        found = one.comes_to("rolled-back")
        assert found["why"] == "the registry's addresses were moved back"
        one.tagged(2, "rolled-back")
        assert one.version == "1"
        mlflow.aliases["challenger"] = 2
        one.look()
        one.comes_to("canary")
        mlflow.aliases["challenger"] = 3
        one.look()
        found = one.comes_to("canary")
        assert (found["stable"], found["candidate"]) == ("1", "3")
        one.tagged(2, "rolled-back")
        one.tagged(3, "canary")
        assert mlflow.aliases["champion"] == 1


def test_what_was_judged_is_not_begun_again_after_a_restart(mlflow: StandIn, tmp_path: Path) -> None:
    mlflow.aliases["challenger"] = 2
    with following(mlflow, tmp_path, REGISTRY + HELD) as one:
        one.look()
        one.comes_to("canary")
    with following(mlflow, tmp_path, REGISTRY + HELD) as one:
        one.look()
        assert [line["to"] for line in one.comes_to("canary")["history"]].count("loading") == 1
        one.rollout(action="abort")
        one.tagged(2, "rolled-back")
        one.look()
    with following(mlflow, tmp_path, REGISTRY + HELD) as one:
        one.look()
        found = one.rollout()
        assert found["state"] == "rolled-back"
        assert [line["to"] for line in found["history"]].count("loading") == 1
        assert one.version == "1"


def test_a_registry_that_is_down_stops_no_rollout_and_hears_of_it_later(
    mlflow: StandIn, tmp_path: Path
) -> None:
    mlflow.aliases["challenger"] = 2
    with following(mlflow, tmp_path, f"{REGISTRY}move_alias = true\n{HELD}") as one:
        one.look()
        one.comes_to("canary")
        one.tagged(2, "canary")
        mlflow.instead = lambda _path: (500, {}, b"")
        one.rollout(action="promote")
        one.comes_to("standby")
        one.look()
        assert one.version == "2"
        [watched] = one.watch._watched.values()
        one.until(lambda: {"version 2", "alias"} <= watched.untold.keys())
        mlflow.instead = lambda _path: None
        one.until(lambda: mlflow.tags[2]["carpool.state"] == "standby", one.look)
        one.until(lambda: mlflow.aliases["champion"] == 2)
        one.look()
        assert one.version == "2"


def test_back_from_the_standby_takes_the_alias_along(mlflow: StandIn, tmp_path: Path) -> None:
    mlflow.aliases["challenger"] = 2
    with following(mlflow, tmp_path, f"{REGISTRY}move_alias = true\n{AT_ONCE}") as one:
        one.look()
        one.comes_to("standby")
        one.until(lambda: mlflow.aliases["champion"] == 2)
        one.look()
        one.rollout(action="abort")
        one.until(lambda: mlflow.aliases["champion"] == 1)
        one.look()
        assert one.rollout()["state"] == "rolled-back"
        assert one.version == "1"
        one.tagged(1, "full")


def test_the_next_candidate_builds_on_the_one_that_took_over(mlflow: StandIn, tmp_path: Path) -> None:
    """The champion alias lags behind: nobody moves it."""
    mlflow.aliases["challenger"] = 2
    with following(mlflow, tmp_path, REGISTRY + AT_ONCE) as one:
        one.look()
        one.comes_to("standby")
        one.tagged(2, "standby")
        one.look()
        mlflow.aliases["challenger"] = 3
        one.look()
        one.until(lambda: one.rollout()["candidate"] == "3")
        found = one.comes_to("standby")
        assert (found["stable"], one.version) == ("2", "3")
        one.tagged(3, "standby")
        mlflow.aliases["challenger"] = 1  # where the champion is: both say so
        one.look()
        one.until(lambda: one.version == "1", one.look)


def test_a_stable_alias_that_moves(mlflow: StandIn, tmp_path: Path) -> None:
    """Without [rollout] at once, also after rollouts; with it by a rollout."""
    with following(mlflow, tmp_path, REGISTRY) as one:
        mlflow.aliases["champion"] = 2
        one.look()
        assert (one.version, one.rollout()["state"]) == ("2", "none")
        mlflow.aliases["challenger"] = 3
        one.look()
        assert one.comes_to("shadow")["plan"]["canary"] == [0.1, 0.5]  # the defaults
        mlflow.aliases["champion"] = 1
        one.look()
        assert one.version == "1"
        one.until(lambda: one.rollout()["stable"] == "1")
        assert one.comes_to("shadow")["candidate"] == "3"
    del mlflow.aliases["challenger"]
    (tmp_path / "state" / "rollouts").rename(tmp_path / "elsewhere")
    with following(mlflow, tmp_path, REGISTRY.replace("candidate", "# ") + ALL_THE_WAY) as one:
        assert one.version == "1"
        mlflow.aliases["champion"] = 2
        one.look()
        assert one.comes_to("done")["stable"] == "2"
        assert one.version == "2"
        one.tagged(2, "done")


def test_one_that_does_not_load_fails_and_changes_nothing(mlflow: StandIn, tmp_path: Path) -> None:
    mlflow.versions[2]["model.onnx"] = b"this is no model"
    mlflow.aliases["challenger"] = 2
    with following(mlflow, tmp_path, REGISTRY + HELD) as one:
        one.look()
        assert "does not load" in one.comes_to("failed")["why"]
        one.tagged(2, "failed")
        one.look()
        assert (one.version, one.rollout()["state"]) == ("1", "failed")
