"""Shared memory as a client makes it: a file in /dev/shm that it can shrink, fill and remove."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from carpool.memory.client_files import Region

_NUMBERS = count()


class ClientFile:
    def __init__(self, content: bytes) -> None:
        self.key = f"/carpool-test-{os.getpid()}-{next(_NUMBERS)}"
        self.path = Path("/dev/shm") / self.key[1:]
        with self.path.open("xb") as file:
            file.write(content)

    def read(self) -> bytes:
        return self.path.read_bytes()

    def write(self, content: bytes) -> None:
        """In place, as a client that has it mapped does."""
        with self.path.open("r+b") as file:
            file.write(content)

    def shrink(self, size: int) -> None:
        os.truncate(self.path, size)

    def region(self, name: str = "r", offset: int = 0, byte_size: int | None = None) -> Region:
        file = self.path.stat()
        size = file.st_size - offset if byte_size is None else byte_size
        return Region(next(_NUMBERS), name, self.key, offset, size, file.st_ino)

    def descriptors(self) -> int:
        """How many this process has of it, removed or not."""
        found = 0
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found += str(link.readlink()).removesuffix(" (deleted)") == str(self.path)
        return found


@contextlib.contextmanager
def client_file(content: bytes) -> Iterator[ClientFile]:
    file = ClientFile(content)
    try:
        yield file
    finally:
        file.path.unlink(missing_ok=True)
