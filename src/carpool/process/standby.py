"""This module starts the server's processes as forks of a zygote that has imported what they need.

A process that died is there again within milliseconds, where a fresh one would import for seconds. The first
processes are forked from it, too: all of them share the memory of what was imported. One zygote serves every
role. A standby for each protocol would have to be replaced after each death, and would hold its own memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from carpool.link.child_process import Child
from carpool.link.forked_child import Zygote
from carpool.observe.logs import logger
from carpool.process.forking import PROCESSES

_FORKING = "carpool.process.forking"
_OURS = "carpool."
_ROOM = "-" * 64  # for the arguments that a forked process is shown with
_LOOK_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_log = logger("supervisor")


@dataclass(frozen=True, slots=True)
class Imports:
    """Lists what a process needs. One that is forked `before` has something to start first, and imports it
    itself."""

    names: Sequence[str]
    before: bool = False


class Standby:
    """Starts processes: a fork where that is possible, or else a fresh one."""

    def __init__(self) -> None:
        self._zygote: Zygote | None = None
        self._names: dict[str, None] = {}  # what the zygote has imported, or does
        self._is_first = True
        self._pause = _FIRST_PAUSE_S
        self._again: asyncio.TimerHandle | None = None
        self._closed = False

    def begin(self) -> None:
        """Starts the zygote; without one, processes are started all the same."""
        self._again = None
        try:
            child = Child(_FORKING, _ROOM, called="zygote")
        except OSError as error:
            _log.warning("zygote-not-started", error=str(error))
            self._begin_later()
            return
        self._zygote = Zygote(child, self._imported, self._gone, log=_log, look_s=_LOOK_S)
        _log.info("zygote-started", child=child.pid)
        if not self._is_first:
            self._zygote.bring(list(self._names))

    async def start(self, role: str, imports: Imports) -> Child:
        child = self._forked(role, imports)
        if child is not None:
            await child.begun.wait()
            if child.pid:
                return child
            await child.watch(lambda _: None)  # it never was
        return Child(PROCESSES, role)

    def _forked(self, role: str, imports: Imports) -> Child | None:
        """Returns None where the zygote is not ready. The first processes of a server wait until it is."""
        zygote = self._zygote
        if zygote is None or not zygote.usable or (zygote.imports and not self._is_first):
            return None
        missing = [name for name in imports.names if name not in self._names]
        self._names.update(dict.fromkeys(missing))
        child = zygote.fork(role, role) if imports.before and missing else None
        if missing:
            zygote.bring(missing, aside=False)
        return child or zygote.fork(role, role)

    def bring(self, names: Sequence[str]) -> None:
        """Imports in the zygote what a process has imported since its fork, for the next fork.

        Only modules of this package: what others import may start threads, which no fork survives.
        """
        missing = [name for name in names if name.startswith(_OURS) and name not in self._names]
        self._names.update(dict.fromkeys(missing))
        if missing and self._zygote is not None and self._zygote.usable:
            self._zygote.bring(missing)

    def _imported(self) -> None:
        if self._zygote is not None and not self._zygote.imports and self._names:
            _log.info("zygote-ready", child=self._zygote.pid)

    def _gone(self) -> None:
        if self._zygote is not None and not self._closed:
            _log.warning("zygote-ended", child=self._zygote.pid)
        self._zygote = None
        self._begin_later()

    def _begin_later(self) -> None:
        self._is_first = False
        if not self._closed:
            self._again = asyncio.get_running_loop().call_later(self._pause, self.begin)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def stop(self) -> None:
        """Ends the zygote: nothing is to be started any more, and what waits for a fork gets none."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        if self._zygote is not None:
            self._zygote.close()

    async def close(self) -> None:
        self.stop()
        if self._zygote is not None:
            await self._zygote.task
