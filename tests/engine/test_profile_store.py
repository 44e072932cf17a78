from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.config.model import InstanceGroup, ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.objectives import Promise
from carpool.engine.profile import profile_folder
from carpool.engine.profile.hardware import Hardware, hardware, process_age
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import (
    Key,
    Profile,
    ProfileStore,
    StartTimes,
    key_text,
    last_start,
    profile_key,
)
from carpool.engine.profile.profile_folder import SUFFIX

PROFILE = Profile(Layout(1, 2), "tried", Measured((Point(1, 0.01, 0.1, 5),), ""), "2026-01-01")
MACHINE = Hardware("A Processor", 2)


def key(folder: Path, *, machine: Hardware = MACHINE, **changes: object) -> Key:
    config = ModelConfig(name="m", path=folder, backend="onnxruntime", max_batch=8)
    found = profile_key(
        replace(config, **changes),  # type: ignore[arg-type]
        ModelVersion(1, folder / "1" / "model.onnx"),
        machine,
    )
    assert found is not None
    return found


@pytest.fixture(name="model")
def a_model(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"weights")
    return tmp_path / "m"


def test_what_was_written_is_read(tmp_path: Path, model: Path) -> None:
    store = ProfileStore(tmp_path / "cache")
    assert store.read(key(model)) is None
    store.write(key(model), PROFILE)
    assert ProfileStore(tmp_path / "cache").read(key(model)) == PROFILE
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["profiles"]


def test_everything_that_matters_is_in_the_key(model: Path) -> None:
    first = key(model)
    assert key(model) == first
    assert key(model, name="renamed") == first
    others = [
        key(model, policy=Promise(0.05, 8)),
        key(model, max_batch=16),
        key(model, instances=(InstanceGroup(2),)),
        key(model, instances=(InstanceGroup(1),)),  # one because somebody said so
        key(model, backend="python"),
        key(model, machine=Hardware("Another", 2)),
        key(model, machine=Hardware("A Processor", 4)),
        key(model, machine=Hardware("A Processor", 2, ("A GPU",))),
    ]
    (model / "1" / "model.onnx").write_bytes(b"weights of another training")
    others.append(key(model))
    (model / "1" / "beside.bin").write_bytes(b"more")
    others.append(key(model))
    assert all(other != first for other in others)
    assert profile_key(ModelConfig(name="m", path=model), ModelVersion(1, None)) is None


def test_the_same_model_elsewhere_has_the_same_key(tmp_path: Path, model: Path) -> None:
    first = key(model)
    model.rename(tmp_path / "moved")
    assert key(tmp_path / "moved") == first


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"key": {}}',
        '{"key": 1, "profile": {}}',
        "[" * 100_000,
        '"' + "x" * 400_000 + '"',
    ],
)
def test_a_broken_file_is_ignored_with_a_warning(
    tmp_path: Path, model: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProfileStore(tmp_path)
    store.write(key(model), PROFILE)
    (file,) = (tmp_path / "profiles").iterdir()
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "carpool"):
        assert store.read(key(model)) is None
    assert "profile-unreadable" in caplog.text
    store.write(key(model), PROFILE)
    assert store.read(key(model)) == PROFILE


def test_a_foreign_file_of_that_name_is_ignored(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProfileStore(tmp_path)
    store.write(key(model), PROFILE)
    (file,) = (tmp_path / "profiles").iterdir()
    other = key(model, max_batch=4)
    store.write(other, PROFILE)
    (theirs,) = (path for path in (tmp_path / "profiles").iterdir() if path != file)
    theirs.write_text(file.read_text())
    assert store.read(other) is None
    assert "made for something else" in caplog.text


def test_a_folder_that_cannot_be_written_only_costs_a_warning(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = ProfileStore(tmp_path / "file")
    store.write(key(model), PROFILE)
    assert "profile-not-stored" in caplog.text
    assert store.read(key(model)) is None


def test_only_the_newest_are_kept(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_folder, "MOST_FILES", 3)
    store = ProfileStore(tmp_path)
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "notes.txt").write_text("somebody's own")
    for number in range(1, 7):
        store.write(key(model, max_batch=number), PROFILE)
        for age, path in enumerate(sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)):
            os.utime(path, (1000 + age, 1000 + age))
    kept = [number for number in range(1, 7) if store.read(key(model, max_batch=number)) is not None]
    assert kept == [4, 5, 6]
    assert (folder / "notes.txt").exists()


def test_the_machine(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some   CPU @ 2GHz\n")
    gpu = tmp_path / "driver" / "nvidia" / "gpus" / "0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t Some GPU\nIRQ: 1\n")
    found = hardware(tmp_path)
    assert (found.cpu, found.gpus) == ("Some CPU @ 2GHz", ("Some GPU",))
    assert str(found).endswith("Some GPU")
    assert hardware(tmp_path / "nothing").cpu


def test_what_a_start_took_is_kept_beside_what_was_measured(tmp_path: Path, model: Path) -> None:
    cache, version = tmp_path / "cache", ModelVersion(1, model / "1" / "model.onnx")
    store, mine = ProfileStore(cache), key(model, machine=hardware())
    store.note_start(key_text(mine), StartTimes(3.5))
    assert last_start(cache, version) is None, "there is no profile to keep it in"
    store.write(mine, PROFILE)
    assert last_start(cache, version) is None
    store.note_start(key_text(mine), StartTimes(3.5, 40.0))
    assert store.read(mine) == replace(PROFILE, started=StartTimes(3.5, 40.0))
    assert last_start(cache, version) == StartTimes(3.5, 40.0)
    (cache / "profiles" / f"broken{SUFFIX}").write_text("{")
    promised = key(model, machine=hardware(), policy=Promise(0.05, 8))
    store.write(promised, PROFILE)
    store.note_start(key_text(promised), StartTimes(2.5))
    for path in (cache / "profiles").iterdir():
        age = 10.0 if '"ready_s": 2.5' in path.read_text() else 20.0
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    assert last_start(cache, version) == StartTimes(2.5), "the last one, with whatever settings"
    (model / "1" / "model.onnx").write_bytes(b"weights of another training")
    assert last_start(cache, version) is None


def test_the_start_of_another_machine_is_none_of_ours(tmp_path: Path, model: Path) -> None:
    cache, theirs = tmp_path / "cache", key(model, machine=Hardware("Another", 2))
    ProfileStore(cache).write(theirs, replace(PROFILE, started=StartTimes(3.5)))
    assert last_start(cache, ModelVersion(1, model / "1" / "model.onnx")) is None


def test_the_age_of_a_process_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert 0.0 < process_age() < 1e7
    (tmp_path / "self").mkdir()
    fields = " ".join(["S", *map(str, range(4, 22)), "250000"])
    (tmp_path / "self" / "stat").write_text(f"7 (a) name) {fields}")
    (tmp_path / "uptime").write_text("2600.00 1.0")
    assert process_age(tmp_path) == pytest.approx(2600.0 - 250000 / os.sysconf("SC_CLK_TCK"))
    assert process_age(tmp_path / "nowhere") == 0.0
