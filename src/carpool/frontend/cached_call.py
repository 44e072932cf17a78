"""What stands between a request and the engine where a model's answers are kept: one look for each request.

    known? ──► answered
      │ no: is it being computed? ──► waits for that answer
      │ no: a picture of this source that shows the same? ──► answered, or waits for that one's answer
      │ no: do other servers know it? ──► answered, if they say so in time
      └ no: it goes its way, and its answer is kept

Everything runs in the loop's thread; digests of long bodies and thumbnails are made in others. Nothing here
is made or called for a model without a cache.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.cache.answer_store import Entry, Kept, same_bytes
from carpool.cache.cache_key import FORMAT, Said
from carpool.cache.similar import MOST_FRAMES, Frame, Likeness, Seen, Source, see
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput
from carpool.frontend.cache_audit import Audit
from carpool.frontend.front_caches import JOINED, LOOKED_AT_ONCE, MISS, OFF, SHARED, STORED, Told, hit
from carpool.frontend.pictures.picture_service import promised
from carpool.frontend.pictures.sent_pictures import RoutePicture, SentPictures
from carpool.link.door import Answer, Slot
from carpool.observe import columns
from carpool.vision.picture_answers import Options
from carpool.wire.v2 import Buffer, Placed, RequestHead

if TYPE_CHECKING:
    from carpool.frontend.call import ClientCall

MOST_BYTES = 16 << 20
"""Of a request that is looked up: what takes longer to read twice is not worth it."""

MOST_JOINED = 64
"""Requests that one is computed for."""

_AT_ONCE = 256 * 1024  # bytes whose keyed digest is made in the loop: a quarter of a millisecond
_PROMISE_PART = 0.02  # of the promise, that tensors wait for other servers at most
_NOTHING = Said(b"", 0)
_VALUE = struct.Struct(">Bq")  # of what other servers read: format, length of the JSON or -1


class Asked(NamedTuple):
    """What is looked up: what identifies it besides its bytes; those, in pieces; and of a picture route or of
    pictures in a tensor, what only they have."""

    head: RequestHead
    form: str
    pieces: Sequence[Buffer]
    in_slot: bool = False  # the bytes lie in the call's slot
    options: Options | None = None
    drawn: str | None = None
    is_picture: bool = False
    is_decoded: bool = False  # here, once it is offered
    audited: RoutePicture | None = None  # what can be computed again and compared

    @classmethod
    def of(cls, pictures: SentPictures, form: str, slot: Slot | None) -> Asked:
        """One of them may lie in the call's slot."""
        said, files = (pictures.options, pictures.drawn), pictures.files_in(slot)
        audited = pictures if isinstance(pictures, RoutePicture) and pictures.drawn is None else None
        return cls(pictures.asked, form, files, slot is not None, *said, True, not pictures.is_file, audited)


class Lookup:
    """Of one request, from the look to its answer."""

    __slots__ = (
        *("_again", "_asked", "_began", "_bytes", "_caches", "_call", "_fast", "_keep", "_model", "_said"),
        *("_bytes_gone", "_computing", "_seen", "_source", "_sure", "_timer"),
        *("abandoned", "follows", "joined"),
    )

    def __init__(self, call: ClientCall, asked: Asked, again: Callable[[], object]) -> None:
        self._call = call
        self._asked = asked
        self._again = again  # goes on without the cache
        self._caches = caches = call.service.caches
        self._model = caches.of(call.entry)
        self._began = monotonic()
        self._said = _NOTHING
        self._fast = 0
        self._sure = b""
        self._bytes: Sequence[bytes] | None = None
        self._keep = False  # its exact answer
        self._source: Source | None = None
        self._seen: Seen | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._computing = False  # for others, too, who may join
        self._bytes_gone = False  # of what was asked: the slot that they lay in is used for something else
        self.joined: dict[Lookup, None] | None = None  # those who have, in their order
        self.follows: Lookup | None = None  # which this one has joined
        self.abandoned = False  # its own client has left, but others wait for its answer

    # ── the look ──

    def begin(self) -> bool:
        """True: it is answered, or will be. False: it goes its way. One function, up to where most requests
        that nobody knows leave it: what they pay here, they pay for nothing."""
        call, asked, model, caches = self._call, self._asked, self._model, self._caches
        wish, pieces = call.wish, asked.pieces
        several = len(pieces) != 1
        said = model.said(asked.form, asked.head, asked.options, asked.drawn, call.sender)
        size = self._size if several else len(pieces[0])
        if said is None or size > MOST_BYTES or not (wish.look or wish.keep):
            call.told = OFF
            model.count("bypass", 0.0)
            return False
        if several and asked.is_picture:  # tensors' lengths are known by what is said of them
            said = caches.digests.said(said.text + repr(list(map(len, pieces))).encode())
        self._said = said
        if not model.settings.exact:
            return self._look_at_scene()
        looked = call.looked
        if looked is None:
            fast, entry = caches.look(said, pieces, wish, self._began)
        else:
            fast, entry = looked[:2]
        self._fast = fast
        if entry is not None:
            if entry.is_same(said.text, pieces):  # what was found before, is here because it is to be audited
                return self._known(entry, looked is not None or model.is_audited(None, self._began))
            return self._make_sure(entry)
        other = caches.computing.get(fast) if wish.look else None
        if other is not None and other.has_room and other.is_same(said.text, pieces):
            self._follow(other)
            return True
        if wish.keep and (model.settings.min_uses == 1 or caches.doorkeeper.seen_before(fast)):
            self._keep = True
        if self._keep or (caches.shared is not None and caches.is_shared(model)):
            return self._make_sure(None)
        # From here on it is the one to join: another there is full, or asks for something else.
        caches.computing[fast] = self
        self._computing = True
        return model.settings.similar and self._look_at_scene()

    @property
    def _size(self) -> int:
        return sum(map(len, self._asked.pieces))

    def _make_sure(self, entry: Entry | None) -> bool:
        """The keyed digest, of what may be known or will be kept."""
        caches, asked = self._caches, self._asked
        text, pieces = self._said.text, asked.pieces
        if self._size <= _AT_ONCE:
            if self._keep:
                self._bytes = [text, *map(bytes, pieces)]
            return self._sure_of(entry, caches.digests.sure(text, pieces))
        work = partial(caches.digests.sure, text, pieces)
        slot = self._call._slot if asked.in_slot else None
        self._call._aside(True, work, partial(self._sure_later, entry), slot)
        return True

    def _sure_later(self, entry: Entry | None, sure: bytes) -> None:
        if not self._sure_of(entry, sure):
            self._again()

    def _sure_of(self, entry: Entry | None, sure: bytes) -> bool:
        self._sure = sure
        if entry is None or entry.sure != sure:
            return self._compute(entry)
        return self._known(entry, self._model.is_audited(None, self._began))

    def _known(self, entry: Entry, audited: bool) -> bool:
        now = monotonic()
        age = now - entry.at
        self._model.row.observe(columns.CACHE_AGE, age)
        audit = self._audit(entry.kept, None, 0.0) if audited else _nothing
        self._answer(entry.kept, hit("exact", age, entry.ends - entry.at))
        audit()
        return True

    def is_same(self, said: bytes, pieces: Sequence[Buffer]) -> bool:
        """Told from their bytes, which both still have."""
        return not self._bytes_gone and said == self._said.text and same_bytes(self._asked.pieces, pieces)

    @property
    def has_room(self) -> bool:
        return self.joined is None or len(self.joined) < MOST_JOINED - 1

    def _follow(self, found: Lookup) -> None:
        """Each keeps its own deadline, and may leave when it likes; so may the first one's client, without
        ending it for the others."""
        if found.joined is None:
            found.joined = {}
        found.joined[self] = None
        self.follows = found
        call = self._call
        until = promised(call.entry, call.arrived, call.deadline)
        if until < INFINITY:
            self._timer = _later(until - monotonic(), self._too_late)

    def _too_late(self) -> None:
        self._timer = None
        self._stop_following()
        self._call._fail(
            DeadlineExceeded(
                f"{self._call.entry.name}: the deadline passed while another request computed the same"
            )
        )

    def _compute(self, other: Entry | None) -> bool:
        """Not known. `other` is something else whose fast digest is the same: that stays as it is."""
        if other is not None:
            self._keep = False
        self._caches.computing[self._fast] = self
        self._computing = True
        return self._look_at_scene()

    # ── the same scene ──

    def _look_at_scene(self) -> bool:
        call, asked, settings = self._call, self._asked, self._model.settings
        wanted = settings.similar and asked.is_picture and len(asked.pieces) == 1 and asked.drawn is None
        if not wanted or not call.sender.named:
            return self._ask_others()
        looked = call.looked
        if looked is not None and looked.at_scene:
            self._source = looked.source
            if looked.likeness is not None:  # is here because it is to be audited
                return self._alike(looked.likeness, audited=True)
            return self._saw(looked.seen)
        way = self._model.way(asked.form, asked.head, asked.options, call.sender)
        source = self._caches.similar.source(way)
        if not source.wants_a_look(monotonic()):
            return self._ask_others()
        self._source = source
        if self._size <= LOOKED_AT_ONCE:
            return self._compare(see(asked.pieces[0], settings))
        slot = call._slot if asked.in_slot else None
        call._aside(True, partial(see, asked.pieces[0], settings), self._compare_later, slot)
        return True

    def _compare_later(self, seen: Seen | None) -> None:
        if not self._compare(seen):
            self._again()

    def _compare(self, seen: Seen | None) -> bool:
        """With what was computed."""
        model, source, wish = self._model, self._source, self._call.wish
        assert source is not None
        if seen is not None and wish.look:
            now = monotonic()
            found = self._caches.similar.look(source, seen, model.settings, now, wish.max_age)
            if found is not None:
                return self._alike(found, self._asked.audited is not None and model.is_audited(source, now))
        return self._saw(seen)

    def _alike(self, found: Likeness, audited: bool) -> bool:
        age = monotonic() - found.frame.at
        self._model.row.observe(columns.CACHE_AGE, age)
        told = hit("similar", age, self._model.settings.similar_ttl_s, f"; change={found.change:.1f}")
        audit = self._audit(found.frame.kept, self._source, found.change) if audited else _nothing
        self._answer(found.frame.kept, told)
        audit()
        return True

    def _saw(self, seen: Seen | None) -> bool:
        """It shows what was not computed yet."""
        self._seen, source = seen, self._source
        if seen is None or source is None or not self._call.wish.look:
            return self._ask_others()
        return self._join_scene(source, seen) or self._ask_others()

    def _join_scene(self, source: Source, seen: Seen) -> bool:
        """Another computes what shows the same now; else this one does, and others may wait for it."""
        if not self.joined:
            found: Lookup | None = self._caches.similar.look_at_computing(source, seen, self._model.settings)
            if found is not None and found.has_room:
                self._end()
                self._follow(found)
                return True
        self._computing = True
        if len(source.computing) < MOST_FRAMES:
            source.computing[self] = seen
        return False

    def _audit(self, kept: Kept, source: Source | None, change: float) -> Callable[[], None]:
        """To be begun when the answer is away, which may give back the memory of the picture."""
        picture = self._asked.audited
        if picture is None:
            return _nothing
        audit = Audit(self._call, self._model, picture, kept, source, change)
        return partial(audit.begin, bytes(self._asked.pieces[0]))

    # ── other servers ──

    def _ask_others(self) -> bool:
        """Pictures are decoded meanwhile: an answer counts while they are. Tensors wait, but not for long,
        and only while others know enough of them; what comes later is still kept here.
        How old an answer is, nobody says: whoever wants a newer one than they all are does not ask."""
        shared, wish = self._caches.shared, self._call.wish
        if shared is None or not self._sure or not wish.look or wish.max_age < self._model.settings.ttl_s:
            return False
        name = self._shared_name()
        if name is None:
            return False
        shared.get(name, self._others_said)
        if self._asked.is_decoded or not self._caches.is_waited_for:
            return False
        slo = self._call.entry.slo
        if slo is not None:
            self._timer = _later(_PROMISE_PART * slo, self._waited)
        else:
            self._timer = _later(1.0, self._waited)  # it has its own limit, and this is for a bug in it
        return True

    def _shared_name(self) -> bytes | None:
        mark = self._caches.marks.get(self._model.entry.name)
        return None if mark is None else self._sure + mark

    def _waited(self) -> None:
        self._timer = None
        self._call._resume(self._again)

    def _others_said(self, value: bytes | None) -> None:
        waits, self._timer = self._timer, None
        if waits is not None:
            waits.cancel()
        kept = None if value is None else _read_value(value)
        self._caches.others_said(known=kept is not None)
        if kept is not None and (waits is not None or self._asked.is_decoded):
            self._answer_shared(kept)
        elif kept is not None:
            self._keep_here(kept)
        elif waits is not None:
            self._call._resume(self._again)

    def _answer_shared(self, kept: Kept) -> None:
        """And have it here, too, from now on, for as long as it lives there."""
        if self._bytes is None and self._size <= _AT_ONCE:
            self._bytes = [self._said.text, *map(bytes, self._asked.pieces)]
        if self._answer(kept, SHARED):
            self._keep_here(kept)

    def _keep_here(self, kept: Kept) -> None:
        shared, name = self._caches.shared, self._shared_name()
        if self._call.wish.keep and shared is not None and name is not None:
            shared.lasts(name, partial(self._keep_shared, kept))

    def _keep_shared(self, kept: Kept, seconds: float | None) -> None:
        model, caches, now = self._model, self._caches, monotonic()
        if seconds is None or not caches.is_current(model) or len(kept.body) > model.settings.entry_kb << 10:
            return
        ttl = model.settings.ttl_s
        rest = min(seconds, ttl)
        entry = Entry(model, self._sure, kept, now + rest - ttl, now + rest, self._bytes)
        caches.store.put(self._fast, entry)

    # ── the answer ──

    def _answer(self, kept: Kept, told: Told) -> bool:
        """It was there; whoever waits for this request has it, too. False: its own client has it not."""
        others = self._end()
        answered = not self.abandoned and self._call._answer_kept(kept, told)
        if answered:
            self._model.count(told.kind, monotonic() - self._began)
        for other in others:
            other._answer_joined(kept)
        return answered

    def _answer_joined(self, kept: Kept) -> None:
        self._stop_following()
        if self._call._answer_kept(kept, JOINED):
            self._model.count("joined", monotonic() - self._began)

    def finish(self, answer: Answer, placed: Mapping[str, Placed]) -> None:
        """It was computed: keep it, send it, and give it to those who joined. Of most that nobody asked for
        before, nothing is kept."""
        call, model = self._call, self._model
        others = self._end()
        kept = None
        if others or self._keep or self._seen is not None:
            kept = call._encode(answer, placed)
            self._store(kept)
        told = call.told
        if told is None:
            call.told = told = MISS
        if told is not OFF:
            model.count("miss", monotonic() - self._began)
        try:
            if not self.abandoned:
                call._write(answer, placed, kept)
        finally:
            if kept is not None:
                for other in others:
                    other._answer_joined(kept)

    def _store(self, kept: Kept) -> None:
        model, caches, now = self._model, self._caches, monotonic()
        if len(kept.body) > model.settings.entry_kb << 10 or not caches.is_current(model):
            return
        if self._source is not None and self._seen is not None and self._call.wish.keep:
            caches.similar.keep(self._source, Frame(self._seen, kept, now))
        if not self._keep or not self._sure:
            return
        ttl = model.settings.ttl_s
        caches.store.put(self._fast, Entry(model, self._sure, kept, now, now + ttl, self._bytes))
        name = self._shared_name()
        if caches.shared is not None and name is not None:
            length = -1 if kept.header_length is None else kept.header_length
            caches.shared.put(name, _VALUE.pack(FORMAT, length) + kept.body, ttl)
        self._call.told = STORED

    def failed(self, error: CarpoolError) -> bool:
        """Only the first hears of an error; the others are computed once more, each alone. But what is wrong
        with a picture is wrong for all. True: its own client has left, and need not be told."""
        others = self._end()
        self._stop_following()
        for other in others:
            other._stop_following()
            if isinstance(error, InvalidInput):
                other._call._fail(error)
            else:
                other._call._resume(other._again)
        return self.abandoned

    def left(self) -> bool:
        """The client has gone. True: others wait for the answer, so that it is computed all the same."""
        self._stop_following()
        if self.joined and not self.abandoned:
            self.abandoned = True
            return True
        self._end()
        return False

    def bytes_are_gone(self) -> None:
        """If they lay in the slot: nobody can join any more."""
        self._bytes_gone = self._asked.in_slot

    def _end(self) -> Iterable[Lookup]:
        """Nobody can join any more. Those who have."""
        if not self._computing:
            return ()
        self._computing = False
        computing = self._caches.computing
        if computing.get(self._fast) is self:
            del computing[self._fast]
        if self._source is not None:
            self._source.computing.pop(self, None)
        joined, self.joined = self.joined, None
        return joined or ()

    def _stop_following(self) -> None:
        followed, self.follows = self.follows, None
        if followed is not None and followed.joined is not None:
            followed.joined.pop(self, None)
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def _read_value(value: bytes) -> Kept | None:
    """What another server kept; None for what is no such thing."""
    if len(value) < _VALUE.size:
        return None
    number, length = _VALUE.unpack_from(value)
    body = value[_VALUE.size :]
    if number != FORMAT or not -1 <= length <= len(body):
        return None
    return Kept(body, None if length < 0 else length)


def _nothing() -> None:
    """Most hits are not audited."""


def _later(seconds: float, act: Callable[[], Any]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(max(0.0, seconds), act)
