"""Files that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
from pathlib import Path

_UNFINISHED = ".unfinished"


def write_whole(path: Path, data: bytes) -> None:
    """Under another name first: who reads `path` sees what was there before, or all of this."""
    unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)
