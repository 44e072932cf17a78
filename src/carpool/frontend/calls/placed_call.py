"""The bottom of all features: a request's content goes into a slot, and its answer comes up ready to be
written. Requests for models without features do the same themselves (`call.ClientCall`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from carpool.errors import CarpoolError, Unavailable
from carpool.frontend.calls.asking import Asker, Infers, Made, not_made
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.placement import ANSWERING, OVER, READING, RequestPlacement, WherePlaced
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.frontend.pictures.workers import stopping
from carpool.link.contents import Content
from carpool.link.door import Answer, Ask, Hears, ModelEntry
from carpool.memory.arena import Slot
from carpool.observe.counters import Row
from carpool.types import Timing
from carpool.wire.v2 import RequestHead


class PlacedCall(RequestPlacement):
    """Implements `Call` for the feature above."""

    __slots__ = ("_asker", "_content", "_hears", "refuses_many")

    def __init__(self, service: CallService, door: Infers, ask: Ask, hears: Hears) -> None:
        super().__init__(service, ask.sender, ask.deadline, ask.arrived)
        asker: Asker = ask.asker
        self._door = door
        self._asker = asker
        self._hears = hears
        content: Content = ask.content
        self._content = content
        self._copies = content.copied
        self.entry = entry = ask.entry
        self.row = asker.row if entry is asker.entry else service.row(entry)
        self.client = asker.client
        self.refuses_many = asker.refuses_many

    def begin(self, head: RequestHead) -> None:
        """Nothing has happened if this raises."""
        content = self._content
        try:
            slot = content.take_held()
            if slot is None:
                content.offer(self, head)
                return
            self._enter(head, gate=False)  # once more: another version had it before
            self._pictures = content if isinstance(content, SentPictures) else None
            self._slot = slot
            assert content.offered_as is not None
            self._offer(content.offered_as, slot, content.tail)
        except BaseException:
            self.state = OVER
            self._let_go()
            raise

    def place_in_slot(self, head: RequestHead, content: Content) -> None:
        self._enter(head)
        if not head.plain:
            self._outlets = self.service.memory.outlets(head.outputs, self.sender.holder)
        self._slot = slot = content.take()
        self._offer(head, slot, content.tail)

    # ── as `Call` ──

    def ready(self, slot: Slot) -> None:
        """It makes itself ready."""
        raise NotImplementedError

    def cancel(self) -> None:
        """What has not begun is not done."""
        state, self.state = self.state, OVER
        if state in (ANSWERING, OVER):
            return  # a thread has the outputs: `_finish` releases them
        self._let_go()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        if not self._content.kept:
            self._content.drop()

    def release(self) -> None:
        """Does nothing, since what it held was given back when it was done."""

    # ── as `RequestPlacement` asks ──

    def _offer(self, head: RequestHead, slot: Slot, tail: int, ready_in: float | None = None) -> None:
        super()._offer(head, slot, tail, ready_in)
        if ready_in is None:
            self._content.went(head, slot, tail)

    def _count_decoded(self, slot: Slot, seconds: float) -> None:
        super()._count_decoded(slot, seconds)
        assert self._pictures is not None
        self._content.went(self._pictures.head, slot, 0)

    def done(self, answer: Answer) -> None:
        self._content.gone = True
        super().done(answer)

    def _finish(self, answer: Answer, placed: WherePlaced | None = dict) -> None:
        call, self._call = self._call, None
        pictures, times = self._pictures, (self._offered_at, self._done_at)
        try:
            state, self.state = self.state, OVER
            if state == OVER:
                return  # nobody waits for it any more
            self._let_go()
            error = answer.error
            if error is None and placed is None:
                error = stopping()
            where = placed() if error is None and placed is not None else {}
            made = Made(answer.outputs, error, answer.timing, answer.sent, answer.outside, answer.degraded)
            made.entry, made.pictures, made.placed = self.entry, pictures, where
            made.offered_at, made.done_at, made.held = *times, call
            self._tell(made)
            if made.taken:
                call = None
        except CarpoolError as wrong:
            self._tell(not_made(wrong, heard=True, timing=answer.timing))
        except Exception:
            self.service.log.exception("request-failed", **self._what())
            self._tell(not_made(CarpoolError("the server failed on this request"), heard=True))
        finally:
            if call is not None:
                call.release()

    def _say_part(self, answer: Answer) -> None:
        self._hears.part(answer)

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        state, self.state = self.state, OVER
        if state != OVER:
            self._let_go()
            self._tell(not_made(error, heard=state != READING, timing=timing))

    def _tell(self, made: Made) -> None:
        """Never raises: what goes wrong above ends in another answer, which is the first to be heard."""
        if not self._content.kept:
            self._content.drop()
        try:
            self._hears.done(made)
        except Exception:
            self.service.log.exception("request-failed", **self._what())
            with suppress(Exception):
                self._hears.done(not_made(CarpoolError("the server failed on this request"), heard=True))

    def _current(self) -> tuple[ModelEntry, Row]:
        entry = self.service.door.catalog.entries.get((self.entry.name, self.entry.version))
        if entry is None:
            raise Unavailable(f"model '{self.entry.name}' is not loaded any more")
        return entry, self.service.row(entry)

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]:
        return self._asker.sent_fields

    def named(self, head: RequestHead) -> RequestHead:
        return self._asker.named(head)

    def answer_takes_long(self) -> None:
        self._asker.answer_takes_long()


class Placing:
    """Places a request, where all features end."""

    def __init__(self, service: CallService, door: Infers) -> None:
        self._service = service
        self._door = door

    def infer(self, ask: Ask, hears: Hears) -> PlacedCall:
        call = PlacedCall(self._service, self._door, ask, hears)
        call.begin(ask.head)
        return call
