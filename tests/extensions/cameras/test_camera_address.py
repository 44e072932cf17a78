"""Which cameras are meant by what was typed, what they are called, and that passwords are shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.errors import InvalidInput
from carpool.extensions.cameras.camera_address import MOST_CAMERAS, find_cameras


def test_files_and_folders(tmp_path: Path) -> None:
    for name in ("gate.mp4", "in/gate.MKV", "in/deep/yard.avi", "in/.thumbs/x.mp4", "in/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find_cameras([str(tmp_path / "gate.mp4"), str(tmp_path / "in")])
    assert [camera.name for camera in found] == ["gate", "yard", "gate-2"]
    assert not any(camera.live for camera in found)
    other = find_cameras([str(tmp_path / "in" / "notes.txt")])
    assert other[0].name == "notes", "whoever names a file means it, whatever its ending"


@pytest.mark.parametrize(
    ("address", "name", "shown"),
    [
        ("rtsp://10.0.0.7/stream1", "10.0.0.7/stream1", "rtsp://10.0.0.7/stream1"),
        ("rtsp://me:hunter2@gate:554/a?pass=hunter2", "gate:554/a", "rtsp://gate:554/a"),
        ("rtsps://:hunter2@[fe80::1]/", "[fe80::1]", "rtsps://[fe80::1]/"),
        ("http://me:hunter2@h/video.mjpg", "h/video.mjpg", "http://h/video.mjpg"),
    ],
)
def test_streams(address: str, name: str, shown: str) -> None:
    [camera] = find_cameras([address])
    assert (camera.name, camera.shown, camera.live, camera.address) == (name, shown, True, address)
    assert "hunter2" not in f"{camera!r} {camera}"


def test_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    [camera] = find_cameras(["/dev/null"])  # as good as any
    assert camera.live
    assert camera.is_device
    assert camera.name == "null"


def test_a_list_of_cameras(tmp_path: Path) -> None:
    listed = tmp_path / "cameras.txt"
    listed.write_text("# ours\n\ngate  rtsp://me:hunter2@10.0.0.7/1\nrtsp://10.0.0.8/1\n")
    found = find_cameras(["rtsp://first/1"], listed)
    assert [camera.name for camera in found] == ["first/1", "gate", "10.0.0.8/1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no camera"),
        (["absent.mp4"], "absent.mp4: no such video, folder or camera"),
        (["ftp://:hunter2@host/x"], "a stream's address begins with rtsp://"),
        (["rtsp://:hunter2@"], "a stream's address begins with"),
        (["rtsp://:hunter2@h:port/"], "a stream's address begins with"),
        (["concat:a|b"], "no such video"),
        (["rtsp://h/"] * (MOST_CAMERAS + 1), "1001 cameras are more than"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        find_cameras(words)
    assert message in caught.value.message
    assert "hunter2" not in caught.value.message


def test_lists_and_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="no videos in this folder"):
        find_cameras([str(tmp_path / "empty")])
    wrong = tmp_path / "list.txt"
    for content, message in (
        (b"gate rtsp://:hunter2@h/ and more", "line 1: it must be 'name address'"),
        (b"\xff\xfe", "cannot be read"),
        (b"x" * (1 << 21), "larger than"),
        (b"# nobody", "no camera"),
    ):
        wrong.write_bytes(content)
        with pytest.raises(InvalidInput) as caught:
            find_cameras([], wrong)
        assert message in caught.value.message
        assert "hunter2" not in caught.value.message
    with pytest.raises(InvalidInput, match="cannot be read"):
        find_cameras([], tmp_path / "absent.txt")


def test_names_fit_into_a_header(tmp_path: Path) -> None:
    file = tmp_path / f"Höf 3 {'x' * 200}.mp4"
    file.write_bytes(b"")
    [camera] = find_cameras([str(file)])
    assert camera.name.isascii()
    assert " " not in camera.name
    assert len(camera.name) <= 100
