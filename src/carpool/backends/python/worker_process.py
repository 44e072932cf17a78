"""Represents the process of one Python model, seen from the server: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from carpool.backends.python.python_worker import Channel
from carpool.config.usable_cores import WAITING
from carpool.memory.batch_region import BatchRegion

_GRACE = 5.0  # seconds in which a process that is asked to end may clean up
PYTHON_WORKER = "carpool.backends.python.python_worker"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerDied(Exception):
    """The process is gone; the text says how it went."""


class WorkerTimeout(Exception):
    """Raised when the process sent nothing within its time limit."""


def _shares(threads: int | None) -> dict[str, str]:
    return {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))


class WorkerProcess:
    """Represents a fresh interpreter in a process group of its own, so that whatever it starts ends with it.

    It holds the other end of a pipe that is never written to. When the server ends, in whatever way, the
    kernel closes the server's end and kills the group: see `tie_to_server` in python_worker.py.
    """

    def __init__(self, threads: int | None, worker: str = PYTHON_WORKER, more: Sequence[int] = ()) -> None:
        """`worker` is the module that it runs; `more` are further files that it gets."""
        self.inputs = BatchRegion.create("carpool-inputs")
        self.outputs = BatchRegion.create("carpool-outputs")
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        fds = (
            theirs.fileno(),
            self.inputs.fd,
            self.outputs.fd,
            lifeline,
            *more,
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", worker, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a model prints is log, and belongs where the server's log goes
                pass_fds=fds,
                # The model's share of the cores, unless the user chose one.
                env={**WAITING, **_shares(threads), **os.environ},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._close_files()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._pidfd = os.pidfd_open(self._process.pid)
        self.channel = Channel(ours, self._wait_readable)
        self._events = select.poll()
        self._events.register(ours, select.POLLIN)
        self._events.register(self._pidfd, select.POLLIN)
        self._socket_fd = ours.fileno()
        self._ending = threading.Lock()
        self.deadline: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        with self._ending:
            return self._process.returncode is None and not _readable(self._pidfd, 0)

    def _wait_readable(self) -> None:
        """A child of the model may hold the socket open: the process is watched, not just the socket."""
        timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic()) * 1e3
        ready = {fd for fd, _ in self._events.poll(timeout)}
        if not ready:
            raise WorkerTimeout
        if self._socket_fd not in ready:
            raise WorkerDied(self.end())

    def kill(self) -> None:
        """Kills the process from any thread. The number stays ours until `end` collects the process, so
        no other process is hit."""
        with self._ending:
            if self._process.returncode is None:
                self._kill_group()

    def end(self) -> str:
        """Kills what is left, collects it, and says how the process ended."""
        with self._ending:
            if self._process.returncode is None:
                self._kill_group()
                self._process.wait()
        code = self._process.returncode
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def close(self) -> None:
        """Asks the process to end, insists after a while, and gives back every file."""
        self.channel.close()
        if self._lifeline >= 0:
            _readable(self._pidfd, _GRACE)
            self.end()
            os.close(self._pidfd)
            self._close_files()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close_files(self) -> None:
        os.close(self._lifeline)
        self._lifeline = -1
        self.inputs.close()
        self.outputs.close()


def _readable(fd: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1e3))
