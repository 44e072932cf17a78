"""Watches a server that is one process (`--frontends 0`) from outside, and kills it when it hangs.

`python -m carpool.process.lone_watch PULSES_FD SECONDS LOG_FORMAT`, started by that process. It
is restarted only by what started that process: a service manager, say.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

from carpool.config.server import ServerSettings
from carpool.link.child_process import belong_to_parent
from carpool.memory.arena import create_memory, map_memory
from carpool.memory.pulse import BEAT_S, Beats, Pulses, Watch, pulse_bytes
from carpool.observe.logs import configure, logger, stream

log = logger("server")


@contextlib.contextmanager
def watched(settings: ServerSettings) -> Iterator[None]:
    """Lets a second process watch whether the running loop moves, until the end of the block."""
    if not settings.watchdog_s:
        yield
        return
    file = create_memory("carpool-pulse", pulse_bytes(1))
    pulses = Pulses(map_memory(file))
    command = [sys.executable, "-P", "-m", __name__, str(file), str(settings.watchdog_s), settings.log_format]
    watcher = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stream(), pass_fds=[file], start_new_session=True
    )
    os.close(file)
    beats = Beats(partial(pulses.beat, 0))
    try:
        yield
    finally:
        beats.stop()
        watcher.kill()
        watcher.wait()


def main(file: str, seconds: str, log_format: str) -> None:
    belong_to_parent()
    parent = os.getppid()
    configure(log_format, "info", 1)
    watch = Watch(partial(Pulses(map_memory(int(file))).read, 0))
    while os.getppid() == parent:
        time.sleep(BEAT_S)
        still = watch.look()
        if watch.begun and still >= float(seconds):
            log.error("process-hangs", role="server", child=parent, still_s=round(still, 1))
            os.kill(parent, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
