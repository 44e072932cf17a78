"""The gate's advice: what the engine would say to a newcomer now, so that front ends can say it at once.

The engine writes its verdict after every turn; a front end that refuses on it spares reading the body. It is
advice only: whatever passes is offered to the engine, whose word is law. Refusals are reported in bulk, so
that the engine still knows the rate that is asked of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from carpool.core.job import Job, Reason, Refusal
from carpool.core.scheduler import Scheduler
from carpool.core.shares import ORDINARY
from carpool.engine.refusals import refused
from carpool.errors import CarpoolError
from carpool.servers.door import ModelEntry

WriteGate: TypeAlias = Callable[..., None]
ReadGate: TypeAlias = Callable[[int], tuple[float, ...] | None]

_REASONS = list(Reason)
_OPEN = -1.0
_STALE_S = 0.05  # an engine that is busy turns far more often: older advice says nothing
_REPORT_S = 0.02


def publish(write: WriteGate, key: int, scheduler: Scheduler, now: float) -> None:
    """Write the verdict on a newcomer with the whole promise ahead of it. Fair shares need the engine."""
    alike = all(lane.level == ORDINARY and not lane.source for lane in scheduler.lanes)
    refusal = scheduler.refuses(Job(now), now) if alike else None
    if refusal is None:
        write(key, now, _OPEN, 0.0, 0.0)
    else:
        code = float(_REASONS.index(refusal.reason))
        write(key, now, code, refusal.predicted_finish, refusal.retry_after)


class Advice:
    """A front end's reading of the gate."""

    def __init__(self, read: ReadGate, ask: Callable[[str, Any], Coroutine[Any, Any, Any]]) -> None:
        self._read = read
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._refused: Counter[tuple[int, str]] = Counter()
        self._report: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def __call__(self, entry: ModelEntry, deadline: float, now: float) -> CarpoolError | None:
        if entry.slo is None:
            return None
        row = self._read(entry.key)
        if row is None:
            return None
        written, code, predicted_finish, retry_after = row
        if code == _OPEN or now - written > _STALE_S:
            return None
        reason = _REASONS[int(code)]
        self._refused[entry.key, reason.value] += 1
        if self._report is None:
            self._report = self._loop.call_later(_REPORT_S, self._send_report)
        job = Job(now, min(deadline, now + entry.slo))
        finish = predicted_finish - written + now
        return refused(entry.name, job, Refusal(reason, finish, retry_after), knobs=False)

    def _send_report(self) -> None:
        self._report = None
        counts = [[key, reason, count] for (key, reason), count in self._refused.items()]
        self._refused.clear()
        task = self._loop.create_task(self._tell({"refused": counts}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, counts: dict[str, Any]) -> None:
        try:
            await self._ask("refused", counts)
        except CarpoolError:
            """The engine is gone: the next one starts with its own count."""
