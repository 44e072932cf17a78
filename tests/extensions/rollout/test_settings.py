"""[rollout]: every key is checked, and the nearest name is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.config.repository import read_model
from carpool.config.toml import toml_config
from carpool.errors import ConfigError
from carpool.extensions.rollout.settings import GuardSettings, RolloutSettings, rollout_settings
from carpool.extensions.rollout.settings_reader import as_document, plan_of, read_rollout_toml

WHOLE = """
[rollout]
candidate = 3
shadow = 0.1
canary = [0.25, 0.75]
shadow_h = 1
canary_h = 2.5
standby_h = 0
least = 10
sticky = "header:X-Camera"
promote = "by-hand"
fallback = false
evaluate = "labelled/coco.json"
tolerate = 0.01
guards = { disagreement = false, late = 3, errors = 1.5, confidence = 0.95, on_breach = "pause" }
compare = { score = 0.4, iou = 0.6, top_k = 5 }
keep = { folder = "/tmp/kept", pictures = 10, mb = 5 }
"""


def read(text: str) -> RolloutSettings:
    rollout = rollout_settings(toml_config(text, Path("models/m/model.toml")))
    assert rollout is not None
    return rollout


def test_without_the_table_there_is_none() -> None:
    assert toml_config("slo_ms = 50", Path("models/m/model.toml")).extra == {}


def test_defaults() -> None:
    assert read("[rollout]") == RolloutSettings()


def test_everything_can_be_said() -> None:
    rollout = read(WHOLE)
    assert rollout.candidate == 3
    assert rollout.canary == (0.25, 0.75)
    assert rollout.guards == GuardSettings(None, 3.0, 1.5, 1.5, None, None, 0.95, "pause")
    assert rollout.compare.top_k == 5
    assert rollout.compare.cosine == 0.98
    assert rollout.keep.pictures == 10


@pytest.mark.parametrize("text", ["[rollout]", WHOLE, "[rollout]\ncanary = []"])
def test_a_plan_comes_back_from_json(text: str) -> None:
    rollout = read(text)
    assert plan_of(as_document(rollout), "plan") == rollout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("shadow = 1.5", "rollout.shadow must be 0 or more and at most 1, not 1.5"),
        ("shadow = -0.1", "rollout.shadow"),
        ("shadow = true", "rollout.shadow must be a number"),
        ("canary = [0.5, 0.1]", "rollout.canary must rise from step to step, not 0.5, 0.1"),
        ("canary = [0.1, 0.1]", "must rise"),
        ("canary = [0.0]", "rollout.canary must be above 0"),
        ("canary = [1.0]", "takes shares below 1"),
        ('canary = ["a"]', "rollout.canary must be a number"),
        ("canary_h = -1", "rollout.canary_h"),
        ("canari = [0.1]", 'did you mean "canary"?'),
        ('sticky = "sauce"', 'did you mean "source"?'),
        ('sticky = "header:"', "rollout.sticky cannot be"),
        ('sticky = "header:TraceParent"', "which keeps to nothing"),
        ('promote = "proved"', 'did you mean "proven"?'),
        ('candidate = "latest"', "rollout.candidate cannot be"),
        ("candidate = 0", "rollout.candidate"),
        ("guards = { disagrement = 0.1 }", 'did you mean "disagreement"?'),
        ("guards = { late = 0 }", "rollout.guards.late must be above 0"),
        ("guards = { slower = 1 }", "rollout.guards.slower must be above 1"),
        ("guards = { late = true }", "rollout.guards.late must be a number"),
        ("guards = { confidence = 1 }", "rollout.guards.confidence"),
        ('guards = { on_breach = "abort" }', "rollout.guards.on_breach cannot be"),
        ("compare = { iou = 2 }", "rollout.compare.iou"),
        ("keep = { pictures = 0 }", "rollout.keep.pictures"),
        ("least = -1", "rollout.least"),
        ('evaluate = "../coco.json"', "must be a file inside the model's folder"),
        ("guards = 3", "rollout.guards must be a table"),
    ],
)
def test_mistakes_name_the_key(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"[rollout]\n{line}")
    assert said in caught.value.message


def test_it_does_not_go_with_versions() -> None:
    with pytest.raises(ConfigError, match="versions does not go with"):
        read('versions = "all"\n[rollout]')


@pytest.mark.parametrize("head", ["", "[rollout]\n"])
def test_beside_a_config_pbtxt(tmp_path: Path, head: str) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "fake"')
    (folder / "rollout.toml").write_text(f"{head}canary = [0.2]")
    assert read_rollout_toml(folder / "rollout.toml") == RolloutSettings(canary=(0.2,))
    (folder / "rollout.toml").write_text(f"{head}canary = [2]")
    with pytest.raises(ConfigError, match=r"rollout.toml: canary"):
        read_rollout_toml(folder / "rollout.toml")


def test_a_version_policy_contradicts_rollout_toml(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text("version_policy: { all: {} }")
    (folder / "rollout.toml").write_text("")
    with pytest.raises(ConfigError, match="version_policy does not go with"):
        read_model(folder)
