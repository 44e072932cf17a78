"""How much of the machine went to others while one server was loaded."""

import os
import time
from collections.abc import Callable

from load import processes
from load.slices import MAX_OTHER, MAX_STEAL, own_cpu


class Disturbance:
    """Watches from when it is made. `server` reads the CPU seconds of a server's processes."""

    def __init__(self, server: Callable[[], dict[int, float]]) -> None:
        self._server = server
        self._before = server()
        self._machine = processes.machine()
        self._own = own_cpu()
        self._began = time.monotonic()

    def read(self) -> tuple[float, float, float]:
        """Shares of all cores since then: the server's, this process's, and what others or the host took."""
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        now = processes.machine()
        server = processes.spent(self._before, self._server())
        own = own_cpu() - self._own
        busy = now.busy - self._machine.busy - server - own + now.steal - self._machine.steal
        return server / cores, own / cores, max(0.0, busy) / cores


def is_quiet(others: float) -> bool:
    return others <= MAX_OTHER + MAX_STEAL
