"""What one replica compiled is found by another in the place of shared profiles, if one of them wrote it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carpool.config.fingerprint import COMPILED
from carpool.config.repository import ModelVersion
from carpool.engine.profile.model_profile import ProfileStore
from carpool.engine.profile.profile_folder import ProfileFolder
from carpool.extensions.torch import found_compiled, shared_artifacts
from carpool.extensions.torch.compiled_file import CompiledFile
from carpool.extensions.torch.shared_artifacts import artifacts_of
from extensions.torch.test_compiled_file import KEY, config_of, version, written  # noqa: F401 - a fixture

SECRET = "known to all servers"


def store(folder: Path, replica: str, secret: str = SECRET) -> ProfileStore:
    found = ProfileStore.of(folder / replica, f"file:{folder / 'shared'}", secret)
    assert found is not None
    return found


def share(folder: Path, secret: str = SECRET) -> Path:
    """As the replica does that compiled it."""
    shared, _ = artifacts_of(store(folder, "first", secret))
    assert shared is not None
    shared.share(written(folder / "first" / "compiled"), "m")
    (file,) = (folder / "shared" / "compiled").glob(f"*{COMPILED}")
    return file


def found(
    profiles: ProfileStore,
    model: ModelVersion,
    monkeypatch: pytest.MonkeyPatch,
    module: str | None = "model.py:build",
) -> CompiledFile | None:
    monkeypatch.setattr(found_compiled, "compiled_key", lambda *_: KEY)
    there = found_compiled.found_compiled(config_of(model, module), model, None, profiles)
    return None if there is None else there.file


def test_a_second_replica_finds_what_the_first_compiled(
    tmp_path: Path,
    version: ModelVersion,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found(store(tmp_path, "second"), version, monkeypatch) is None
    share(tmp_path)
    there = found(store(tmp_path, "second"), version, monkeypatch)
    assert there is not None
    assert there.parts == (b"one", b"two")
    assert there.path.parent == tmp_path / "second" / "compiled"
    assert there.path.stat().st_mode & 0o077 == 0


def test_a_replica_that_compiles_nothing_itself_keeps_few(
    tmp_path: Path,
    version: ModelVersion,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "second" / "compiled"
    folder.mkdir(parents=True, mode=0o700)
    for number in range(40):
        earlier = folder / f"{number}{COMPILED}"
        earlier.write_bytes(b"of an earlier version")
        os.utime(earlier, (number, number))
    share(tmp_path)
    there = found(store(tmp_path, "second"), version, monkeypatch)
    assert there is not None
    assert len(list(folder.iterdir())) == 32


def test_a_model_without_code_of_its_own_gets_none(
    tmp_path: Path,
    version: ModelVersion,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    share(tmp_path)
    assert found(store(tmp_path, "second"), version, monkeypatch, module=None) is None
    assert not (tmp_path / "second" / "compiled").exists()


@pytest.mark.parametrize("how", ["another secret", "changed", "another name", "no digest"])
def test_what_was_not_written_by_these_servers_is_named_and_ignored(
    tmp_path: Path,
    version: ModelVersion,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    file = share(tmp_path, "another secret than" if how == "another secret" else SECRET)
    if how == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    elif how == "another name":
        data = file.read_bytes()
        monkeypatch.setattr(found_compiled, "name_of", lambda _key: f"other{COMPILED}")
        file.with_name(f"other{COMPILED}").write_bytes(data)
    elif how == "no digest":
        file.write_bytes((tmp_path / "first" / "compiled" / file.name).read_bytes())
    assert found(store(tmp_path, "second"), version, monkeypatch) is None
    assert "not written with the secret of these servers" in caplog.text
    assert not (tmp_path / "second" / "compiled").exists()


def test_what_is_too_large_is_neither_written_nor_read(
    tmp_path: Path,
    version: ModelVersion,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    share(tmp_path)
    monkeypatch.setattr(shared_artifacts, "MOST_BYTES", 64)
    assert found(store(tmp_path, "second"), version, monkeypatch) is None
    assert caplog.text.count("it has more than") == 1
    shared, _ = artifacts_of(store(tmp_path, "first"))
    assert shared is not None
    shared.share(written(tmp_path / "first" / "compiled"), "m")
    assert "larger than" in caplog.text


@pytest.mark.parametrize(
    ("place", "secret", "says"),
    [
        ("redis://127.0.0.1:1", SECRET, "a Redis server holds profiles, and not artifacts"),
        ("file:/mnt/shared", "", "give all servers the same cache_secret"),
        ("s3://bucket/profiles", "short", "give all servers the same cache_secret"),
    ],
)
def test_other_places_are_refused_with_a_sentence(place: str, secret: str, says: str) -> None:
    found = ProfileStore.of(None, place, secret)
    assert found is not None
    artifacts, why_not = artifacts_of(found)
    assert artifacts is None
    assert says in why_not


def test_of_a_folder_the_newest_stay_within_its_bytes(tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path, ".compiled", 100, budget=100)
    for number in range(4):
        folder.write(f"{number}.compiled", bytes(40))
        for path in tmp_path.iterdir():  # all others are older
            if path.name != f"{number}.compiled":
                seen = path.stat()
                os.utime(path, (seen.st_atime, seen.st_mtime - 10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.compiled", "3.compiled"]
    folder.write("large.compiled", bytes(200))
    assert [path.name for path in tmp_path.iterdir()] == ["large.compiled"], "the newest stays"
