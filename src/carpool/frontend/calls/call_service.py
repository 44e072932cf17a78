"""Holds what every request needs of its front end: the engine, memory, threads, counters, and what is wrapped
around the engine for its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import thread_time
from typing import TYPE_CHECKING

from carpool.frontend.calls.client_memory import ClientMemory
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.lane import Choice
from carpool.frontend.calls.request import LaneService
from carpool.frontend.calls.request_facts import Observer, SeesPictures
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.clients.fair_threads import FairThreads
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.observe.counters import Block, CounterRow, Row
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.frontend.pictures.picture_service import PictureService

_THREADS = 2  # few, so that long bodies and answers leave cores to the rest


class CallService(LaneService):
    """Serves the calls of one front end, and is used in its loop's thread only."""

    choose: Callable[[ModelEntry, Mapping[bytes, bytes], bool], Choice | None]
    """Returns what chooses between versions, for requests with these fields that name none."""

    def __init__(
        self,
        name: str,
        engine: EngineClient,
        block: Block,
        max_body_bytes: int,
        picture_threads: int,
        forward: ForwardedHeaders | None = None,
    ) -> None:
        self.forward = forward  # headers that models receive
        self.log = logger(name)
        self.engine = engine
        self.server_row = block.server
        self.max_body_bytes = max_body_bytes
        self.memory = ClientMemory(engine, max_body_bytes)
        self._picture_threads = picture_threads
        self.observers: tuple[Observer, ...] = ()
        self.see_pictures: tuple[SeesPictures, ...] = ()
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        self.charge_to(Accounts(0))
        self._block = block
        self._rows: dict[tuple[int, int], Row] = {}
        self._rows_of: Catalog | None = None

    def with_pictures(self) -> PictureService:
        """Returns what serves images, which a front end whose models take none never imports."""
        if not hasattr(self, "pictures"):
            from carpool.frontend.pictures.picture_service import PictureService

            self.pictures = PictureService(self.engine, self._picture_threads, self.row)
        return self.pictures

    def charge_to(self, accounts: Accounts) -> None:
        """Long work for a client is charged to these accounts from here on."""
        self.fair_threads = FairThreads(accounts, self.threads, _THREADS, _THREADS, thread_time)

    def row(self, entry: ModelEntry) -> Row:
        """Returns this process's counters for a model version, kept as long as the catalogue they were taken
        for."""
        catalog = self.engine.catalog
        if self._rows_of is not catalog:
            self._rows_of = catalog
            self._rows.clear()
        row = self._rows.get(entry.row)
        if row is None:
            row = self._rows[entry.row] = self._block.row(CounterRow(*entry.row))
        return row

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if hasattr(self, "pictures"):
            self.pictures.close()
