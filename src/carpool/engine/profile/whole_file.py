"""Writes files atomically, and keeps folders of them small."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from pathlib import Path

UNFINISHED = ".part"
_MOST_UNFINISHED = 8  # others may be writing them


def write_whole(file: Path, pieces: Iterable[bytes], mode: int = 0o600) -> None:
    """Replaces a file atomically: a concurrent reader sees the old content or the new. Raises OSError and
    removes what it wrote, which would keep a full disk full."""
    with tempfile.NamedTemporaryFile("wb", dir=file.parent, suffix=UNFINISHED, delete=False) as part:
        unfinished = Path(part.name)
        try:
            for piece in pieces:
                part.write(piece)
            part.flush()
            unfinished.chmod(mode)
            unfinished.replace(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def keep_newest(folder: Path, suffix: str, most: int, budget: float = inf) -> None:
    """Keeps the newest files of one suffix, by number and by bytes, and little of what killed processes left
    half written."""
    for each, number in ((suffix, most), (UNFINISHED, _MOST_UNFINISHED)):
        found = []
        for path in folder.glob(f"*{each}"):
            with suppress(FileNotFoundError):  # another process tidies, too
                seen = path.stat()
                found.append((seen.st_mtime, path, seen.st_size))
        total = 0
        for at, (_, path, size) in enumerate(sorted(found, reverse=True)):
            total += size
            if at and (at >= number or total > budget):
                with suppress(OSError):
                    path.unlink()
