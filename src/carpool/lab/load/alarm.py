"""Wakes the generator to the microsecond: uvloop's own timers tick in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Callable

_MONOTONIC = 1  # CLOCK_MONOTONIC, which time.monotonic() reads
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_TIMES = struct.Struct("@qqqq")  # interval and first time, each in seconds and nanoseconds


class Alarm:
    """One time at which `ring` is called; setting it again forgets the earlier one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set_time = libc.timerfd_settime
        self._buffer = ctypes.create_string_buffer(_TIMES.size)
        self._loop = loop
        self._ring = ring
        self._again = False
        self._fd: int = libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._rung)

    def set(self, at: float) -> None:
        """`at` is on the clock of `time.monotonic()`; what has passed rings at once."""
        self._again = True
        at = max(at, 1e-9)  # zero would turn it off
        seconds = int(at)
        _TIMES.pack_into(self._buffer, 0, 0, 0, seconds, int((at - seconds) * 1e9))
        self._set_time(self._fd, _ABSOLUTE, self._buffer, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _rung(self) -> None:
        self._again = False
        self._ring()
        if not self._again:  # setting it anew also makes it silent, and saves a call
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)
