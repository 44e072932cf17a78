"""How much of the machine went to others while servers were loaded."""

import os
import time
from collections.abc import Callable

from load import processes
from load.processes import MachineCpu
from load.slices import MAX_OTHER, MAX_STEAL


def others_took(before: MachineCpu, after: MachineCpu, ours: float) -> float:
    """CPU seconds that neither we nor our children spent, and those that the host took.

    Interrupts are shared out as the rest is: the traffic over loopback that a server and its load make is
    handled in them, and many kernels charge no process for it.
    """
    interrupts = after.interrupts - before.interrupts
    worked = after.busy - before.busy - interrupts
    others = max(0.0, worked - ours)
    if others:
        others += interrupts * others / worked
    return others + max(0.0, after.steal - before.steal)


class Disturbance:
    """Watches from when it is made. `server` reads the CPU seconds of a server's processes, which may be
    children of this one; all other children belong to the load. To look through all processes takes time
    itself: the machine's time is read after that at first and before it in the end: it is nobody's."""

    def __init__(self, server: Callable[[], dict[int, float]]) -> None:
        self._server = server
        self._before = server()
        self._ours = self._all_ours()
        self._machine = processes.machine()
        self._began = time.monotonic()

    def read(self) -> tuple[float, float, float]:
        """Shares of all cores since then: the server's, the load's, and what others or the host took."""
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        machine = processes.machine()
        server = processes.spent(self._before, self._server())
        ours = max(server, self._all_ours() - self._ours)
        others = others_took(self._machine, machine, ours)
        return server / cores, (ours - server) / cores, others / cores

    def _all_ours(self) -> float:
        """Of this process and all below it, and of a server that somebody else is the parent of."""
        below = processes.tree_cpu(os.getpid())
        elsewhere = sum(seconds for pid, seconds in self._server().items() if pid not in below)
        return processes.tree_total(os.getpid()) + elsewhere


def is_quiet(others: float) -> bool:
    return others <= MAX_OTHER + MAX_STEAL
