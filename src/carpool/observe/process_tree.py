"""Finds the processes that a process has started, and reads what the kernel says of them.

Files of /proc are read without Python's layers for paths, text and buffers: the supervisor does it every
second, and an idle server is to cost next to nothing.
"""

from __future__ import annotations

import os


def family(pid: int) -> list[int]:
    """Returns this process and all that it has started, as far as the system says."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        try:
            for task in os.listdir(f"/proc/{one}/task"):  # noqa: PTH208 - half the time
                todo += map(int, read_proc(f"{one}/task/{task}/children").split())
        except OSError:
            continue  # it has ended, or the system does not list them
    return found


def read_proc(name: str) -> bytes:
    with open(f"/proc/{name}", "rb", buffering=0) as file:  # noqa: PTH123 - half the time
        return file.read()


def anonymous_bytes(pid: int) -> int:
    """Returns the memory that a process has for itself: no files, no shared memory; 0 if it has ended."""
    try:
        _, found, value = read_proc(f"{pid}/status").partition(b"RssAnon:")
    except OSError:
        return 0
    return int(value.split(None, 1)[0]) * 1024 if found else 0
