"""Tests of files that verbs write where users say."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from carpool.cli.written_files import CannotWrite, write_file


def test_what_is_no_file_takes_the_content_and_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, "{}")
        assert pipe.is_fifo()
        assert os.read(reader, 16) == b"{}"
    finally:
        os.close(reader)
    with pytest.raises(CannotWrite):
        write_file(tmp_path, "{}")
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_file_that_is_mounted_by_itself_is_written_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    file = tmp_path / "model.toml"
    file.write_text("what it had, which is longer")
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, busy)
    write_file(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]
