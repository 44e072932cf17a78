"""How far a server is that loads its models: lines for whoever watches, now and then one for the log."""

from __future__ import annotations

import asyncio
import sys
import time

from carpool.observe.logs import logger

_WATCHED_S = 5.0
_LOGGED_S = 10.0


class LoadingProgress:
    """Told every step, in the loop's thread; a step may take minutes, so that the time goes on being told."""

    def __init__(self, models: int) -> None:
        self._models = models
        self._seen: list[str] = []
        self._step = ""
        self._began = time.monotonic()
        self._watched = sys.stdout.isatty()
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def told(self, model: str, step: str) -> None:
        if self._over:
            return  # a restarted engine is a line in the log, not a new beginning
        self._step = step
        if model not in self._seen:
            self._seen.append(model)
            if self._watched:
                self._say()
        if self._timer is None:
            self._wait()

    def end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        every = _WATCHED_S if self._watched else _LOGGED_S
        self._timer = asyncio.get_running_loop().call_later(every, self._remind)

    def _remind(self) -> None:
        self._say()
        self._wait()

    def _say(self) -> None:
        number, of, model = len(self._seen), max(self._models, len(self._seen)), self._seen[-1]
        seconds = round(time.monotonic() - self._began)
        if self._watched:
            print(f"  {number} of {of}: {model}, {self._step} ({seconds} s)", flush=True)
        else:
            logger("server").info(
                "loading", model=model, step=self._step, number=number, of=of, seconds=seconds
            )
