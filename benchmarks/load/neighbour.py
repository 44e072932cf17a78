"""A neighbour that takes half of the cores while it is told to: one busy process, pinned, on each of them.

Each waits on its pipe and ends when the pipe does, so that none outlives the program that began it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from load import processes

_GO, _REST = b"g", b"r"
_BUSY = """
import os, select, sys
os.sched_setaffinity(0, {core})
while (said := os.read(0, 1)):
    while said == b"g" and not select.select([0], [], [], 0)[0]:
        for _ in range(20_000):
            pass
"""


class Neighbour:
    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.cores = cores[len(cores) - max(1, len(cores) // 2) :]
        self._busy = [_start(core) for core in self.cores]

    def go(self) -> None:
        self._tell(_GO)

    def rest(self) -> None:
        self._tell(_REST)

    def cpu(self) -> dict[int, float]:
        """CPU seconds so far, by process."""
        found: dict[int, float] = {}
        for one in self._busy:
            found |= processes.tree_cpu(one.pid)
        return found

    def close(self) -> None:
        for one in self._busy:
            assert one.stdin is not None
            with contextlib.suppress(OSError):
                one.stdin.close()
        for one in self._busy:
            try:
                one.wait(5.0)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait(5.0)

    def _tell(self, word: bytes) -> None:
        for one in self._busy:
            assert one.stdin is not None
            one.stdin.write(word)


def _start(core: int) -> subprocess.Popen[bytes]:
    code = _BUSY.format(core=f"{{{core}}}")
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, bufsize=0)
