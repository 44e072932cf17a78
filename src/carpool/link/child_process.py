"""One process of the server, as whoever started it holds it: started, spoken to, watched to its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from carpool.link.control_messages import Control, Message, control_pair
from carpool.observe.logs import stream
from carpool.observe.output import Output, read_some

_LAST_READS = 64  # of what a process wrote before it ended: more than a pipe holds


class Child:
    """A fresh interpreter: never a fork, since models and their libraries keep threads and devices.

    It gets a session of its own, so that a Ctrl-C in the terminal reaches the supervisor only. Its standard
    output is the log, for its logger (`keep_stream`); its standard error is a pipe that is read here.
    """

    def __init__(
        self, module: str, *arguments: str, called: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """`python -m module arguments… fd`: the last is its end of the control socket. `environment` is added
        to ours, where that does not say otherwise; the log knows it as `called`, or by its first argument."""
        ours, theirs = control_pair()
        try:
            self._written, writing = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *arguments, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=stream(),
                    stderr=writing,
                    pass_fds=[theirs.fileno()],
                    env={**(environment or {}), **os.environ},
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            os.close(self._written)
            raise
        finally:
            os.close(writing)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except BaseException:  # no descriptor is left: it must not live on unwatched
            ours.close()
            os.close(self._written)
            self._process.kill()
            self._process.wait()
            raise
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._ended.set)
        self._output = Output(process=called or arguments[0], child=self.pid)
        os.set_blocking(self._written, False)
        self._loop.add_reader(self._written, self._read_output)
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
        self._close_output()

    async def watch(self, heard: Callable[[Message], None]) -> int:
        """Pass on what it says, to its last word, and return its exit code: negative for a signal."""
        while (message := await self.control.receive()) is not None:
            heard(message)
        await self._ended.wait()
        self._close()
        return self._process.wait()

    def _read_output(self) -> bool:
        """Whether there was something."""
        data = read_some(self._written)
        if data:
            self._output.feed(data)
        elif data is not None:
            self._loop.remove_reader(self._written)  # its end: everybody who could write is gone
        return bool(data)

    def _close_output(self) -> None:
        """Its last words; what it started itself may still have the pipe, and is not waited for."""
        for _ in range(_LAST_READS):
            if not self._read_output():
                break
        self._loop.remove_reader(self._written)
        os.close(self._written)
        self._output.close()
