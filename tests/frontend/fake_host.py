"""What the engine's settings and registries see of the engine, joined to a fake door instead."""

from __future__ import annotations

from typing import Any

from carpool.link.door import Catalog
from carpool.memory.client_files import OpenRegion
from frontend.fake_door import FakeDoor


class FakeHost:
    """Questions that are taught to it are answered by the door; what it publishes, the door has at once."""

    def __init__(self, door: FakeDoor) -> None:
        self.door = door
        self.fields: dict[str, Any] = {}
        self.regions: dict[int, OpenRegion] = {}

    @property
    def catalog(self) -> Catalog:
        return self.door.catalog

    def on_question(self, what: str, answer: Any) -> None:
        self.door.answers[what] = answer

    def publish(self) -> None:
        self.door.renew(**self.fields)

    async def everyone_saw(self) -> None:
        """There is but one."""
