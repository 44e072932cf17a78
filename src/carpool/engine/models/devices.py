"""What models share: the engine's loop, and devices with one arbiter for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carpool.backends.backend import SharesDevice
from carpool.core.arbiter import Arbiter, Turn
from carpool.core.instance import Instance
from carpool.core.scheduler import Scheduler
from carpool.core.shares import Intake


class Devices:
    """Of one engine. A device is known by its name, and for as long as somebody uses it."""

    def __init__(self) -> None:
        self._arbiters: dict[str, Arbiter] = {}
        self._users: dict[str, int] = {}
        self._intake = Intake()

    def join(
        self, scheduler: Scheduler, backends: Sequence[object], weight: float, wake: Callable[[], None]
    ) -> Callable[[], None]:
        """These are the instances of one model; call what this returns when they are gone."""
        scheduler.entrance = self._intake.join()
        placed: dict[str, list[Instance]] = {}
        for instance, backend in zip(scheduler.instances, backends, strict=True):
            if isinstance(backend, SharesDevice) and backend.device:
                placed.setdefault(backend.device, []).append(instance)
        turns = [
            (device, self._of(device).join(scheduler, instances, weight, wake))
            for device, instances in placed.items()
        ]

        def leave() -> None:
            while turns:
                self._leave(*turns.pop())

        return leave

    def _of(self, device: str) -> Arbiter:
        self._users[device] = self._users.get(device, 0) + 1
        return self._arbiters.setdefault(device, Arbiter())

    def _leave(self, device: str, turn: Turn) -> None:
        self._arbiters[device].leave(turn)
        self._users[device] -= 1
        if not self._users[device]:
            del self._users[device], self._arbiters[device]
