"""What makes instances fast, prepared after all of them answer: graphs first, then compiled programs."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from carpool.backends.backend import Backend
from carpool.observe.logs import logger

_log = logger("runner")
_QUIET_S = 0.5  # without anybody who waits for an instance
_FIRST_PAUSE_S, _TRIES = 1.0, 4


class _Job(NamedTuple):
    model: str
    load: Callable[[], Backend]
    use: Callable[[Backend], None]
    event: str


class Later:
    """One at a time, in a thread of its own, and only while nobody waits for an instance to be opened: a
    model that does not answer at all comes before one that answers slowly. What makes an instance whole comes
    after what makes another one nearly as fast in far less time."""

    def __init__(self) -> None:
        self._soon: deque[_Job] = deque()
        self._last: deque[_Job] = deque()
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

    def add(
        self, model: str, load: Callable[[], Backend], use: Callable[[Backend], None], *, whole: bool = True
    ) -> None:
        job = _Job(model, load, use, "instance-whole" if whole else "instance-captured")
        with self._changed:
            (self._last if whole else self._soon).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="later", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                waited = not self._is_free()
                self._changed.wait_for(self._is_free)
            if waited:
                time.sleep(_QUIET_S)
            with self._changed:
                if not self._is_free():
                    continue
                job = (self._soon or self._last).popleft()
            _prepare(job)

    def _is_free(self) -> bool:
        return bool(self._soon or self._last) and not self._opening


def _prepare(job: _Job) -> None:
    """Where it fails for good, the instance goes on as it is: slower, and right."""
    began, pause = time.monotonic(), _FIRST_PAUSE_S
    for tried in range(1, _TRIES + 1):
        try:
            job.use(job.load())
        except Exception as error:
            _log.warning("instance-not-whole", model=job.model, error=str(error), tries=tried)
            time.sleep(pause)
            pause *= 2
        else:
            _log.info(job.event, model=job.model, seconds=round(time.monotonic() - began, 3))
            return
