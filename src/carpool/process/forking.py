"""This is the zygote of the server's processes: `python -m carpool.process.forking ROOM CONTROL_FD`.

It imports what the engine and the front ends need and forks them. `standby.py` starts it. This file itself
imports little, so that a zygote that replaces another one can do the rest with low priority.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from carpool.link.zygote_process import import_all, live_as_zygote

PROCESSES = "carpool.process.children"
ENGINE, FRONTEND = "engine", "frontend"
_ARG_START, _ARG_END = 45, 46  # of /proc/self/stat, behind the name


def bring(names: Sequence[str], aside: bool) -> str:
    import_all((PROCESSES, *names), aside=aside)
    return ""


def _live(role: str, fd: int) -> NoReturn:
    show_as(PROCESSES, role, str(fd))
    from carpool.process.children import live_as  # the zygote has imported it by now

    live_as(role, fd)


def show_as(*words: str) -> None:
    """Makes `ps` and /proc show a forked process like one that was started with these arguments, behind the
    interpreter's own. Where they do not fit, or /proc says nothing, it looks like its zygote."""
    with suppress(OSError, ValueError, IndexError):
        _show_as(words)


def _show_as(words: Sequence[str]) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    kept = Path("/proc/self/cmdline").read_bytes().split(b"\0")[: len(sys.orig_argv) - len(sys.argv)]
    shown = b"\0".join([*kept, *map(str.encode, words), b""])
    if start > 0 and len(shown) <= end - start:
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    live_as_zygote(int(sys.argv[-1]), (), bring, {role: partial(_live, role) for role in (ENGINE, FRONTEND)})
