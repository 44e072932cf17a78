"""Holds what every request needs of its front end: the door, memory, threads, counters, and what is wrapped
around the door for its model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from carpool.errors import CarpoolError
from carpool.frontend.calls.asking import Infers
from carpool.frontend.calls.client_memory import ClientMemory
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.sampling import Sampler
from carpool.link.door import Answer, Catalog, Door, ModelEntry
from carpool.observe.counters import Block, CounterRow, Row
from carpool.observe.logs import logger
from carpool.types import Timing

if TYPE_CHECKING:
    from carpool.frontend.calls.call import ClientCall

_THREADS = 2  # few, so that long bodies and answers leave cores to the rest


class Observer(Protocol):
    """Sees how requests end, in the loop's thread: it must not raise or take long."""

    def answered(self, call: ClientCall, answer: Answer, times: tuple[float, float, float]) -> None:
        """Notes that a call was answered well: when it was offered, when that was done, and now, by
        `time.monotonic()`."""

    def failed(self, call: ClientCall, error: CarpoolError, timing: Timing | None, now: float) -> None: ...


class CallService:
    """Serves the calls of one front end, and is used in its loop's thread only."""

    def __init__(
        self,
        name: str,
        door: Door,
        block: Block,
        max_body_bytes: int,
        picture_threads: int,
        forward: ForwardedHeaders | None = None,
    ) -> None:
        self.forward = forward  # headers that models are told
        self.log = logger(name)
        self.door = door
        self.features: dict[int, Infers] = {}  # by the entry's key: for models that have more than the door
        self.server_row = block.server
        self.max_body_bytes = max_body_bytes
        self.memory = ClientMemory(door, max_body_bytes)
        self.pictures = PictureService(door, picture_threads, self.row)
        self.observers: tuple[Observer, ...] = ()
        self.sampler: Sampler | None = None  # while a model is watched for drift
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        self._block = block
        self._rows: dict[tuple[int, int], Row] = {}
        self._rows_of: Catalog | None = None

    def row(self, entry: ModelEntry) -> Row:
        """Returns this process's counters for a model version, kept as long as the catalogue they were taken
        for."""
        catalog = self.door.catalog
        if self._rows_of is not catalog:
            self._rows_of = catalog
            self._rows.clear()
        row = self._rows.get(entry.row)
        if row is None:
            row = self._rows[entry.row] = self._block.row(CounterRow(*entry.row))
        return row

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.pictures.close()
