"""Which signals stop a server, and what becomes of the others: none ends it without a line in the log.

SIGTERM and SIGINT stop it. SIGHUP does so where the server was started in a terminal, which is then gone.
From a service manager it usually means "read your settings again", which a server does not do: it is logged,
and the server goes on. So it does after SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial

from carpool.link.child_process import OTHER_SIGNALS, STOP_SIGNALS
from carpool.observe.logs import Logger


@contextlib.contextmanager
def heard_signals(stop: Callable[[signal.Signals], None], log: Logger) -> Iterator[None]:
    """Calls `stop` in the running loop for a signal that stops a server, until the end of the block."""
    loop = asyncio.get_running_loop()
    handlers = dict.fromkeys(STOP_SIGNALS, stop) | dict.fromkeys(OTHER_SIGNALS, partial(_ignore, log))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
        del handlers[signal.SIGHUP]
    elif sys.stdin is not None and sys.stdin.isatty():
        handlers[signal.SIGHUP] = stop
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _ignore(log: Logger, number: signal.Signals) -> None:
    log.warning("signal-ignored", signal=number.name, message="it has no effect; SIGTERM stops the server")
