"""Becomes another program that ends with the process that started it, at once and in every case.

    python -I -S leash.py PID PROGRAM ARGUMENT…

An actor of Ray may be killed at any time, and what it started must not stay behind. Only a process can ask
for this itself, and what it asked for stays true for the program that it becomes. Setting it between fork and
exec would run Python in a copy of a process with many threads, whose locks may be held for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1


def start_on_leash(
    command: Sequence[str], environment: Mapping[str, str], output: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own. Call it from a thread that lives as long as the child may:
    the kernel takes the end of that thread for the end of the parent."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it ended before that was set
        os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
