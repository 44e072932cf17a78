"""Looks for the answer to each request, and computes one answer for all identical requests at once.

    known? ──► answered
      │ no: is it being computed? ──► waits for that answer
      │ no: a picture of this source that shows the same? ──► answered, or waits for that one's answer
      │ no: do other servers know it? ──► answered, if they say so in time
      └ no: it goes its way, and its answer is stored

Everything runs in the loop's thread; digests of long bodies and thumbnails are made in others.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput
from carpool.extensions.cache import counted
from carpool.extensions.cache.answer_store import Entry, same_bytes
from carpool.extensions.cache.cache_audit import CacheAudit
from carpool.extensions.cache.cache_key import FORMAT, WISH_FIELD, Said, read_cache_control
from carpool.extensions.cache.cache_status import JOINED, MISS, OFF, SHARED, STORED, CacheStatus
from carpool.extensions.cache.front_caches import (
    LOOKED_AT_ONCE,
    NAME,
    Caches,
    Hit,
    Looked,
    Question,
    exact_hit,
)
from carpool.extensions.cache.similar import MOST_FRAMES, Frame, PictureLook, SourceAnswers, see
from carpool.frontend.calls.request import (
    Infer,
    Listener,
    Request,
)
from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.frontend.calls.thread_errors import stopping
from carpool.frontend.pictures.sent_pictures import RoutePicture, SentPictures
from carpool.link.contents import Content
from carpool.link.engine_client import Answer
from carpool.memory.arena import Slot

MOST_JOINED = 64
"""Requests that one is computed for."""

_AT_ONCE = 256 * 1024  # bytes whose keyed digest is made in the loop: a quarter of a millisecond
_PROMISE_PART = 0.02  # of the promise, that tensors wait for other servers at most
_NOTHING = Said(b"", 0)
_VALUE = struct.Struct(">Bq")  # of what other servers read: format, length of the JSON or -1

T = TypeVar("T")


class CacheWrapper:
    """Wraps the requests for one version."""

    def __init__(self, inner: Infer, caches: Caches) -> None:
        self.inner = inner
        self.caches = caches

    def __call__(self, request: Request) -> None:
        entry, content = request.entry, request.content
        assert content is not None
        # What its client sent beside a picture is no part of what identifies it.
        with_headers = request.service.forward is not None and entry.signature.told
        beside = with_headers and isinstance(content, SentPictures)
        if NAME not in entry.extra or not request.reply.form or beside:
            self.inner(request)
            return
        lookup = Lookup(self, request, content)
        request.listen(lookup)
        lookup.begin()


class Lookup(Listener):
    """Leads one request from the look to its answer."""

    __slots__ = (
        *("_began", "_bytes", "_caches", "_computing", "_content", "_entry", "_fast"),
        *("_in_slot", "_keep", "_model", "_over", "_passed_on", "_question", "_reply", "_request", "_said"),
        *("_seen", "_source", "_status", "_sure", "_timer", "_wrapper", "abandoned", "follows", "joined"),
    )

    def __init__(self, wrapper: CacheWrapper, request: Request, content: Content) -> None:
        self._wrapper = wrapper
        self._request = request
        self._entry = request.entry  # for which the answer is stored
        self._reply = request.reply  # which encodes the answer also when its client has left
        self._content = content
        self._in_slot = content.slot is not None  # the bytes that are compared lie there
        self._caches = wrapper.caches
        self._model = wrapper.caches.of(request.entry)
        self._question = _question(request, content)
        self._began = monotonic()
        self._passed_on = False  # to what computes it
        self._over = False
        self._status: CacheStatus | None = MISS
        self._said = _NOTHING
        self._fast = 0
        self._sure = b""
        self._bytes: list[bytes] | None = None
        self._keep = False  # its exact answer
        self._source: SourceAnswers | None = None
        self._seen: PictureLook | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._computing = False  # for others, too, who may join
        self.joined: dict[Lookup, None] | None = None  # those who have, in their order
        self.follows: Lookup | None = None  # which this one has joined
        self.abandoned = False  # its own client has left, but others wait for its answer

    # ── the look ──

    def begin(self) -> None:
        """Answer it, wait for what will, or pass it on, which may raise."""
        looked: Looked | None = self._reply.looked  # type: ignore[assignment]
        if looked is None:
            looked = self._caches.known(self._model, self._question, self._began)
        if looked is None:
            self._status = OFF
            self._model.count("bypass", 0.0)
        elif self._find(looked):
            return
        self._passed_on = True
        self._wrapper.inner(self._request)

    def _find(self, looked: Looked) -> bool:
        """True: it is answered, or will be. False: it goes its way."""
        model, caches, asked = self._model, self._caches, self._question
        wish = asked.wish
        self._said, fast = looked.said, looked.fast
        if looked.hit is not None:  # what was found before, is here because it is to be audited
            return self._known(looked.hit, looked.audited)
        if not model.settings.exact:
            return self._look_at_scene(looked)
        self._fast = fast
        if looked.entry is not None:
            return self._make_sure(looked, looked.entry)
        other = caches.computing.get(fast) if wish.look else None
        if isinstance(other, Lookup) and other.has_room and other.is_same(self):
            self._follow(other)
            return True
        if wish.keep and (model.settings.min_uses == 1 or caches.doorkeeper.seen_before(fast)):
            self._keep = True
        if self._keep or (caches.shared is not None and caches.is_shared(model)):
            return self._make_sure(looked, None)
        # From here on it is the one to join: another there is full, or asks for something else.
        caches.computing[fast] = self
        self._computing = True
        return model.settings.similar and self._look_at_scene(looked)

    @property
    def _size(self) -> int:
        return sum(map(len, self._question.pieces))

    def _make_sure(self, looked: Looked, entry: Entry | None) -> bool:
        """Takes the keyed digest, of what may be known or will be stored."""
        digests, text, pieces = self._caches.digests, self._said.text, self._question.pieces
        if self._size <= _AT_ONCE:
            if self._keep:
                self._bytes = [text, *map(bytes, pieces)]
            return self._sure_of(looked, entry, digests.sure(text, pieces))
        self._aside(partial(digests.sure, text, pieces), partial(self._sure_of, looked, entry))
        return True

    def _sure_of(self, looked: Looked, entry: Entry | None, sure: bytes) -> bool:
        self._sure = sure
        if entry is not None and entry.sure == sure:
            now = monotonic()
            return self._known(exact_hit(entry, now), self._model.is_audited(None, now))
        if entry is not None:  # something else whose fast digest is the same: that stays as it is
            self._keep = False
        self._caches.computing[self._fast] = self
        self._computing = True
        return self._look_at_scene(looked)

    def _known(self, found: Hit, audited: bool) -> bool:
        self._model.row.observe(counted.AGE, found.age)
        audit = self._audit(found) if audited else None
        self._answer(found.kept, found.status)
        if audit is not None:
            audit()
        return True

    def is_same(self, other: Lookup) -> bool:
        """Returns whether both are the same, by their bytes, which both still have."""
        if (self._in_slot and self._content.gone) or other._said.text != self._said.text:
            return False
        return same_bytes(self._question.pieces, other._question.pieces)

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
        request = self._request
        until = self._entry.due(request.arrived, request.deadline)
        if until < INFINITY:
            self._timer = _later(until - monotonic(), self._too_late)

    def _too_late(self) -> None:
        self._timer = None
        why = f"{self._entry.name}: the deadline passed while an identical request was computed"
        self._request.fail(DeadlineExceeded(why))

    # ── threads ──

    def _aside(self, work: Callable[[], T], then: Callable[[T], bool]) -> None:
        """Runs in a thread; what it reads stays where it is meanwhile."""
        slot = None if self._content.slot is None else self._content.slot.share()
        future = asyncio.get_running_loop().run_in_executor(self._request.service.threads, work)
        future.add_done_callback(partial(self._came_back, then, slot))

    def _came_back(self, then: Callable[[T], bool], slot: Slot | None, work: asyncio.Future[T]) -> None:
        if slot is not None:
            slot.release()
        error = stopping() if work.cancelled() else work.exception()
        if self._over:
            return

        def go_on() -> None:
            if error is not None:
                raise error
            if not then(work.result()):
                self._pass_on()

        self._guarded(go_on)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Never raises: what goes wrong is the request's answer."""
        self._request.go(lambda _: act())

    # ── the same scene ──

    def _look_at_scene(self, looked: Looked) -> bool:
        asked, settings = self._question, self._model.settings
        if not (settings.similar and asked.has_scene):
            return self._ask_others()
        if looked.at_scene:
            self._source = looked.source
            return self._saw(looked.seen)
        source = self._caches.source(self._model, asked)
        if not source.wants_a_look(monotonic()):
            return self._ask_others()
        self._source = source
        if self._size <= LOOKED_AT_ONCE:
            return self._compare(see(asked.pieces[0], settings))
        self._aside(partial(see, asked.pieces[0], settings), self._compare)
        return True

    def _compare(self, seen: PictureLook | None) -> bool:
        """Compares it with what was computed."""
        source, wish, now = self._source, self._question.wish, monotonic()
        assert source is not None
        found = self._caches.similar_hit(self._model, source, seen, wish, now)
        if found is None:
            return self._saw(seen)
        return self._known(found, self._audited_picture is not None and self._model.is_audited(source, now))

    def _saw(self, seen: PictureLook | None) -> bool:
        """It shows what was not computed yet."""
        self._seen, source = seen, self._source
        if seen is None or source is None or not self._question.wish.look:
            return self._ask_others()
        return self._join_scene(source, seen) or self._ask_others()

    def _join_scene(self, source: SourceAnswers, seen: PictureLook) -> bool:
        """Another computes what shows the same now; else this one does, and others may wait for it."""
        if not self.joined:
            found: Lookup | None = self._caches.similar.look_at_computing(source, seen, self._model.settings)
            if found is not None and found.has_room:
                self.end()
                self._follow(found)
                return True
        self._computing = True
        if len(source.computing) < MOST_FRAMES:
            source.computing[self] = seen
        return False

    @property
    def _audited_picture(self) -> RoutePicture | None:
        """Returns what can be computed again and compared."""
        content = self._content
        return content if isinstance(content, RoutePicture) and content.drawn is None else None

    def _audit(self, found: Hit) -> Callable[[], None] | None:
        """Returns an audit to be begun when the answer is away, which may give back the memory of the
        picture."""
        picture = self._audited_picture
        if picture is None:
            return None
        audit = CacheAudit(self._request.service, self._request.sender.source, self._model, picture, found)
        return partial(audit.begin, bytes(self._question.pieces[0]))

    # ── other servers ──

    def _ask_others(self) -> bool:
        """Pictures are decoded meanwhile: an answer counts while they are. Tensors wait, but not for long,
        and only while others know enough of them; what comes later is still stored here.
        Other servers do not say how old an answer is: a request that wants a newer one asks none of them."""
        shared, wish = self._caches.shared, self._question.wish
        if shared is None or not self._sure or not wish.look or wish.max_age < self._model.settings.ttl_s:
            return False
        name = self._shared_name()
        if name is None:
            return False
        shared.get(name, self._others_said)
        if self._is_decoded or not self._caches.is_waited_for:
            return False
        slo = self._entry.batching.slo
        # Without a promise it has its own limit, and this is for a bug in it.
        self._timer = _later(1.0 if slo is None else _PROMISE_PART * slo, self._waited)
        return True

    @property
    def _is_decoded(self) -> bool:
        """Returns whether it is decoded here, once it is offered."""
        return isinstance(self._content, SentPictures) and not self._content.is_file

    def _shared_name(self) -> bytes | None:
        mark = self._caches.marks.get(self._model.entry.name)
        return None if mark is None else self._sure + mark

    def _waited(self) -> None:
        self._timer = None
        self._guarded(self._pass_on)

    def _others_said(self, value: bytes | None) -> None:
        self._guarded(partial(self._hear_others, value))

    def _hear_others(self, value: bytes | None) -> None:
        waits, self._timer = self._timer, None
        if waits is not None:
            waits.cancel()
        kept = None if value is None else _read_value(value)
        self._caches.others_said(known=kept is not None)
        if kept is not None and (waits is not None or self._is_decoded):
            self._answer_shared(kept)
        elif kept is not None:
            self._keep_here(kept)
        elif waits is not None and not self._over:
            self._pass_on()

    def _answer_shared(self, kept: EncodedAnswer) -> None:
        """And have it here, too, from now on, for as long as it lives there."""
        if self._bytes is None and self._size <= _AT_ONCE:
            self._bytes = [self._said.text, *map(bytes, self._question.pieces)]
        if self._answer(kept, SHARED):
            self._keep_here(kept)

    def _keep_here(self, kept: EncodedAnswer) -> None:
        shared, name = self._caches.shared, self._shared_name()
        if self._question.wish.keep and shared is not None and name is not None:
            shared.lasts(name, partial(self._keep_shared, kept))

    def _keep_shared(self, kept: EncodedAnswer, seconds: float | None) -> None:
        model, caches, now = self._model, self._caches, monotonic()
        if seconds is None or not caches.is_current(model) or len(kept.body) > model.settings.entry_kb << 10:
            return
        ttl = model.settings.ttl_s
        rest = min(seconds, ttl)
        entry = Entry(model, self._sure, kept, now + rest - ttl, now + rest, self._bytes)
        caches.store.put(self._fast, entry)

    # ── the answer ──

    def _pass_on(self) -> None:
        self._passed_on = True
        self._request.go(self._wrapper.inner)

    def _answer(self, kept: EncodedAnswer, status: CacheStatus) -> bool:
        """It was there; the requests that wait for this one have it, too. False: its own client has it not,
        since it has left, or the engine has the request already, whose answer is as near."""
        others = self.end()
        ends = not (self._over or self._content.sent)
        try:
            if ends:
                self._deliver(kept, status, cached=not self._passed_on)
        finally:
            for other in others:
                other._answer_joined(kept)
        return ends and not self.abandoned

    def _answer_joined(self, kept: EncodedAnswer) -> None:
        self._stop_following()
        if not self._over:
            self._guarded(partial(self._deliver, kept, JOINED, cached=True))

    def _deliver(self, kept: EncodedAnswer, status: CacheStatus, *, cached: bool) -> None:
        request = self._request
        if not self.abandoned:
            if cached:  # else the engine was asked, and that was noted
                source = request.sender.source or request.head.options.source
                request.service.engine.answered_here(self._entry, request.arrived, request.head.batch, source)
            self._model.count(status.kind, monotonic() - self._began)
        self._over = True
        request.encoded, request.note = kept, status
        request.answer_from(self, Answer())

    def answered(self, request: Request, answer: Answer) -> Answer:
        """It was computed: it is stored, and given to those that joined. Of a request that comes for the
        first time nothing is stored."""
        self._over = True
        self._stop_following()
        others, kept = self.end(), None
        try:
            # Another version's is no answer of this one's.
            if answer.error is None and request.entry is self._entry:
                if others or self._keep or self._seen is not None:
                    request.encoded = kept = self._reply.encode(request, answer)
                    self._store(kept)
                request.note = self._status
                if self._status is not OFF:
                    self._model.count("miss", monotonic() - self._began)
        finally:
            for other in others:
                other.followed(kept, answer.error)
        return answer

    def followed(self, kept: EncodedAnswer | None, error: CarpoolError | None) -> None:
        """What it waited for is over. Only the first hears of an error; the others are computed once more,
        each alone. But what is wrong with a picture is wrong for all."""
        if kept is not None:
            self._answer_joined(kept)
        elif isinstance(error, InvalidInput):
            self._request.fail(error)
        else:
            self._goes_alone()

    def _store(self, kept: EncodedAnswer) -> None:
        model, caches, now = self._model, self._caches, monotonic()
        if len(kept.body) > model.settings.entry_kb << 10 or not caches.is_current(model):
            return
        if self._source is not None and self._seen is not None and self._question.wish.keep:
            caches.similar.keep(self._source, Frame(self._seen, kept, now))
        if not self._keep or not self._sure:
            return
        ttl = model.settings.ttl_s
        caches.store.put(self._fast, Entry(model, self._sure, kept, now, now + ttl, self._bytes))
        name = self._shared_name()
        if caches.shared is not None and name is not None:
            length = -1 if kept.header_length is None else kept.header_length
            caches.shared.put(name, _VALUE.pack(FORMAT, length) + kept.body, ttl)
        self._status = STORED

    def _goes_alone(self) -> None:
        self._stop_following()
        if not self._over:
            self._pass_on()

    def left(self, request: Request) -> bool:
        """The client has gone. If others wait for the answer, it is computed all the same."""
        self._stop_following()
        if self.joined and not self.abandoned:
            self.abandoned = True
            return True
        self.end()
        self._over = True
        return False

    def end(self) -> Iterable[Lookup]:
        """Returns those that have joined; no other can from here on."""
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


def _question(request: Request, content: Content) -> Question:
    form, pieces = request.reply.form, content.bytes_of(request.head)
    wish = read_cache_control(request.reply.fields().get(WISH_FIELD))
    if not isinstance(content, SentPictures):
        return Question(form, request.head, pieces, request.sender, wish)
    said = content.options, content.drawn
    return Question(form, content.asked, pieces, request.sender, wish, *said, is_picture=True)


def _read_value(value: bytes) -> EncodedAnswer | None:
    """Returns what another server stored; None for what is no such thing."""
    if len(value) < _VALUE.size:
        return None
    number, length = _VALUE.unpack_from(value)
    body = value[_VALUE.size :]
    if number != FORMAT or not -1 <= length <= len(body):
        return None
    return EncodedAnswer(body, None if length < 0 else length)


def _later(seconds: float, act: Callable[[], Any]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(max(0.0, seconds), act)
