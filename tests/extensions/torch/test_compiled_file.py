"""Files of compiled artifacts: written whole, checked before they are used, trusted only where code is."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.config.fingerprint import COMPILED, content_digest, take_fingerprint
from carpool.config.model import ModelConfig, PytorchSettings
from carpool.config.repository import ModelVersion
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import Profile, key_text
from carpool.engine.profile.whole_file import write_whole
from carpool.extensions.torch.compiled_file import CompiledFile, find_compiled, name_of, write_compiled

KEY = {"format": 1, "model": "abc", "backend": ["pytorch", "2.11"], "settings": {"devices": ["H200"]}}
PROFILE_KEY = {"format": 4, "model": "abc"}
PROFILE = Profile(
    Layout(2, 1), measured=Measured((Point(1, 0.001), Point(8, 0.004))), compiled=(Point(8, 0.002),)
)


@pytest.fixture
def version(tmp_path: Path) -> ModelVersion:
    folder = tmp_path / "model" / "1"
    folder.mkdir(parents=True)
    (folder / "model.pt").write_bytes(b"weights")
    (folder / "model.py").write_text("def build(): ...\n")
    return ModelVersion(1, folder / "model.pt")


def config_of(version: ModelVersion, module: str | None = "model.py:build") -> ModelConfig:
    assert version.file is not None
    config = ModelConfig(name="m", path=version.file.parent.parent, backend="pytorch")
    return replace(config, pytorch=PytorchSettings(compile="default", module=module))


def found(version: ModelVersion, cache: Path | None = None, module: str | None = "model.py:build") -> object:
    return find_compiled(config_of(version, module), version, KEY, PROFILE_KEY, cache)


def written(folder: Path) -> Path:
    return write_compiled(folder, key_text(KEY), [1, 8], [b"one", b"two"], PROFILE, key_text(PROFILE_KEY))


def test_it_is_found_in_the_cache_and_beside_the_model_and_is_whole(
    tmp_path: Path, version: ModelVersion
) -> None:
    cache = tmp_path / "cache"
    assert found(version, cache) is None
    file = written(cache / "compiled")
    assert file.name == name_of(KEY)
    assert found(version, cache) == CompiledFile(file, (1, 8), PROFILE, (b"one", b"two"))
    assert version.file is not None
    beside = written(version.file.parent)
    assert found(version) == CompiledFile(beside, (1, 8), PROFILE, (b"one", b"two"))


def test_it_is_found_among_any_number_of_others(tmp_path: Path, version: ModelVersion) -> None:
    folder = tmp_path / "cache" / "compiled"
    file = written(folder)
    for number in range(100):
        (folder / f"{number:03}{COMPILED}").write_bytes(b"another model's")
    assert sorted(folder.iterdir()).index(file) > 64
    assert found(version, tmp_path / "cache") is not None


def test_a_full_disk_keeps_no_half_of_a_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"as much as there was room for"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", pieces())
    assert not list(tmp_path.iterdir())


def test_a_profile_of_another_machine_is_left_out_and_the_artifacts_are_used(version: ModelVersion) -> None:
    assert version.file is not None
    written(version.file.parent)
    there = find_compiled(config_of(version), version, KEY, {"format": 4, "model": "other"}, None)
    assert there is not None
    assert there.profile is None
    assert there.parts == (b"one", b"two")


def stale(file: Path) -> None:
    other = {**KEY, "backend": ["pytorch", "2.10"]}
    made = write_compiled(file.parent, key_text(other), [1], [b"x"])
    made.replace(file)


def damaged(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def foreign(file: Path) -> None:
    file.write_bytes(b"something else entirely, and long enough")


def endless(file: Path) -> None:
    file.write_bytes(b"carpool compiled 1\n" + (1 << 62).to_bytes(8, "little"))


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (stale, "another backend: ['pytorch', '2.10'], and here it is ['pytorch', '2.11']"),
        (damaged, "a digest does not fit"),
        (foreign, "no file of compiled artifacts"),
        (endless, "its head is too long"),
        (cut_off, ""),
    ],
)
def test_what_does_not_fit_is_named_and_ignored(
    version: ModelVersion, change: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert version.file is not None
    change(written(version.file.parent))
    assert found(version) is None
    assert "compiled-ignored" in caplog.text
    assert said in caplog.text.replace("\\", "")


def test_beside_a_model_whose_code_is_not_run_nothing_is_opened(version: ModelVersion) -> None:
    assert version.file is not None
    written(version.file.parent)
    assert found(version, module=None) is None


def test_what_others_could_have_written_is_not_opened(
    tmp_path: Path, version: ModelVersion, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path / "cache" / "compiled")
    file.chmod(0o666)
    assert found(version, tmp_path / "cache") is None
    assert "others can write there" in caplog.text
    file.chmod(0o600)
    assert found(version, tmp_path / "cache") is not None
    file.parent.chmod(0o777)
    assert found(version, tmp_path / "cache") is None


def test_a_model_is_the_same_with_and_without_the_file_beside_it(version: ModelVersion) -> None:
    assert version.file is not None
    model = version.file.parent.parent
    before = content_digest(version.file), take_fingerprint(model)
    written(version.file.parent)
    assert (content_digest(version.file), take_fingerprint(model)) == before


def test_nothing_is_left_half_written(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert json.loads(key_text(KEY)) == KEY
