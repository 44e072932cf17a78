"""Files that come with a request stay where they were put, and go when nobody needs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.loading.loadable import Upload, check_files, remove_abandoned
from carpool.errors import CarpoolError, ConfigError, InvalidInput


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model.onnx",
        "/1/model.onnx",
        "1/",
        "1//model.onnx",
        "1/../model.onnx",
        "../1/model.onnx",
        "1/..",
        "1/.hidden",
        "1/./model.onnx",
        "1\\model.onnx",
        "1/a\0b",
        "1/a\nb",
        "0/model.onnx",
        "01/model.onnx",
        "latest/model.onnx",
        "1/" + "x/" * 150 + "y",
    ],
)
def test_names_that_could_end_up_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"must be named like 1/model\.onnx"):
        check_files({name: b""})


def test_a_name_too_long_for_a_file_is_nobodys_input() -> None:
    """Triton calls it internal, and its example for gRPC checks that."""
    with pytest.raises(CarpoolError, match="too long for any file") as caught:
        check_files({"A" * 256: b""})
    assert type(caught.value) is CarpoolError


def test_there_may_not_be_too_many() -> None:
    with pytest.raises(InvalidInput, match="more than"):
        check_files({f"1/{n}": b"" for n in range(1001)})


@given(st.text(max_size=40))
def test_whatever_is_accepted_lies_inside(name: str) -> None:
    try:
        check_files({name: b"x"})
    except CarpoolError:
        return
    upload = Upload("m", {name: b"x"})
    try:
        (file,) = [path for path in upload.folder.rglob("*") if path.is_file()]
        assert file.resolve().is_relative_to(upload.folder.resolve())
        assert file.read_bytes() == b"x"
    finally:
        upload.leave()
    assert not upload.folder.exists()


def test_the_folder_goes_with_its_last_user() -> None:
    upload = Upload("m", {"1/model.onnx/model.onnx": b"graph", "1/model.onnx/weights": b"w"})
    upload.join()
    assert (upload.folder / "1/model.onnx/weights").read_bytes() == b"w"
    upload.leave()
    assert upload.folder.exists()
    upload.leave()
    assert not upload.folder.parent.exists()


def test_a_file_cannot_be_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InvalidInput, match="cannot be written"):
        Upload("m", {"1/a": b"", "1/a/b": b""})
    assert list(tmp_path.iterdir()) == []


def test_a_model_needs_a_name_that_is_one() -> None:
    with pytest.raises(ConfigError, match="cannot be a model's name"):
        Upload("../m", {"1/a": b""})


def test_what_a_killed_process_left_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = Upload("mine", {"1/a": b""})
    code = (
        "import os, signal; from carpool.engine.loading.loadable import Upload;"
        "Upload('theirs', {'1/model.py': b'secret'}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)
    assert len(list(tmp_path.iterdir())) == 2
    assert remove_abandoned() == 1
    assert list(tmp_path.iterdir()) == [mine.folder.parent]
    mine.leave()
    assert remove_abandoned() == 0


def test_only_what_surely_is_an_abandoned_upload_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "in-use.lock").touch()
    (tmp_path / "carpool-model-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "carpool-model-file").touch()
    (tmp_path / "carpool-model-new").mkdir()  # its lock comes next
    (tmp_path / "carpool-model-odd").mkdir()
    (tmp_path / "carpool-model-odd" / "in-use.lock").symlink_to(tmp_path / "elsewhere" / "in-use.lock")
    old = tmp_path / "carpool-model-old"
    old.mkdir()
    os.utime(old, (1.0, 1.0))
    before = set(tmp_path.iterdir())
    assert remove_abandoned() == 1
    assert before - set(tmp_path.iterdir()) == {old}


def test_a_folder_that_was_removed_already_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    upload = Upload("m", {"1/a": b""})
    shutil.rmtree(upload.folder.parent)
    upload.leave()
