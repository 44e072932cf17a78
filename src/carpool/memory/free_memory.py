"""Gives memory that was freed, and that the C library keeps, back to the system after large messages."""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Executor
from pathlib import Path

_LARGE = 1 << 20  # bytes; smaller pieces are soon used again
_WORTH_IT = 16 << 20
_AFTER_S = 1.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_OWN_PAGES = 4 << 20
_LARGEST_SHARED = 32 << 20  # more than that is never put among others
_KEPT = 8 << 20


def large_blocks_apart() -> None:
    """Puts large blocks into pages of their own, given back when they are freed: for a process that has
    few."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of the GNU C library
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES)


def give_back() -> None:
    """Gives back what the C library keeps of the memory that this process freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)


def own_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Returns resident bytes of this process that are neither files nor shared memory; 0 where they are not
    known."""
    try:
        lines = status.read_text("ascii", "replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


class FreeMemory:
    """Belongs to the loop's thread. Gives back in another, at most once a second: it takes some
    milliseconds."""

    def __init__(self, threads: Executor, *, decodes: bool = False) -> None:
        """Prepares for threads that, with `decodes`, use what they free again and again: pictures, while they
        are decoded."""
        self._threads = threads
        self._freed = 0
        self._soon: asyncio.TimerHandle | None = None
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)  # of the GNU C library
        if self._trim is None:
            return
        # By itself the library puts large blocks among the others once one was freed, where a trim leaves
        # most of them, and lets each thread keep twice the largest.
        if decodes:
            library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_SHARED)
            library.mallopt(_M_TRIM_THRESHOLD, _KEPT)
        else:
            large_blocks_apart()

    def freed(self, size: int) -> None:
        """A message of so many bytes is not needed any more."""
        if size < _LARGE or self._trim is None:
            return
        self._freed += size
        if self._freed >= _WORTH_IT and self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._freed = 0
        self._soon = None
        assert self._trim is not None
        asyncio.get_running_loop().run_in_executor(self._threads, self._trim, 0)

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
