"""What requests need of their front end, over every protocol: the door, memory, counters and threads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from carpool.errors import CarpoolError, NotFound, Unavailable
from carpool.frontend.client_memory import ClientMemory
from carpool.frontend.demands import Demands, NotLoaded
from carpool.frontend.documents import served_versions
from carpool.frontend.forwarded_headers import ForwardedHeaders
from carpool.frontend.front_caches import CacheParts, Caches
from carpool.frontend.mirror import Mirror
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.routing import Routing
from carpool.frontend.sampling import Sampler
from carpool.frontend.tracing import Tracer
from carpool.link.door import UNLOADED, Answer, Catalog, Door, ModelEntry
from carpool.observe.counters import Block, Row
from carpool.observe.counters import Slot as CounterRow
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.frontend.call import ClientCall

_LONGEST_SHOWN = 80
_MOST_COMPARED = 5
_MOST_LOOKED_AT = 200
_THREADS = 2  # few, so that long bodies and answers leave cores to the rest


def is_model_ready(door: Door, entry: ModelEntry) -> bool:
    return door.serving and entry.key not in door.catalog.down


def not_serving() -> Unavailable:
    return Unavailable(
        "the server is starting, draining or restarting its engine, or the engine does not respond",
        reason="not-serving",
    )


def _absent(catalog: Catalog, name: str, version: str) -> CarpoolError:
    """In Triton's words, which clients match on, and then what we know beyond them."""
    shown = name if len(name) <= _LONGEST_SHOWN else name[:_LONGEST_SHOWN] + "…"
    asked = f"Request for unknown model: '{shown}'"
    if version:
        asked += f" version {version[:_LONGEST_SHOWN]}"
    not_ready = f"{asked} is not at ready state" if version else f"{asked} has no available versions"
    lines = [line for line in catalog.index if line.name == name and version in ("", line.version)]
    for line in lines:
        if line.state in ("LOADING", "UNAVAILABLE") and line.reason != UNLOADED:
            why = f": {line.reason}" if line.reason else ""
            sentence = f"{not_ready}; it is {line.state.lower()}{why}"
            if name in catalog.on_demand:
                return NotLoaded(sentence, name)
            return Unavailable(sentence, reason="model-not-ready")
    was_loaded = any(line.state for line in lines)
    if name in catalog.newest:
        served = ", ".join(served_versions(catalog, name))
        sentence = not_ready if was_loaded else f"{asked} is not found"
        return NotFound(f"{sentence}; it serves {served}", reason="unknown-version")
    if was_loaded:
        return NotFound(f"{not_ready}; it is not loaded", reason="model-not-loaded")
    if lines:
        return NotFound(
            f"{asked} is not found; it is in the repository, but not loaded", reason="model-not-loaded"
        )
    near = _nearest(shown, catalog)
    hint = f"; did you mean '{near}'?" if near else ""
    return NotFound(f"{asked} is not found{hint}", reason="unknown-model")


def _nearest(name: str, catalog: Catalog) -> str | None:
    """What may have been meant. Comparing two names takes as long as refusing a request, so only a few of
    many are compared: those with the most letters in common."""
    known: Iterable[str] = catalog.newest
    if len(catalog.newest) > _MOST_COMPARED:
        letters = set(name)
        first = islice(catalog.newest, _MOST_LOOKED_AT)
        known = nlargest(_MOST_COMPARED, first, key=lambda one: len(letters.intersection(one)))
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None


class Observer(Protocol):
    """Sees every request that was answered well, in the loop's thread: it must not raise or take long."""

    def answered(self, call: ClientCall, answer: Answer) -> None: ...


class FrontService:
    """One per front end, used in its loop's thread only."""

    def __init__(
        self,
        name: str,
        door: Door,
        block: Block,
        max_body_bytes: int,
        picture_threads: int,
        cache: CacheParts | None = None,
        forward: ForwardedHeaders | None = None,
    ) -> None:
        self.forward = forward  # headers that models are told
        self.log = logger(name)
        self.door = door
        self.server_row = block.server
        self.max_body_bytes = max_body_bytes
        self.memory = ClientMemory(door, max_body_bytes)
        self.tracer = Tracer(door)
        self.routing = Routing(door)
        self.pictures = PictureService(door, picture_threads, self.row)
        self.demands = Demands(door)
        self.observers: tuple[Observer, ...] = ()
        self.sampler: Sampler | None = None  # while a model is watched for drift
        self._sampling = Sampler(door, self.pictures.workers)
        self.caches = Caches(door, block, cache or CacheParts())
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=name)
        self.mirror = Mirror(door, self.pictures, self.threads, self.row)
        self._block = block
        self._rows: dict[tuple[int, int], Row] = {}
        self._rows_of: Catalog | None = None
        door.watch(self._follow)

    def _follow(self, catalog: Catalog) -> None:
        self.sampler = self._sampling if self._sampling.follow(catalog) else None
        others = tuple(one for one in self.observers if one is not self._sampling)
        self.observers = others if self.sampler is None else (*others, self.sampler)

    def look_up(self, name: str, version: str = "") -> ModelEntry:
        """The version asked for or the newest; raises `NotFound`, `Unavailable` when it may come, or
        `NotLoaded` when that is only to be asked for."""
        catalog = self.door.catalog
        entry = catalog.entries.get((name, version)) if version else catalog.newest.get(name)
        if entry is None:
            if not self.door.serving:
                raise not_serving()
            error = _absent(catalog, name, version)
            # While a start goes on, as after the end of an engine, what is not there yet may come.
            raise not_serving() if isinstance(error, NotFound) and not catalog.ready else error
        return entry

    def row(self, entry: ModelEntry) -> Row:
        """This process's counters for a model version, kept as long as the catalogue they were taken for."""
        catalog = self.door.catalog
        if self._rows_of is not catalog:
            self._rows_of = catalog
            self._rows.clear()
        row = self._rows.get(entry.row)
        if row is None:
            row = self._rows[entry.row] = self._block.row(CounterRow(*entry.row))
        return row

    def close(self) -> None:
        self.tracer.close()
        self.demands.close()
        self._sampling.close()
        self.mirror.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.pictures.close()
        self.caches.close()
