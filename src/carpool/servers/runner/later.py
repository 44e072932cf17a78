"""What makes instances fast, prepared after all of them answer: compiled programs and graphs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from carpool.backends.backend import Backend
from carpool.observe.logs import logger

_log = logger("runner")
_QUIET_S = 0.5  # without anybody who waits for an instance
_FIRST_PAUSE_S, _TRIES = 1.0, 4


class Later:
    """One at a time, in a thread of its own, and only while nobody waits for an instance to be opened: a
    model that does not answer at all comes before one that answers slowly."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, Callable[[], Backend], Callable[[Backend], None]]] = deque()
        self._changed = threading.Condition()
        self._opening = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._changed:
            self._opening += 1
        try:
            yield
        finally:
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    def add(self, model: str, load: Callable[[], Backend], use: Callable[[Backend], None]) -> None:
        with self._changed:
            self._queue.append((model, load, use))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="later", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue and not self._opening)
            time.sleep(_QUIET_S)
            with self._changed:
                if self._opening:
                    continue
                model, load, use = self._queue.popleft()
            self._prepare(model, load, use)

    def _prepare(self, model: str, load: Callable[[], Backend], use: Callable[[Backend], None]) -> None:
        """Where it fails for good, the instance goes on as it is: slower, and right."""
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        for tried in range(1, _TRIES + 1):
            try:
                use(load())
            except Exception as error:
                _log.warning("instance-not-whole", model=model, error=str(error), tries=tried)
                time.sleep(pause)
                pause *= 2
            else:
                _log.info("instance-whole", model=model, seconds=round(time.monotonic() - began, 3))
                return
