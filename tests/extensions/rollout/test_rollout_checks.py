"""What is looked at before a candidate gets any traffic."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from absent import needs
from carpool.config.model import LatestVersions, ModelConfig, SpecificVersions
from carpool.errors import ConfigError
from carpool.extensions.rollout.rollout_checks import differences, digest_of, first_pair, pinned
from carpool.extensions.rollout.rollout_states import Rollout, State
from carpool.extensions.rollout.settings import RolloutSettings
from carpool.types import Datatype, Signature, TensorSpec
from engine.repositories import python
from extensions.rollout.staged import Staged
from extensions.text.test_text_driver import write_model
from frontend.whole_server import whole_server

CONFIG = ModelConfig(name="m", path=Path("m"), extra={"rollout": RolloutSettings()})
FLOAT = Datatype.FP32


def served(
    size: int = 224,
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", FLOAT, (10,)),),
    task: str | None = "classify",
    labels: tuple[str, ...] = ("cat", "dog"),
    max_batch: int = 8,
) -> Any:
    spec = TensorSpec("x", FLOAT, (3, size, size))
    vision = None if task is None else SimpleNamespace(task=task, input=spec, labels=labels)
    return SimpleNamespace(
        signature=Signature("m", (spec,), outputs, max_batch), vision=vision, labels={"y": labels}
    )


def test_memory_is_that_of_a_process_and_of_those_below_it() -> None:
    """In a process of its own, that nothing else gives memory back to the system in."""
    script = (
        "import subprocess, sys\n"
        "from carpool.extensions.rollout.rollout_checks import resident_gb\n"
        "before = resident_gb()\n"
        "mine = bytearray(b'x' * (64 << 20))\n"
        "between = resident_gb()\n"
        "below = 'held = bytearray(b\"x\" * (64 << 20)); print(1, flush=True); input()'\n"
        "pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}\n"
        "with subprocess.Popen([sys.executable, '-c', below], **pipes) as child:\n"
        "    child.stdout.readline()\n"
        "    print(between - before, resident_gb() - between)\n"
        "    child.communicate(b'\\n')\n"
    )
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert all(0.06 < taken < 0.2 for taken in map(float, told.split())), told


def test_a_twin_has_no_differences() -> None:
    assert differences(served(), served()) == []


def test_labels_may_grow() -> None:
    assert differences(served(), served(labels=("cat", "dog", "bird"))) == []


def test_pictures_may_have_another_size_where_clients_send_pictures() -> None:
    assert differences(served(), served(size=240)) == []


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        (served(task="detect"), "its task is detect, not classify"),
        (served(task=None), "its task is none, not classify"),
        (served(labels=("dog", "cat")), "its label 0 is 'dog', not 'cat'"),
        (served(labels=("cat",)), "its label 1 is 'missing', not 'dog'"),
        (served(outputs=(TensorSpec("z", FLOAT, (10,)),)), "output 'y' is missing"),
        (served(outputs=(TensorSpec("y", Datatype.INT64, (10,)),)), "output 'y' is INT64, not FP32"),
        (served(outputs=(TensorSpec("y", FLOAT, (12,)),)), "output 'y' has the shape [12], not [10]"),
        (served(max_batch=4), "its largest batch is 4, not 8"),
    ],
)
def test_differences_are_told(candidate: Any, said: str) -> None:
    assert said in differences(served(), candidate)


def test_without_pictures_no_shape_may_differ() -> None:
    stable, candidate = served(task=None), served(size=240, task=None)
    assert differences(stable, candidate) == ["input 'x' has the shape [3, 240, 240], not [3, 224, 224]"]


def test_more_boxes_come_with_a_larger_picture() -> None:
    boxes = [(TensorSpec("y", FLOAT, (count, 6)),) for count in (100, 200)]
    small, large = (served(size, out, "detect") for size, out in zip((320, 640), boxes, strict=True))
    assert differences(small, large) == []
    assert differences(small, served(320, boxes[1], "detect")) != []


@pytest.mark.parametrize(
    ("present", "candidate", "pair"),
    [
        ([1, 2], None, (1, 2)),
        ([1, 2, 7], None, (2, 7)),
        ([3], None, (3, None)),
        ([], None, (None, None)),
        ([1, 2, 7], 2, (1, 2)),
        ([2, 7], 2, (7, 2)),
    ],
)
def test_the_first_pair(
    present: list[int], candidate: int | None, pair: tuple[int | None, int | None]
) -> None:
    assert (
        first_pair(replace(CONFIG, extra={"rollout": RolloutSettings(candidate=candidate)}), present) == pair
    )


def folder(tmp_path: Path, *versions: int) -> Path:
    for version in versions:
        (tmp_path / str(version)).mkdir()
    return tmp_path


def chosen(
    home: Path,
    rollout: Rollout | None,
    serving: tuple[int, ...] = (),
    by_hand: bool = False,
    sent_back: tuple[int, ...] = (),
    config: ModelConfig = CONFIG,
) -> object:
    versions = pinned(config, home, rollout, by_hand=by_hand, serving=serving, sent_back=sent_back).versions
    return versions.versions if isinstance(versions, SpecificVersions) else versions


def test_which_versions_are_loaded(tmp_path: Path) -> None:
    home = folder(tmp_path, 1, 2)
    assert chosen(home, None) == (1,)
    canary = Rollout("1", "2", State.CANARY, 1)
    assert chosen(home, canary) == (1,)
    assert chosen(home, canary, (1,)) == (1, 2)
    standby = Rollout("1", "2", State.STANDBY)
    assert chosen(home, standby) == (2,)
    assert chosen(home, standby, (2,)) == (1, 2)
    assert chosen(home, Rollout("1", "2", State.ROLLED_BACK), (1, 2)) == (1,)
    assert chosen(home, Rollout("2", "2", State.DONE), (1, 2)) == (2,)


def test_a_newer_version_after_one_by_hand_is_swapped_in(tmp_path: Path) -> None:
    home = folder(tmp_path, 1, 2, 3)
    over, none = Rollout("1", "2", State.ROLLED_BACK), replace(CONFIG, extra={})
    assert chosen(home, over, (1,), by_hand=True, config=none) == LatestVersions()
    assert chosen(home, over, (1,), by_hand=True, config=none, sent_back=(3,)) == (1,)
    assert chosen(home, over, (1,)) == (1,)


@pytest.mark.parametrize("state", [State.ROLLED_BACK, State.FAILED, State.DONE])
def test_a_newer_version_after_one_by_hand_waits_where_the_settings_ask_for_rollouts(
    tmp_path: Path, state: State
) -> None:
    home, over = folder(tmp_path, 1, 2, 3), Rollout("1", "2", state)
    assert chosen(home, over, (1,), by_hand=True) == (1,)


def test_what_serves_goes_on_when_rollouts_are_asked_for(tmp_path: Path) -> None:
    home = folder(tmp_path, 1, 2, 3)
    assert chosen(home, None, (2,)) == (2,)
    assert chosen(home, None) == (2,), "at a first start"


def test_none_that_was_ever_sent_back_stands_in_for_stable(tmp_path: Path) -> None:
    home = folder(tmp_path, 2, 3, 4)
    over = Rollout("1", "4", State.FAILED)
    assert chosen(home, over, sent_back=(3, 4)) == (2,)
    assert chosen(home, Rollout("5", "5", State.DONE), sent_back=(4,)) == (3,)
    with pytest.raises(ConfigError, match="restore it"):
        chosen(home, over, sent_back=(2, 3, 4))


@pytest.mark.parametrize("state", [State.ROLLED_BACK, State.FAILED, State.CANARY, State.PAUSED])
def test_a_candidate_that_did_not_take_over_never_stands_in_for_stable(tmp_path: Path, state: State) -> None:
    rollout = Rollout("1", "2", state, before=State.SHADOW if state is State.PAUSED else None)
    home = folder(tmp_path, 2)
    with pytest.raises(ConfigError, match=f"version 1, which serves, is not in .* version 2 is {state}"):
        chosen(home, rollout)
    (home / "3").mkdir()
    assert chosen(home, rollout) == (3,)  # nobody has judged it
    with pytest.raises(ConfigError, match="restore it"):
        chosen(home, rollout, (1, 2))  # stable is in memory, and goes on there
    named = replace(CONFIG, extra={}, versions=SpecificVersions((2,)))
    assert pinned(named, home, rollout) is named


def test_without_the_candidate_that_serves_stable_does(tmp_path: Path) -> None:
    assert chosen(folder(tmp_path, 1), Rollout("1", "2", State.STANDBY)) == (1,)
    assert chosen(folder(tmp_path, 3), Rollout("1", "2", State.STANDBY)) == (1,), "nobody has judged 3"
    (tmp_path / "3").rmdir()
    assert chosen(tmp_path, Rollout("2", "2", State.DONE)) == (1,)


def test_without_rollout_nothing_is_pinned(tmp_path: Path) -> None:
    config = replace(CONFIG, extra={})
    assert pinned(config, folder(tmp_path, 1, 2), None) is config


def test_digests_are_of_the_content(tmp_path: Path) -> None:
    home = folder(tmp_path, 1, 2, 3, 4)
    (home / "1" / "weights").write_text("a")
    (home / "2" / "weights").write_text("a")
    (home / "3" / "weights").write_text("b")
    assert digest_of(home, "1") == digest_of(home, "2") != digest_of(home, "3")
    assert digest_of(home, "4") != digest_of(home, "5")


@needs("sequences", "streams", "text")
def test_models_whose_answers_cannot_be_compared_are_not_rolled_out(tmp_path: Path) -> None:
    heads = {
        "sums": ("[sequences]", "it takes sequences"),
        "counts": ("decoupled = true", "it is decoupled"),
    }
    for name, (head, _) in heads.items():
        model = python(tmp_path, "def predict(x): return x", name=name, head=head)
        shutil.copytree(model / "1", model / "2")
    for version in ("1", "2"):
        (write_model(tmp_path) if version == "1" else tmp_path / "writer").joinpath(version).mkdir()
    words = {name: word for name, (_, word) in heads.items()} | {"writer": "it writes token by token"}
    with whole_server(tmp_path, allow_rollouts=True, state_dir=tmp_path.parent / "state") as server:
        one = Staged(server, tmp_path)
        for name, word in words.items():
            path = f"/v2/models/{name}/rollout"
            status, found, _ = one.ask("POST", path, {"action": "start", "version": "1"})
            assert status == 409, found
            assert f"'{name}' cannot be rolled out: {word}" in found["error"]
            status, found, _ = one.ask("GET", path)
            assert (status, found["state"], found["actions"]) == (200, "none", [])
            assert word in found["why"]
