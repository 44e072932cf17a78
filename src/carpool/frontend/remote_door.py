"""The door of a front end whose engine lives in another process.

Slots for bodies that are still arriving: announcing one is not enough to take the memory for it. While there
is plenty, a body gets all of its memory when its head is here, and comes straight into it. Else it gets a
little, and more as it comes: what slow clients hold then follows from what they sent, not from what they
said. A share for each peer's address was rejected: behind a proxy all clients have the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import orjson

from carpool.core.refusal_words import SPARE, skipped
from carpool.errors import CarpoolError, NotFound, TooLarge, Unavailable, Unsupported
from carpool.frontend.front_link import FrontLink, RemoteCall, RemoteTrip, expiry, stalled
from carpool.link.advice import Gate, open_gate
from carpool.link.door import Answer, Ask, Catalog, Hears, MakeRoom, ModelEntry, Slot
from carpool.link.records import MAX_DETAILS_BYTES
from carpool.link.templates import Template
from carpool.memory.arena import Arena, ArenaSlot, check_fits
from carpool.memory.pulse import HOPELESS_S, STALE_S
from carpool.observe.logs import logger
from carpool.wire.head import write_options
from carpool.wire.v2 import RequestHead

_log = logger("link")

_PLENTY = 0.25  # of all memory: up to here nobody looks at who takes it
_FIRST_BYTES = 16 * 1024  # so that 4,096 connections that send nothing hold a quarter of the usual 256 MiB
_IN_VAIN_S = 0.05  # after spare work was skipped
_SPARE_PART = 16  # of the memory, at most, for all of it together
_GROWTH = 4  # bytes copied per byte of a body: at most a third


class BodySlots:
    """The part of `Door` that gives memory. `allocate` may have none now; `left_with` says how much of all
    would be free with so many bytes more in use, from 0 to 1."""

    def __init__(self, allocate: Callable[[int], Slot | None], left_with: Callable[[int], float]) -> None:
        self._allocate = allocate
        self._left_with = left_with

    def check_fits(self, size: int) -> None:
        """Raises `TooLarge` for what can never be allocated."""

    def slot(self, size: int, make_room: MakeRoom | None = None) -> Slot:
        slot = self._allocate(size)
        if slot is None:
            self.check_fits(size)
        while slot is None and make_room is not None and make_room():
            slot = self._allocate(size)
        if slot is None:
            raise Unavailable("all memory for request bodies is in use", reason="no-slots")
        return slot

    def first_slot(self, size: int, make_room: MakeRoom) -> Slot:
        if size > _FIRST_BYTES and self._left_with(size) < 1 - _PLENTY:
            size = _FIRST_BYTES
        return self._allocate(size) or self.slot(size, make_room)

    def larger_slot(self, slot: Slot, kept: int, size: int, make_room: MakeRoom) -> Slot:
        wanted = min(_GROWTH * len(slot.view), size)
        try:
            larger = self._allocate(wanted)
            if larger is not None:
                larger.view[:kept] = slot.view[:kept]
                return larger
            part = bytes(slot.view[:kept])  # its own memory may be what is missing
        finally:
            slot.release()
        larger = self.slot(wanted, make_room)
        larger.view[:kept] = part
        return larger


class RemoteDoor(BodySlots):
    """Implements `Door`. `broken` is called when the engine cannot be understood: only a restart helps."""

    def __init__(
        self,
        arena: Arena,
        *,
        max_answer_bytes: int,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(arena.allocate, arena.left_with)
        self.arena = arena
        self._max_answer_bytes = max_answer_bytes
        self.refuses: Gate = open_gate
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._link: FrontLink | None = None
        self.catalog = Catalog()
        self.known: Mapping[int, ModelEntry] = {}  # the entries of this engine, by key
        self._draining = False
        self._still = 0.0  # for how long the engine has stood still
        self._in_vain: dict[int, float] = {}  # until when spare work for a model is skipped here
        self._spare: list[RemoteCall] = []  # what the engine has of it
        self._listeners: list[Callable[[Catalog], None]] = []

    @property
    def serving(self) -> bool:
        return (
            self._link is not None
            and self.catalog.number > 0
            and not self._draining
            and self._still < STALE_S
        )

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        self._listeners.append(listener)
        listener(self.catalog)

    def advise(self, gate: Gate) -> None:
        """Ask this before a body is read."""
        self.refuses = gate

    def engine_stood_still(self, seconds: float) -> None:
        """Told every `BEAT_S`: an engine that hangs has not closed its link, and may never do so."""
        if (seconds >= STALE_S) != (self._still >= STALE_S):
            _log.warning("engine-stalled" if seconds >= STALE_S else "engine-moves-again")
        self._still = seconds
        if self._link is not None:
            self._link.look_at_time(monotonic(), hopeless=seconds >= HOPELESS_S)

    def drain(self) -> None:
        """Not serving any more, although what has begun is still carried through."""
        self._draining = True

    async def attach(self, sock: socket.socket) -> None:
        """A new engine: the one before, if there was any, is dead."""
        self.close()
        link = FrontLink(self, self._loop, self._max_answer_bytes)
        await self._loop.create_unix_connection(lambda: cast(asyncio.Protocol, link), sock=sock)

    def close(self) -> None:
        """End the link, and with it whatever still waits."""
        if self._link is not None:
            self._link.close()

    def check_fits(self, size: int) -> None:
        check_fits(self.arena, size)

    def turned_away(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        """Nobody asks for them here: `RecordingDoor` does."""

    def answered_from_cache(self, entry: ModelEntry, arrived: float, images: int, source: str) -> None:
        """The same."""

    def infer(self, ask: Ask, hears: Hears) -> RemoteCall:
        entry, head, slot, tail = ask[:4]
        link, spare, trip = self._link, ask.spare, ask.trip
        call = RemoteCall(ask, _Background(self, entry.key, hears) if spare else hears)
        if link is None or not link.writable or self._still >= STALE_S:
            return self._fail(call, self._trouble())
        if spare and not self._may_spare(entry, call):
            return self._fail(call, skipped(entry.name))
        try:
            if self.known.get(entry.key) is not entry or (
                entry.decoupled and not ask.in_parts and not entry.writes
            ):
                entry = self._current(ask)
            template = link.templates.find(entry, head) or self._learn(link, entry, head)
            details = _details(head) if entry.signature.told else b""
            booking = b"" if trip is None else cast(RemoteTrip, trip).part(link, ask.step)
        except CarpoolError as error:
            return self._fail(call, error)
        if type(slot) is not ArenaSlot or template.extent > len(slot.view) - tail:
            return self._fail(call, CarpoolError("the tensors do not lie in a slot of this door"))
        call.template = template
        # Without room for its outputs they come over the socket, which is slower but still an answer.
        call.output = None if ask.in_parts else self.arena.allocate(template.capacity)
        try:
            link.submit(call, ask, details, booking)
            if trip is not None:  # whose promise holds
                call.expires = expiry(trip.entry, ask.arrived, ask.deadline)
        except BaseException:
            if call.output is not None:
                call.output.release()
            raise
        return call

    def begin_trip(self, entry: ModelEntry) -> RemoteTrip:
        return RemoteTrip(None, 0, entry) if self._link is None else self._link.begin_trip(entry)

    def _may_spare(self, entry: ModelEntry, call: RemoteCall) -> bool:
        """Unless the engine has just skipped one, or those that it has hold too much memory."""
        if self._in_vain.get(entry.key, 0.0) > monotonic():
            return False
        self._spare = [call for call in self._spare if call.link is not None]
        held = sum(len(call.slot.view) for call in (*self._spare, call) if call.slot is not None)
        if held > self.arena.size // _SPARE_PART:
            return False
        self._spare.append(call)
        return True

    def skipped_one(self, key: int) -> None:
        """Where the engine has no slack, it is not told of all that it would skip."""
        self._in_vain[key] = monotonic() + _IN_VAIN_S

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if self._link is None or self._still >= STALE_S:
            raise self._trouble()
        return await self._link.ask(what, arguments)

    # For the link.

    def opened(self, link: FrontLink) -> None:
        self._link = link
        self._still = 0.0
        self._forget()

    def renewed(self, catalog: Catalog) -> None:
        self.catalog = catalog
        entries = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
        self.known = {entry.key: entry for entry in entries}
        self._in_vain.clear()
        for listener in self._listeners:
            listener(catalog)

    def lost(self, link: FrontLink, error: str | None) -> None:
        """`error` says what the engine did wrong; without it, it has died."""
        if self._link is link:
            self._link = None
            self._forget()
        if error is not None:
            _log.error("link-broken", error=error)
            self._broken()

    def _forget(self) -> None:
        """The old catalogue can still be looked at, but nothing is served from it."""
        self.catalog = replace(self.catalog, number=0, ready=False)
        self.known = {}

    # The less common ways of a request.

    def _fail(self, call: RemoteCall, error: CarpoolError) -> RemoteCall:
        self._loop.call_soon(call.finish, Answer(error=error))
        return call

    def _trouble(self) -> Unavailable:
        if self._link is None:
            return _restarted()
        if self._still >= STALE_S:
            return stalled()
        return Unavailable("the engine does not take requests fast enough", reason="overload")

    def _learn(self, link: FrontLink, entry: ModelEntry, head: RequestHead) -> Template:
        if any(tensor.data is not None or tensor.shared_memory is not None for tensor in head.inputs):
            raise CarpoolError("tensors come through the door in a slot, and in no other way")
        return link.templates.learn(entry, head)

    def _current(self, ask: Ask) -> ModelEntry:
        """A request can outlive what it was meant for: a model that was loaded again and has no riders left,
        or the engine itself, and another one numbers anew. What serves in its place may take it."""
        entry, head = ask.entry, ask.head
        if not self.catalog.number:
            raise _restarted()
        now = self.catalog.entries.get((entry.name, entry.version))
        if now is None:
            raise NotFound(f"model '{entry.name}' version {entry.version} is not loaded any more")
        takes_files = now.vision is not None and now.vision["encoded"]
        sent_as = (head.encoded and not takes_files) or (head.regions and not now.fetches)
        if not now.signature.is_like(entry.signature) or sent_as:
            raise Unavailable(f"model '{entry.name}' was replaced; try again", reason="model-replaced")
        if now.decoupled and not ask.in_parts and not now.writes:
            raise Unsupported(f"{now.name} may give several answers, and only one can be taken here")
        return now


class _Background:
    """Hears of one inference that nobody waits for, and notes when the engine had no slack for it."""

    __slots__ = ("_door", "_hears", "_key")

    def __init__(self, door: RemoteDoor, key: int, hears: Hears) -> None:
        self._door = door
        self._key = key
        self._hears = hears

    def admitted(self) -> None:
        self._hears.admitted()

    def part(self, answer: Answer) -> None:
        self._hears.part(answer)

    def done(self, answer: Answer) -> None:
        if answer.error is not None and answer.error.reason == SPARE and answer.sent > 0.0:
            self._door.skipped_one(self._key)
        self._hears.done(answer)


def _details(head: RequestHead) -> bytes:
    """For a model that is told them; nothing where there is nothing to tell."""
    options = write_options(head.options)
    if not (head.id or options):
        return b""
    details = orjson.dumps({"id": head.id, "parameters": options})
    if len(details) > MAX_DETAILS_BYTES:
        raise TooLarge(
            f"the id and the parameters take more than the {MAX_DETAILS_BYTES} bytes that they may"
        )
    return details


def _restarted() -> Unavailable:
    return Unavailable("the engine is being restarted; try again", reason="engine-restarted")
