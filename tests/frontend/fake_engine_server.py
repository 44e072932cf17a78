"""What the engine part of an extension has of its server, joined to a fake door instead."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from carpool.link.catalog import Catalog, PublishedServer
from frontend.fake_door import FakeDoor


class FakeEngineServer:
    """Implements `EngineServer`: what is published, the door has at once."""

    def __init__(self, door: FakeDoor, name: str) -> None:
        self.door = door
        self.settings: Any = SimpleNamespace()
        self._name = name
        self._offered: tuple[str, ...] = ()

    @property
    def catalog(self) -> Catalog:
        return self.door.catalog

    def offer(self, name: str) -> None:
        self._offered = (*self._offered, name)
        self.door.renew(server=PublishedServer(extensions=self._offered))

    def publish(self, extra: Mapping[str, Any]) -> None:
        self.door.renew(extra={**self.door.catalog.extra, self._name: extra})

    def serve(self, part: Any) -> None:
        for what, answer in part.questions.items():
            self.door.answers[f"{self._name}/{what}"] = answer
