"""How a benchmark that starts servers is run: what it says on the way, and how it ends.

Nothing that it started lives on, also if it is interrupted or told to stop: whatever is below it is told to
end at once, servers are stopped on the way out as always, and what is left then is killed. A child whose own
parent died meanwhile is the benchmark's again, and one that began a session of its own is still below it. If
the benchmark itself is killed, those started with `tied()` go with it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from carpool.lab.load.generator import collect_rarely
from load.processes import tree_cpu

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING_S = 10.0  # for servers that finish what they have
_libc = ctypes.CDLL(None)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tied() -> Callable[[], None] | None:
    """For `preexec_fn`: it dies with us. But what another thread starts would die with that thread."""
    return _die_with_parent if threading.current_thread() is threading.main_thread() else None


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_program(main: Callable[[], int | None], name: str, *errors: type[Exception]) -> None:
    """These errors are one line on stderr; nothing is left running, however it ends."""
    collect_rarely()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        sys.exit(main())
    except errors as error:
        sys.exit(f"{name}: {error}")
    finally:
        end_children()


def _stop(number: int, _frame: FrameType | None) -> None:
    """Once. Threads that wait for a load generator, or for an answer, come back when it is gone."""
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    _send(signal.SIGTERM)
    sys.exit(128 + number)


def end_children() -> None:
    """Whatever is still below this process: first told, then killed."""
    until = time.monotonic() + _ENDING_S
    _send(signal.SIGTERM)
    while time.monotonic() < until and _left():
        time.sleep(0.05)
    while _left():  # one may have started another just before
        _send(signal.SIGKILL)
        time.sleep(0.01)


def _left() -> set[int]:
    """Processes below this one; those that have ended are collected."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return set(tree_cpu(os.getpid())) - {os.getpid()}


def _send(number: int) -> None:
    for pid in set(tree_cpu(os.getpid())) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
