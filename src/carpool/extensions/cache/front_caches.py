"""Holds the caches of one front end: what is stored for each model, in how much memory, and how it is
counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import random
from secrets import token_hex
from time import monotonic
from typing import NamedTuple, Protocol

from carpool.extensions.cache import counted
from carpool.extensions.cache.answer_store import AnswerStore, Doorkeeper, Entry, Room
from carpool.extensions.cache.cache_key import (
    FORMAT,
    WISH_FIELD,
    Digests,
    Said,
    Wish,
    describe,
    read_cache_control,
)
from carpool.extensions.cache.cache_status import CacheStatus, hit
from carpool.extensions.cache.settings import CacheSettings
from carpool.extensions.cache.similar import PictureLook, SimilarFrames, SourceAnswers, is_audited, see
from carpool.frontend.calls.front_part import FrontServer
from carpool.frontend.calls.lane import EarlyLook, UnreadPicture
from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.frontend.pictures.sent_pictures import ASKED_ON_A_ROUTE
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.senders import Sender
from carpool.observe.counters import Row
from carpool.vision.picture_answers import Options
from carpool.wire.v2 import Buffer, RequestHead

MIB = 1 << 20
MOST_BYTES = 16 << 20
"""Of a request that is looked up: what takes longer to read twice is not worth it."""
_RECENT = 256  # looks; at so many, half of what was counted is forgotten
_MOST_DESCRIBED = 1024
_EXACT_PART = 0.01  # of the share of similar ones: what differs there is a model that is not always the same
_NOTED_EVERY_S = 1.0
_SOON_S = 0.1
LOOKED_AT_ONCE = 64 * 1024  # bytes of a picture that is seen in the loop: about what a thread costs, too
_WORTH_READING = 20  # if one of so many is a hit, bodies are read although the gate rejects the request


class SharedAnswers(Protocol):
    """Defines answers that servers share, as `link.redis_client` has them."""

    @property
    def up(self) -> bool: ...
    @property
    def is_prompt(self) -> bool: ...

    timeouts: int

    def get(self, key: bytes, then: Callable[[bytes | None], None]) -> None: ...
    def put(self, key: bytes, value: bytes, ttl_s: float) -> None: ...
    def lasts(self, key: bytes, then: Callable[[float | None], None]) -> None: ...
    def mark(self, name: str, then: Callable[[bytes | None], None]) -> None: ...
    def set_mark(self, name: str, word: bytes, then: Callable[[bytes | None], None]) -> None: ...
    def close(self) -> None: ...


class Question(NamedTuple):
    """Describes what is looked up: what identifies it besides its bytes, and those, in pieces."""

    form: str
    head: RequestHead
    pieces: Sequence[Buffer]
    sender: Sender
    wish: Wish
    options: Options | None = None
    drawn: str | None = None
    is_picture: bool = False

    @property
    def has_scene(self) -> bool:
        """It is one picture of a source that has a name."""
        return self.is_picture and len(self.pieces) == 1 and self.drawn is None and bool(self.sender.named)


class Hit(NamedTuple):
    """Describes an answer that is known. `source` and `change` are of one to another picture that shows the
    same."""

    kept: EncodedAnswer
    status: CacheStatus
    age: float
    source: SourceAnswers | None = None
    change: float = 0.0


class Looked(NamedTuple):
    """Describes what was found: an answer, or what has the same fast digest, and whether its scene was looked
    at."""

    said: Said
    fast: int = 0
    hit: Hit | None = None
    audited: bool = False  # the hit is to be computed all the same, and compared
    entry: Entry | None = None
    at_scene: bool = False
    source: SourceAnswers | None = None
    seen: PictureLook | None = None


NAME = "cache"  # of the extension, in what a catalogue says of it


class CacheParts(NamedTuple):
    """Defines what a front end may keep, and with whom it shares."""

    most_bytes: int = 64 * MIB
    secret: str = ""
    shared: SharedAnswers | None = None


class ModelCache:
    """Implements the cache of one model's version, as long as the catalogue has it. Counts what it has."""

    def __init__(self, entry: ModelEntry, row: Row, digests: Digests) -> None:
        said = entry.extra[NAME]
        self.entry = entry
        self.row = row
        self.settings = CacheSettings(**said["settings"])
        self.prefix = f"{FORMAT}\0{entry.name}\0{entry.version}\0{said['digest']}\0".encode()
        self._digests = digests
        self._by_source = self.settings.scope == "source"
        self._described: dict[tuple[object, ...], tuple[Said | None, object, object]] = {}
        self._ways: dict[tuple[object, ...], tuple[bytes, object, object]] = {}
        self._looks = self._hits = 0  # of the last ones

    def said(
        self, form: str, head: RequestHead, options: Options | None, drawn: str | None, sender: Sender
    ) -> Said | None:
        """Returns what identifies a request besides its bytes; None for one that is never looked up. Of heads
        and options that come again and again, the very objects, it is known already."""
        whose = sender.source if self._by_source else sender.holder
        key = form, id(head), id(options), drawn, whose
        known = self._described.get(key)
        if known is not None:
            return known[0]
        text = describe(form, head, (), options, drawn)
        made = None if text is None else self._digests.said(b"%b%b\0%b" % (self.prefix, whose.encode(), text))
        if head.plain or not head.inputs:  # others may hold what was sent, as long as they are kept
            if len(self._described) >= _MOST_DESCRIBED:
                self._described.clear()
            # Both are retained, so that nothing else can get their numbers.
            self._described[key] = made, head, options
        return made

    def way(self, form: str, head: RequestHead, options: Options | None, sender: Sender) -> bytes:
        """Returns what a picture has in common with others of its source that are asked for in the same way:
        all but its length."""
        key = form, id(head), id(options), sender.source
        known = self._ways.get(key)
        if known is not None:
            return known[0]
        text = describe(form, head, (), options, sizes=False) or b""
        made = b"%b\0%b\0%b" % (self.prefix, sender.source.encode(), text)
        if head.plain or not head.inputs:
            if len(self._ways) >= _MOST_DESCRIBED:
                self._ways.clear()
            self._ways[key] = made, head, options
        return made

    def is_audited(self, source: SourceAnswers | None, now: float) -> bool:
        """Returns whether the turn of this hit has come. Without a source, it is the same request again."""
        if source is None:
            return random() < self.settings.audit * _EXACT_PART
        return is_audited(source, self.settings, now)

    def entered(self, size: int) -> None:
        self.row.add(counted.ENTRIES)
        self.row.add(counted.BYTES, size)

    def left(self, size: int, why: str) -> None:
        self.row.add(counted.ENTRIES, -1)
        self.row.add(counted.BYTES, -size)
        self.row.add(counted.EVICTED[why])

    def count(self, kind: str, seconds: float) -> None:
        row = self.row
        row.add(counted.RESULTS[kind])
        if kind == "bypass":
            return
        if kind == "miss":
            row.add(counted.MISS_SECONDS, seconds)
        else:
            row.add(counted.HIT_SECONDS, seconds)
            self._hits += 1
        self._looks += 1
        if self._looks >= _RECENT:
            self._looks //= 2
            self._hits //= 2

    @property
    def holds_back(self) -> bool:
        """Returns whether a rejection by the gate waits until the request was looked up."""
        return self._hits * _WORTH_READING >= max(1, self._looks)


def exact_hit(entry: Entry, now: float) -> Hit:
    age = now - entry.at
    return Hit(entry.kept, hit("exact", age, entry.ends - entry.at), age)


class Caches:
    """Holds the caches of one front end. What looks is made for the first model whose answers are cached.

    What is shared has its model's mark in the key: a word that is renewed, for all servers, when the model's
    answers are cleared. While it is not known, nothing of that model is shared. To delete what there is
    instead, a server would have to walk through all that Redis holds, and could not reach what others have in
    their own memory.
    """

    digests: Digests
    doorkeeper: Doorkeeper

    def __init__(self, server: FrontServer, parts: CacheParts) -> None:
        self._server = server
        self._parts: CacheParts | None = parts
        self._entries: Mapping[tuple[str, str], ModelEntry] = {}
        self._models: dict[int, ModelCache] = {}  # by the entry's key
        self._cleared: Mapping[str, int] = {}
        room = Room(parts.most_bytes)
        self.store = AnswerStore(room)
        self.similar = SimilarFrames(room)
        self.computing: dict[int, object] = {}  # by fast digest: look-ups that others may join
        self.shared = parts.shared
        self.marks: dict[str, bytes] = {}  # by model
        self._shared_looks, self._shared_hits = 0, 1  # lately; at first it is worth a try
        self._timeouts = 0  # of `shared`, that were counted
        self._noting: asyncio.TimerHandle | None = None

    def of(self, entry: ModelEntry) -> ModelCache:
        found = self._models.get(entry.key)
        if found is None or found.entry is not entry:
            self._forget(entry.key, "reload")
            if self._parts is not None:  # the first whose answers are cached
                self.digests, self.doorkeeper, self._parts = Digests(self._parts.secret), Doorkeeper(), None
                if self._noting is None and self.shared is not None:
                    self._note(self.shared)
            row = self._server.row(entry)
            found = self._models[entry.key] = ModelCache(entry, row, self.digests)
        return found

    def holds_back(self, entry: ModelEntry) -> bool:
        return self.of(entry).holds_back

    def known(self, model: ModelCache, asked: Question, now: float) -> Looked | None:
        """Returns the one look for an answer, as far as it takes no thread. None: this is neither looked up
        nor kept."""
        form, head, pieces, sender, wish, options, drawn, is_picture = asked
        said = model.said(form, head, options, drawn, sender)
        size = len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces))
        if said is None or size > MOST_BYTES or not (wish.look or wish.keep):
            return None
        if is_picture and len(pieces) != 1:  # tensors' lengths are known by what is said of them
            said = self.digests.said(said.text + repr(list(map(len, pieces))).encode())
        fast = 0
        if model.settings.exact:
            fast = self.digests.fast(said, pieces)
            entry = self.store.get(fast, now) if wish.look and fast in self.store.entries else None
            if entry is not None and now - entry.at <= wish.max_age:
                if not entry.is_same(said.text, pieces):
                    return Looked(said, fast, entry=entry)  # whether it is the same is still to be found out
                return Looked(said, fast, exact_hit(entry, now), model.is_audited(None, now))
            if fast in self.computing:
                return Looked(said, fast)
        if model.settings.similar and size <= LOOKED_AT_ONCE and wish.look and asked.has_scene:
            return self._look_at_scene(model, asked, Looked(said, fast), now)
        return Looked(said, fast)

    def _look_at_scene(self, model: ModelCache, asked: Question, looked: Looked, now: float) -> Looked:
        source = self.source(model, asked)
        if not source.wants_a_look(now):
            return looked._replace(at_scene=True)
        seen = see(asked.pieces[0], model.settings)
        hit = self.similar_hit(model, source, seen, asked.wish, now)
        if hit is None:
            return looked._replace(at_scene=True, source=source, seen=seen)
        audited = model.is_audited(source, now)
        return looked._replace(hit=hit, audited=audited, at_scene=True, source=source, seen=seen)

    def source(self, model: ModelCache, asked: Question) -> SourceAnswers:
        return self.similar.source(model.way(asked.form, asked.head, asked.options, asked.sender))

    def similar_hit(
        self, model: ModelCache, source: SourceAnswers, seen: PictureLook | None, wish: Wish, now: float
    ) -> Hit | None:
        """Returns what was computed of another picture that shows the same."""
        if seen is None or not wish.look:
            return None
        found = self.similar.look(source, seen, model.settings, now, wish.max_age)
        if found is None:
            return None
        age, ttl = now - found.frame.at, model.settings.similar_ttl_s
        status = hit("similar", age, ttl, f"; change={found.change:.1f}")
        return Hit(found.frame.kept, status, age, source, found.change)

    def look_early(self, entry: ModelEntry, unread: UnreadPicture) -> EarlyLook:
        """Looks for the answer to a picture before anything of it is read. One that is to be audited goes its
        way, which ends in the same answer."""
        model, began, sender = self.of(entry), monotonic(), unread.sender
        wish = read_cache_control(unread.fields.get(WISH_FIELD))
        given = sender, wish, unread.options, unread.drawn
        asked = Question(unread.form, ASKED_ON_A_ROUTE, (unread.picture,), *given, is_picture=True)
        looked = self.known(model, asked, began)
        if looked is None or looked.hit is None or looked.audited:
            return EarlyLook(looked)
        hit = looked.hit
        model.row.observe(counted.AGE, hit.age)
        model.count(hit.status.kind, monotonic() - began)
        return EarlyLook(looked, hit.kept, hit.status)

    def follow(self, catalog: Catalog) -> None:
        """Drops what is not served any more, and what was cleared."""
        self._entries = catalog.entries
        known = {entry.key: entry for entry in catalog.entries.values()}
        cleared: Mapping[str, int] = catalog.extra.get(NAME, {}).get("cleared", {})
        for key, model in list(self._models.items()):
            if known.get(key) is not model.entry:
                self._forget(key, "reload")
            elif cleared.get(model.entry.name, 0) != self._cleared.get(model.entry.name, 0):
                self._forget(key, "cleared")
        if self.shared is not None and any(NAME in entry.extra for entry in known.values()):
            for name in cleared:
                if cleared[name] != self._cleared.get(name, 0):
                    self.marks.pop(name, None)
            with suppress(RuntimeError):  # no loop runs yet
                self._note(self.shared)
        self._cleared = cleared

    def _forget(self, key: int, why: str) -> None:
        model = self._models.pop(key, None)
        if model is not None:
            self.store.clear(lambda owner: owner is model, why)
            self.similar.clear(model.prefix)

    def is_current(self, model: ModelCache) -> bool:
        """Returns whether answers may be stored for this version: not those that another may have computed,
        nor those to what was asked before all were cleared."""
        entry = model.entry
        known = self._entries.get((entry.name, entry.version)) is entry
        return known and self._models.get(entry.key) is model

    def is_shared(self, model: ModelCache) -> bool:
        """Returns whether other servers can be asked now."""
        return self.shared is not None and self.shared.up and model.entry.name in self.marks

    @property
    def is_waited_for(self) -> bool:
        """Returns whether what is ready for the engine waits for it: while others know enough of it, and say
        so in time."""
        known = self._shared_hits * _WORTH_READING >= self._shared_looks
        return known and self.shared is not None and self.shared.is_prompt

    def others_said(self, *, known: bool) -> None:
        self._shared_looks += 1
        self._shared_hits += known
        if self._shared_looks >= _RECENT:
            self._shared_looks //= 2
            self._shared_hits //= 2

    async def clear_shared(self, name: str) -> bool | None:
        """Clears a cache for all servers, those that look once a second. None: nothing is shared."""
        if self.shared is None:
            return None
        done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.shared.set_mark(name, token_hex(8).encode(), done.set_result)
        return await done is not None

    def _note(self, shared: SharedAnswers) -> None:
        """Looks once a second: for the metrics, and whether another server cleared something."""
        loop, row = asyncio.get_running_loop(), self._server.server_row
        if self._noting is not None:
            self._noting.cancel()
        self._noting = loop.call_later(_NOTED_EVERY_S if shared.up else _SOON_S, self._note, shared)
        row.set(counted.SHARED_UP, float(shared.up))
        row.add(counted.SHARED_TIMEOUTS, shared.timeouts - self._timeouts)
        self._timeouts = shared.timeouts
        if not shared.up:
            self.marks.clear()
        for name in {name for (name, _), entry in self._entries.items() if NAME in entry.extra}:
            shared.mark(name, partial(self._marked, shared, name))

    def _marked(self, shared: SharedAnswers, name: str, word: bytes | None) -> None:
        """A server with little memory may have dropped a mark. Then it is set again: without one, what was
        cleared would be back."""
        known = self.marks.get(name)
        if word is None or word == known:
            return
        if known and not word:
            shared.set_mark(name, known, lambda _word: None)
            return
        self.marks[name] = word
        if known is not None:
            for key in [key for key, model in self._models.items() if model.entry.name == name]:
                self._forget(key, "cleared")

    def close(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
        if self.shared is not None:
            self.shared.close()
