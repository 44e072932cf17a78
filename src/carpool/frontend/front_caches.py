"""The caches of one front end: what is kept for each model, in how much memory, and how it is counted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from carpool.cache.answer_store import AnswerStore, Doorkeeper, Room
from carpool.cache.cache_key import FORMAT, Digests, describe
from carpool.cache.similar import SimilarFrames
from carpool.cache.twins import Twins
from carpool.config.cache_settings import CacheSettings
from carpool.link.door import Catalog, Door, ModelEntry
from carpool.observe import columns
from carpool.observe.counters import Block, Row
from carpool.observe.counters import Slot as CounterRow
from carpool.vision.picture_answers import Options
from carpool.wire.v2 import RequestHead

if TYPE_CHECKING:
    from carpool.frontend.cached_call import Lookup

MIB = 1 << 20
_RECENT = 256
_MOST_DESCRIBED = 256
_NOTED_EVERY_S = 1.0
_WORTH_READING = 20  # one of so many hits: then bodies are read although the gate says no


class Told:
    """What an answer says about the cache: in our own words, and in those of RFC 9211; and its header."""

    __slots__ = ("fields", "kind", "status", "words")

    def __init__(self, words: str, status: str, kind: str) -> None:
        self.words = words
        self.status = status
        self.kind = kind  # as it is counted
        self.fields = f"X-Carpool-Cache: {words}\r\nCache-Status: carpool; {status}\r\n".encode()


MISS = Told("miss", "fwd=miss", "miss")
STORED = Told("miss", "fwd=miss; stored", "miss")
JOINED = Told("joined", "fwd=miss; collapsed", "joined")
OFF = Told("off", "fwd=bypass", "bypass")


def hit(kind: str, age: float, ttl: float, more: str = "") -> Told:
    counted = {"exact": "hit"}.get(kind, kind)
    return Told(f"hit; kind={kind}{more}; age={age:.1f}", f"hit; ttl={ttl - age:.0f}", counted)


def told_of_all(each: Sequence[Told | None]) -> bytes:
    """Of the pictures of one request, in their order; an error says nothing here."""
    known = [told for told in each if told is not None]
    if not known:
        return b""
    worst = next((told for told in known if not told.status.startswith("hit")), known[0])
    return Told(", ".join(told.words for told in known), worst.status, "").fields


class Shared(Protocol):
    """Answers that servers share, as `cache.redis_client` has them."""

    @property
    def up(self) -> bool: ...

    timeouts: int

    def get(self, key: bytes, then: Callable[[bytes | None], None]) -> None: ...
    def put(self, key: bytes, value: bytes, ttl_s: float) -> None: ...
    def close(self) -> None: ...


class CacheParts(NamedTuple):
    """What a front end may keep, and with whom it shares."""

    most_bytes: int = 64 * MIB
    secret: str = ""
    shared: Shared | None = None


class ModelCache:
    """The cache of one model's version, as long as the catalogue has it. Counts what it has."""

    def __init__(self, entry: ModelEntry, row: Row) -> None:
        assert entry.cache is not None
        self.entry = entry
        self.row = row
        self.settings = CacheSettings(**entry.cache)
        self.prefix = f"{FORMAT}\0{entry.name}\0{entry.digest}\0".encode()
        self._described: dict[tuple[object, ...], tuple[bytes | None, object, object]] = {}
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self._hits = 0

    def describe(
        self, form: str, head: RequestHead, options: Options | None, drawn: str | None
    ) -> bytes | None:
        """As `cache_key.describe`, of heads and options that come again and again, the very objects."""
        key = form, id(head), id(options), drawn
        known = self._described.get(key)
        if known is None:
            if len(self._described) >= _MOST_DESCRIBED:
                self._described.clear()
            # Both are kept, so that nothing else can get their numbers.
            self._described[key] = known = describe(form, head, (), options, drawn), head, options
        return known[0]

    def entered(self, size: int) -> None:
        self.row.add(columns.CACHE_ENTRIES)
        self.row.add(columns.CACHE_BYTES, size)

    def left(self, size: int, why: str) -> None:
        self.row.add(columns.CACHE_ENTRIES, -1)
        self.row.add(columns.CACHE_BYTES, -size)
        self.row.add(columns.CACHE_EVICTED[why])

    def count(self, kind: str, seconds: float) -> None:
        row = self.row
        row.add(columns.CACHE_RESULTS[kind])
        if kind == "bypass":
            return
        found = kind != "miss"
        row.add(columns.CACHE_HIT_SECONDS if found else columns.CACHE_MISS_SECONDS, seconds)
        if len(self._recent) == _RECENT:
            self._hits -= self._recent[0]
        self._recent.append(found)
        self._hits += found

    @property
    def holds_back(self) -> bool:
        """Whether the gate's no waits until the request was looked up."""
        return self._hits * _WORTH_READING >= max(1, len(self._recent))


class Caches:
    """One per front end. What looks is made when the first model comes that keeps answers."""

    digests: Digests
    doorkeeper: Doorkeeper

    def __init__(self, door: Door, block: Block, parts: CacheParts) -> None:
        self._block = block
        self._parts: CacheParts | None = parts
        self._door = door
        self._models: dict[int, ModelCache] = {}  # by the entry's key
        self._cleared: Mapping[str, int] = {}
        room = Room(parts.most_bytes)
        self.store = AnswerStore(room)
        self.similar = SimilarFrames(room)
        self.twins: Twins[Lookup] = Twins()
        self.shared = parts.shared
        self._noting: asyncio.TimerHandle | None = None
        door.watch(self._renewed)

    def of(self, entry: ModelEntry) -> ModelCache:
        found = self._models.get(entry.key)
        if found is None or found.entry is not entry:
            self._forget(entry.key, "reload")
            if self._parts is not None:  # the first that keeps answers
                self.digests, self.doorkeeper, self._parts = Digests(self._parts.secret), Doorkeeper(), None
                if self.shared is not None:
                    self._note_shared(self.shared)
            row = self._block.row(CounterRow(*entry.row))
            found = self._models[entry.key] = ModelCache(entry, row)
        return found

    def _renewed(self, catalog: Catalog) -> None:
        """What is not served any more, or was cleared by somebody, goes."""
        known = {entry.key: entry for entry in catalog.entries.values()}
        for key, model in list(self._models.items()):
            if known.get(key) is not model.entry:
                self._forget(key, "reload")
            elif catalog.cleared.get(model.entry.name, 0) != self._cleared.get(model.entry.name, 0):
                self._forget(key, "cleared")
        self._cleared = catalog.cleared

    def _forget(self, key: int, why: str) -> None:
        model = self._models.pop(key, None)
        if model is not None:
            self.store.clear(lambda owner: owner is model, why)
            self.similar.clear(model.prefix)

    def is_current(self, entry: ModelEntry) -> bool:
        """An answer that another version may have computed must not be kept for this one."""
        return self._door.catalog.entries.get((entry.name, entry.version)) is entry

    def _note_shared(self, shared: Shared, told: int = 0) -> None:
        """For the metrics, once a second."""
        row, timeouts = self._block.server, shared.timeouts
        row.set(columns.CACHE_SHARED_UP, float(shared.up))
        row.add(columns.CACHE_SHARED_TIMEOUTS, timeouts - told)
        again = asyncio.get_running_loop().call_later(_NOTED_EVERY_S, self._note_shared, shared, timeouts)
        self._noting = again

    def close(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
        if self.shared is not None:
            self.shared.close()
