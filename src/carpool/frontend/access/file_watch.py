"""Files that are looked at every second, and what is done when they have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.observe.logs import logger

log = logger("access")

_EVERY_S = 1.0


class FileWatch:
    """Calls `changed` in its loop's thread. By time, size and inode: a link that points elsewhere counts."""

    def __init__(self, files: Sequence[str], changed: Callable[[], None]) -> None:
        self._files = files
        self._changed = changed
        self._seen = self._stamps()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._look_in_time)

    def look(self) -> None:
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps  # before it is read: what is written meanwhile is seen the next time
            self._changed()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_in_time(self) -> None:
        try:
            self.look()
        except Exception:  # the next look must come
            log.exception("file-watch-failed")
        self.start()

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(file) for file in self._files]


def _stamp(file: str) -> tuple[int, ...]:
    try:
        found = Path(file).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode
