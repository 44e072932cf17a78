"""The supervisor's eye on its children: who stands still is told of, then killed, and so started again."""

from __future__ import annotations

from functools import partial

from carpool.link.child_process import Child
from carpool.memory.pulse import STALE_S, START_S, Pulses, Watch
from carpool.observe.logs import logger

_log = logger("supervisor")


class Guarded:
    """One process under watch, from its start to its end."""

    def __init__(self, role: str, child: Child, watch: Watch) -> None:
        self._role = role
        self._child = child
        self._watch = watch
        self._stalled = False
        self.up = False  # until then it imports, which may hold its interpreter lock for long

    def look(self, kill_after: float) -> None:
        still = self._watch.look()
        if self.up and (still >= STALE_S) != self._stalled:
            self._stalled = not self._stalled
            if self._stalled:
                _log.warning("process-stalled", role=self._role, child=self._child.pid)
            else:
                _log.info("process-moves-again", role=self._role, child=self._child.pid)
        limit = kill_after if self.up else max(kill_after, START_S)
        if kill_after and still >= limit:
            _log.error("process-hangs", role=self._role, child=self._child.pid, still_s=round(still, 1))
            self._child.kill()


class Watchdog:
    """`kill_after` seconds without a sign of life; 0: nobody is killed. `look` is for every `BEAT_S`."""

    def __init__(self, pulses: Pulses, kill_after: float) -> None:
        self._pulses = pulses
        self._kill_after = kill_after
        self._guarded: dict[int, Guarded] = {}

    def begin(self, cell: int, role: str, child: Child) -> None:
        """This process has just been started and is the only one that counts up this cell."""
        self._guarded[cell] = Guarded(role, child, Watch(partial(self._pulses.read, cell)))

    def came_up(self, cell: int) -> None:
        if cell in self._guarded:
            self._guarded[cell].up = True

    def end(self, cell: int) -> None:
        """Its process has ended: what it left in its cell says nothing about the next."""
        self._guarded.pop(cell, None)
        self._pulses.clear(cell)

    def look(self) -> None:
        for guarded in list(self._guarded.values()):
            guarded.look(self._kill_after)
