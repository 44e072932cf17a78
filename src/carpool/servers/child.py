"""One process of the server, as whoever started it holds it: started, spoken to, watched to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from carpool.servers.link.control import Control, Message, control_pair


class Child:
    """A fresh interpreter: never a fork, since models and their libraries keep threads and devices.

    It gets a session of its own, so that a Ctrl-C in the terminal reaches the supervisor only.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """`python -m module arguments… fd`: the last is its end of the control socket. `environment` is added
        to ours, where that does not say otherwise."""
        ours, theirs = control_pair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *arguments, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**(environment or {}), **os.environ},
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:  # no descriptor is left: it must not live on unwatched
            ours.close()
            self._process.kill()
            self._process.wait()
            raise
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._ended.set)
        self._started = time.monotonic()
        self.control = Control(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age(self) -> float:
        return time.monotonic() - self._started

    def kill(self) -> None:
        """The number stays its own until `watch` has collected it, so nobody else is hit."""
        if self._process.returncode is None:
            self._process.kill()

    def abandon(self) -> None:
        """It cannot be used as it is, and nobody has begun to watch it: end it here and now."""
        self.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.control.close()

    async def watch(self, heard: Callable[[Message], None]) -> int:
        """Pass on what it says, to its last word, and return its exit code: negative for a signal."""
        while (message := await self.control.receive()) is not None:
            heard(message)
        await self._ended.wait()
        self._close()
        return self._process.wait()
