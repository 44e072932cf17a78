"""What counts as a change of a model's files."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from carpool.config.fingerprint import (
    CHANGES_NO_ANSWER,
    Fingerprint,
    settings_of_answers,
    take_fingerprint,
    whole_digest,
)
from carpool.config.model import InstanceGroup, ModelConfig, OnnxruntimeSettings, PytorchSettings
from carpool.errors import ConfigError


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture(name="folder")
def model_folder(tmp_path: Path) -> Path:
    for name in ("config.pbtxt", "labels.txt", "1/model.onnx", "1/model.onnx.data", "2/model.onnx"):
        put(tmp_path / "m" / name)
    return tmp_path / "m"


def test_each_version_has_its_own_files_and_those_of_all(folder: Path) -> None:
    taken = take_fingerprint(folder)
    assert [stamp[0] for stamp in taken.settings] == ["config.pbtxt"]
    assert [stamp[0] for stamp in taken.shared] == ["labels.txt"]
    assert {number: [stamp[0] for stamp in stamps] for number, stamps in taken.versions.items()} == {
        1: ["model.onnx", "model.onnx.data"],
        2: ["model.onnx"],
    }
    assert taken == take_fingerprint(folder)


@pytest.mark.parametrize(
    ("change", "versions"),
    [
        (lambda f: put(f / "1/model.onnx", "longer"), {1}),
        (lambda f: os.utime(f / "1/model.onnx.data", ns=(1, 1)), {1}),
        (lambda f: put(f / "1/part").rename(f / "1/model.onnx"), {1}),
        (lambda f: (f / "2/model.onnx").unlink(), {2}),
        (lambda f: put(f / "2/deep/down/weights"), {2}),
        (lambda f: put(f / "labels.txt", "cat\ndog"), {1, 2}),
        (lambda f: put(f / "helpers/module.py"), {1, 2}),
        (lambda f: put(f / "3/model.onnx"), set()),
        (lambda f: put(f / "1/__pycache__/model.pyc"), set()),
        (lambda f: put(f / "1/.model.onnx.part"), set()),
        (lambda f: os.utime(f / "config.pbtxt", ns=(1, 1)), set()),
    ],
)
def test_a_change_concerns_the_versions_that_it_is_part_of(
    folder: Path, change: object, versions: set[int]
) -> None:
    before = take_fingerprint(folder)
    change(folder)  # type: ignore[operator]
    after = take_fingerprint(folder)
    assert {number for number in (1, 2) if before.of(number) != after.of(number)} == versions


def test_settings_that_were_touched_are_seen(folder: Path) -> None:
    before = take_fingerprint(folder)
    os.utime(folder / "config.pbtxt", ns=(1, 1))
    assert before.settings != take_fingerprint(folder).settings


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    for name in ("old", "new"):
        put(tmp_path / name / "model.onnx")
    model = tmp_path / "m"
    model.mkdir()
    (model / "1").symlink_to(tmp_path / "old")
    before = take_fingerprint(model)
    assert before.versions[1]
    (model / "next").symlink_to(tmp_path / "new")
    (model / "next").rename(model / "1")
    assert take_fingerprint(model) != before


def test_a_folder_without_versions_is_one(tmp_path: Path) -> None:
    put(tmp_path / "m" / "model.onnx")
    before = take_fingerprint(tmp_path / "m")
    put(tmp_path / "m" / "model.onnx", "other")
    assert take_fingerprint(tmp_path / "m").of(1) != before.of(1)


def test_a_file_is_known_by_itself_and_what_begins_like_it(tmp_path: Path) -> None:
    file = put(tmp_path / "net.onnx")
    before = take_fingerprint(file)
    put(tmp_path / "holiday.jpg")
    assert take_fingerprint(file) == before
    put(tmp_path / "net.onnx.data")
    assert take_fingerprint(file).of(1) != before.of(1)
    put(tmp_path / "model.toml")
    assert take_fingerprint(file).settings


def test_what_is_not_there_has_an_empty_one(tmp_path: Path) -> None:
    assert take_fingerprint(tmp_path / "gone") == Fingerprint()
    assert take_fingerprint(tmp_path / "gone" / "too" / "model.onnx") == Fingerprint()


def test_a_link_to_itself_ends(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    put(folder / "model.onnx")
    (folder / "again").symlink_to(folder)
    with pytest.raises(ConfigError, match="folders deep"):
        take_fingerprint(folder)


def test_equal_replicas_have_equal_settings_of_answers_however_they_were_measured() -> None:
    one = ModelConfig(name="m", path=Path("/a"), instances=(InstanceGroup(4),))
    threads = OnnxruntimeSettings(intra_op_threads=2)
    assert settings_of_answers(one) == settings_of_answers(
        replace(one, path=Path("/b"), instances=(InstanceGroup(1),), onnxruntime=threads)
    )
    for other in (
        replace(one, pytorch=PytorchSettings(precision="fp16")),
        replace(one, parameters={"bias": "2"}),
        replace(one, onnxruntime=OnnxruntimeSettings(providers=("CUDAExecutionProvider",))),
    ):
        assert settings_of_answers(one) != settings_of_answers(other)
    assert set(CHANGES_NO_ANSWER) < {each.name for each in fields(ModelConfig)}


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda f: put(f / "1/model.onnx", "longer"), True),
        (lambda f: put(f / "labels.txt", "cat\ndog"), True),
        (lambda f: put(f / "helpers/module.py"), True),
        (lambda f: put(f / "2/model.onnx", "longer"), False),
        (lambda f: put(f / "config.pbtxt", "longer"), False),  # what it says is compared
        (lambda f: os.utime(f / "1/model.onnx", ns=(1, 1)), False),
    ],
)
def test_the_digest_of_all_that_answers_follow_from(folder: Path, change: object, differs: bool) -> None:
    before = whole_digest(folder / "1/model.onnx", folder)
    change(folder)  # type: ignore[operator]
    assert (whole_digest(folder / "1/model.onnx", folder) != before) is differs


def test_the_digest_leaves_other_peoples_files_unread(folder: Path) -> None:
    """Beside a model file without settings anything may lie."""
    (folder / "config.pbtxt").unlink()
    os.mkfifo(folder / "pipe")  # reading it would never end
    file = put(folder / "model.onnx")
    before = whole_digest(file, folder)
    put(folder / "helper.py")
    assert whole_digest(file, folder) != before
