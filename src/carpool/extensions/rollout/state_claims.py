"""Sees to it that one server writes a model's state: two that did would overwrite what the other decided.

A file beside the state is locked for as long as a server lives, and names its holder. The kernel lets go when
that process ends, however it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import NamedTuple

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
_LONGEST = 200  # bytes of a holder's name


class Held(NamedTuple):
    """Says why the rollout of a model does not go on by itself."""

    why: str
    elsewhere: bool = False  # another server has its state, and this one waits for its end
    serving: str = ""  # the version that the state names, where it can be read


class StateClaims:
    """Holds the claims of one server. `holder` is what others are shown of it."""

    def __init__(self, holder: str) -> None:
        self._holder = holder.encode(errors="replace")[:_LONGEST]
        self._locks: dict[Path, int] = {}

    def take(self, file: Path) -> str:
        """Claims the state in this file; returns the name of the server that has it, if it is not ours now.
        Raises OSError."""
        if file in self._locks:
            return ""
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), _FLAGS, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise OSError(f"{file.with_suffix('.lock')} is not a regular file")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = os.pread(lock, _LONGEST, 0).decode("utf-8", "replace")
                os.close(lock)
                return found if found.isprintable() and found else "another process"
            with contextlib.suppress(OSError):  # a full disk: the claim holds without a name
                os.ftruncate(lock, 0)
                os.pwrite(lock, self._holder, 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(lock)
            raise
        self._locks[file] = lock
        return ""

    def has(self, file: Path) -> bool:
        return file in self._locks

    def close(self) -> None:
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()
