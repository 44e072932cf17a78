"""Which extensions the files of models' folders ask for, whether or not their settings can be read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from absent import needs
from carpool.config.asked_folders import asked_in_folders, asked_under
from carpool.extensions import started

pytestmark = needs("rollout", "registry", "cache")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("slo_ms = 50", set()),
        ("[rollout]", {"rollout"}),
        ("  [ rollout . guards ]\nlate = 3", {"rollout"}),
        ('"registry".stable = "models:/m@a"', {"registry"}),
        ("[registry\nthis is no TOML", {"registry"}),
        ("# [rollout]\n[rollouts]\nmy_cache = 1", set()),
        ("[cache]\n[registry]", {"cache", "registry"}),
    ],
)
def test_keys_of_a_model_toml(tmp_path: Path, text: str, asked: set[str]) -> None:
    (tmp_path / "model.toml").write_text(text)
    assert asked_in_folders([tmp_path]) == asked


def test_files_beside_it_and_what_is_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").touch()
    (folder / "1" / "model.onnx").touch()
    assert asked_in_folders([folder, folder / "1" / "model.onnx", tmp_path / "absent"]) == set()
    (folder / "rollout.toml").touch()
    assert asked_under([tmp_path / "models"]) == {"rollout"}


def test_what_is_remembered_and_what_is_named_start_an_extension(tmp_path: Path) -> None:
    def names(*models: str) -> set[str]:
        options = dict.fromkeys(("allow_rollouts", "rollout_state", "record", "cache_url"), "")
        options |= dict.fromkeys(("trace_file", "otlp_endpoint"), "")
        settings = SimpleNamespace(models=models, state_dir=tmp_path, **options)
        return {one.name for one in started(settings)} & {"rollout", "registry"}

    assert names("models", "/models:/m") == set()
    assert names("models:/detector@champion") == {"registry"}
    assert names("s3:/bucket/models") == names("hf:owner/name") == {"registry"}
    (tmp_path / "rollouts").mkdir()
    assert names() == set()
    (tmp_path / "rollouts" / "m-0a.json").touch()
    assert names() == {"rollout"}
