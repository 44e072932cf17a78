"""Writes what a verb makes: whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from carpool.errors import CarpoolError


class CannotWrite(CarpoolError):
    """Means that the file system takes no such file: it is full, read-only, or not ours."""

    exit_code = 1

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} cannot be written: {error.strerror or error}")


def write_file(path: Path, content: str | bytes) -> None:
    """A file that is there keeps its permissions, and its content if the new one cannot be written. A pipe or
    a device, such as /dev/stdout, takes it as it comes, and is not replaced."""
    from carpool.engine.profile.whole_file import write_whole

    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        file = path.resolve()
        try:
            write_whole(file, (data,), file.stat().st_mode & 0o777 if file.exists() else _usual_mode())
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            file.write_bytes(data)  # it is mounted by itself, as in a container: no other can take its place
    except OSError as error:
        raise CannotWrite(path, error) from None


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(path, error) from None


def _usual_mode() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
