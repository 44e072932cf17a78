"""What the engine's settings and registries see of the engine, joined to a fake door instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from carpool.link.catalog import Catalog, PublishedServer
from carpool.memory.client_files import OpenRegion, Region
from frontend.fake_door import FakeDoor


class FakeHost:
    """Questions that are taught to it are answered by the door; what it publishes, the door has at once."""

    def __init__(self, door: FakeDoor) -> None:
        self.door = door
        self.published = PublishedServer()
        self.region_names: Mapping[str, Region] = {}
        self.regions: dict[int, OpenRegion] = {}

    @property
    def catalog(self) -> Catalog:
        return self.door.catalog

    def on_question(self, what: str, answer: Any) -> None:
        self.door.answers[what] = answer

    def add_extension(self, name: str) -> None:
        self.published = replace(self.published, extensions=(*self.published.extensions, name))

    def publish(self) -> None:
        self.door.renew(server=self.published, regions=self.region_names)

    async def everyone_saw(self) -> None:
        """There is but one."""
