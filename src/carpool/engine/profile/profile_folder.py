"""Keeps what was measured in a folder: files that are small, read and written whole, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from carpool.config.regular_file import open_regular
from carpool.engine.profile.whole_file import keep_newest, write_whole

MOST_BYTES = 1 << 18
MOST_FILES = 256
SUFFIX = ".profile.json"


class SharedFiles(Protocol):
    """Both raise OSError for a place that cannot be reached."""

    where: str

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, data: bytes) -> None: ...


class ProfileFolder:
    """The newest are kept, of one suffix, by number and by bytes. What is longer than `most` is read one byte
    too far."""

    def __init__(
        self,
        folder: Path,
        suffix: str = SUFFIX,
        most: int = MOST_BYTES,
        budget: int = MOST_FILES * MOST_BYTES,
    ) -> None:
        self.where = str(folder)
        self._folder = folder
        self._suffix, self._most, self._budget = suffix, most, budget

    def read(self, name: str) -> bytes | None:
        try:
            with open_regular(self._folder / name) as file:
                return file.read(self._most + 1)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / name, (data,), mode=0o644)  # replicas may run as different users
        keep_newest(self._folder, self._suffix, MOST_FILES, self._budget)
