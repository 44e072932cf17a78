"""What all calls of the gRPC front end share, besides what every front end has: what is under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from carpool.errors import CarpoolError, Unavailable
from carpool.frontend.front_service import FrontService
from carpool.frontend.grpc.infer_messages import Families
from carpool.frontend.packing import AT_ONCE
from carpool.link.door import Door
from carpool.memory.spare_memory import SpareMemory
from carpool.observe.counters import Block
from carpool.observe.logs import logger

T = TypeVar("T")

log = logger("grpc")

MOST_BYTES_IN_FLIGHT = 512 << 20
"""Of messages whose calls are under way: more are refused, those that are known by then before they come."""


class Service(FrontService):
    """`with` it, every call is counted while it lasts."""

    def __init__(self, door: Door, block: Block, max_body_bytes: int, picture_threads: int = 1) -> None:
        super().__init__("grpc", door, block, max_body_bytes, picture_threads)
        self.families = Families()
        self._spare_memory = SpareMemory(self.threads)
        self.stopping = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = 0
        self.in_flight = 0  # bytes of messages

    @property
    def ready(self) -> bool:
        catalog = self.door.catalog
        return self.door.serving and catalog.ready and catalog.able and not self.stopping.is_set()

    async def aside(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """Work on so many bytes: in a thread, if everybody else would have to wait for it."""
        if size <= AT_ONCE:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    @contextlib.contextmanager
    def holding(self, message: bytes) -> Iterator[CarpoolError | None]:
        """Count a message while its call lasts; gives the refusal if there are too many."""
        size = len(message)
        full = self.is_full(size)
        self.in_flight += size
        try:
            yield too_many_messages() if full else None
        finally:
            self.in_flight -= size
            self._spare_memory.freed(size)

    def is_full(self, more: int = 0) -> bool:
        return self.in_flight > 0 and self.in_flight + more > MOST_BYTES_IN_FLIGHT

    def __enter__(self) -> None:
        """A call begins, which is to be finished before the server stops."""
        self.running += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()

    def close(self) -> None:
        self._spare_memory.close()
        super().close()


def too_many_messages() -> Unavailable:
    return Unavailable("too many messages are under way at once; try again", reason="busy")
