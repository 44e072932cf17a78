"""Implements the door of a front end whose engine lives in another process: what outlives the engine at the
other end of the link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any, cast

from carpool.errors import CarpoolError, NotFound, Unavailable, Unsupported
from carpool.frontend.front_link import Asks, FrontLink, RemoteBooking, RemoteCall, stalled
from carpool.link.advice import Gate, open_gate
from carpool.link.door import Answer, Ask, Catalog, Hears, ModelEntry
from carpool.memory.arena import LARGE, MOST_OF_ARENA, Arena, ArenaSlot, BodySlots, MakeRoom, Slot, check_fits
from carpool.memory.pulse import HOPELESS_S, STALE_S
from carpool.observe.logs import logger

_log = logger("link")

_IN_VAIN_S = 0.05  # after background work was skipped
_LOOKS_EVERY = 20  # beats, at memory that long bodies have used
_BACKGROUND_PART = 16  # of the memory, at most, for all of it together


def _nowhere(entry: ModelEntry) -> RemoteBooking:
    """Books without an engine: whatever is asked through it fails."""
    return RemoteBooking(None, 0, entry)


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
        self.infer: Asks = self._no_engine  # the link's, while there is one; so is this:
        self.begin_booking: Callable[[ModelEntry], RemoteBooking] = _nowhere
        self.serving = self.stalls = False
        self._broken = broken
        self._loop = asyncio.get_running_loop()
        self._link: FrontLink | None = None
        self.catalog = Catalog()
        self.known: Mapping[int, ModelEntry] = {}  # the entries of this engine, by key
        self._draining = False
        self._still = 0.0  # for how long the engine has stood still
        self._beats = 0
        self._gives_back = False  # memory that long bodies have used
        self._in_vain: dict[int, float] = {}  # until when background work for a model is skipped here
        self._background: list[RemoteCall] = []  # what the engine has of it
        self._listeners: list[Callable[[Catalog], None]] = []

    def _judge(self) -> None:
        """Something has changed that it depends on whether requests are taken."""
        known = self._link is not None and self.catalog.number > 0
        self.stalls = self._still >= STALE_S
        self.serving = known and not self._draining and not self.stalls

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        self._listeners.append(listener)
        listener(self.catalog)

    def advise(self, gate: Gate) -> None:
        """Ask this before a body is read."""
        self.refuses = gate

    def engine_stood_still(self, seconds: float) -> None:
        """Told every `BEAT_S`: an engine that hangs has not closed its link, and may never do so."""
        if (seconds >= STALE_S) != (self._still >= STALE_S):
            _log.warning("engine-stalled" if seconds >= STALE_S else "engine-recovered")
        self._still = seconds
        self._judge()
        self._beats += 1
        if self._beats % _LOOKS_EVERY == 0 or self._gives_back:
            self._gives_back = self.arena.give_back()
        if self._link is not None:
            self._link.look_at_time(monotonic(), hopeless=seconds >= HOPELESS_S)

    def drain(self) -> None:
        """Not serving any more, although what has begun is still carried through."""
        self._draining = True
        self._judge()

    async def attach(self, sock: socket.socket) -> None:
        """Attaches a new engine: the one before, if there was any, is dead."""
        self.close()
        link = FrontLink(self, self._loop, self._max_answer_bytes)
        await self._loop.create_unix_connection(lambda: cast(asyncio.Protocol, link), sock=sock)

    def close(self) -> None:
        """End the link, and with it whatever still waits."""
        if self._link is not None:
            self._link.close()

    def check_fits(self, size: int) -> None:
        check_fits(self.arena, size)

    def large_slot(self, size: int, answer: int, client: str, make_room: MakeRoom) -> Slot:
        arena = self.arena
        self.check_fits(size)
        reserved = answer if self._is_large(answer) else 0
        while True:
            if not arena.may_take(client, size, reserved):
                raise self._has_its_part(client)
            slot = arena.allocate(size, client)
            if slot is not None and reserved:
                slot.answer = arena.allocate(reserved, client)
            if slot is not None and (slot.answer is not None or not reserved):
                return slot
            if slot is not None:
                slot.release()
            if not make_room():
                raise Unavailable("all memory for request bodies is in use", reason="no-slots")

    def answer_slot(
        self, slot: ArenaSlot | None, client: str, capacity: int, *, certain: bool = True
    ) -> ArenaSlot | None:
        """Returns a slot for the answer to what is in `slot`, where one may be reserved already. None where
        there is no room: then the answer comes over the link. Raises `Unavailable` if it is too long for
        that. An answer that is not `certain` to take so much is never rejected."""
        reserved = None if slot is None else slot.take_answer()
        if reserved is not None and reserved.capacity >= capacity:
            return reserved
        if not certain:
            return self._expected_slot(reserved, client, capacity)
        if reserved is not None:
            reserved.release()
        large = self._is_large(capacity) and client != ""
        if large and not self.arena.may_take(client, capacity):
            raise self._has_its_part(client)
        found = self.arena.allocate(capacity, client)
        if found is None and large:
            raise Unavailable("all memory for responses is in use", reason="no-slots")
        return found

    def _expected_slot(self, reserved: ArenaSlot | None, client: str, capacity: int) -> ArenaSlot | None:
        """Returns a slot as long as an answer like this was before, or else what is reserved: an answer that
        does not fit asks for room when it is there."""
        may_take = self.arena.may_take(client, capacity)
        found = self.arena.allocate(capacity, client) if may_take else None
        if found is None:
            return reserved
        if reserved is not None:
            reserved.release()
        return found

    def _is_large(self, size: int) -> bool:
        """Returns whether an answer has to have a slot: not where it is as long as most of the memory."""
        return LARGE < size <= self.arena.size // MOST_OF_ARENA

    def _has_its_part(self, client: str) -> Unavailable:
        held = self.arena.large_of(client)
        return Unavailable(
            f"this client's requests hold {held} of the {self.arena.size} bytes for bodies and responses; "
            "retry when one is answered",
            reason="no-slots",
        )

    def turned_away(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        """Nobody asks for them here: `RecordingDoor` does."""

    def answered_here(self, entry: ModelEntry, arrived: float, images: int, source: str) -> None:
        """Does the same."""

    def _no_engine(self, ask: Ask, hears: Hears) -> RemoteCall:
        return self.fail(RemoteCall(ask, hears), self.trouble())

    def may_run_in_background(self, entry: ModelEntry, call: RemoteCall) -> bool:
        """Returns True unless the engine has just skipped one, or those that it has hold too much memory."""
        if self._in_vain.get(entry.key, 0.0) > monotonic():
            return False
        self._background = [call for call in self._background if call.link is not None]
        held = sum(len(call.slot.view) for call in (*self._background, call) if call.slot is not None)
        if held > self.arena.size // _BACKGROUND_PART:
            return False
        self._background.append(call)
        return True

    def skipped_one(self, key: int) -> None:
        """Where the engine has no slack, it is not told of all that it would skip."""
        self._in_vain[key] = monotonic() + _IN_VAIN_S

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if self._link is None or self._still >= STALE_S:
            raise self.trouble()
        return await self._link.ask(what, arguments)

    # For the link.

    def opened(self, link: FrontLink) -> None:
        self._link = link
        self.infer, self.begin_booking = link.infer, link.begin_booking
        self._still = 0.0
        self._forget()

    def renewed(self, catalog: Catalog) -> None:
        self.catalog = catalog
        entries = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
        self.known = {entry.key: entry for entry in entries}
        self._in_vain.clear()
        self._judge()
        for listener in self._listeners:
            listener(catalog)

    def lost(self, link: FrontLink, error: str | None) -> None:
        """`error` says what the engine did wrong; without it, it has died."""
        if self._link is link:
            self._link = None
            self.infer, self.begin_booking = self._no_engine, _nowhere
            self._forget()
        if error is not None:
            _log.error("link-broken", error=error)
            self._broken()

    def _forget(self) -> None:
        """The old catalogue can still be looked at, but nothing is served from it."""
        self.catalog = replace(self.catalog, number=0, ready=False)
        self.known = {}
        self._judge()

    # The less common ways of a request.

    def fail(self, call: RemoteCall, error: CarpoolError) -> RemoteCall:
        self._loop.call_soon(call.finish, Answer(error=error))
        return call

    def trouble(self) -> Unavailable:
        if self._link is None:
            return _restarted()
        if self._still >= STALE_S:
            return stalled()
        return Unavailable("the engine does not take requests fast enough", reason="overload")

    def current(self, ask: Ask) -> ModelEntry:
        """A request can outlive what it was meant for: a model that was loaded again and has no riders left,
        or the engine itself, and another one numbers anew. What serves in its place may take it."""
        entry, head = ask.entry, ask.head
        if not self.catalog.number:
            raise _restarted()
        now = self.catalog.entries.get((entry.name, entry.version))
        if now is None:
            raise NotFound(f"model '{entry.name}' version {entry.version} is not loaded any more")
        takes_files = now.vision is not None and now.vision["encoded"]
        sent_as = (head.encoded and not takes_files) or (head.regions and not now.traits.fetches)
        if not now.signature.is_like(entry.signature) or sent_as:
            raise Unavailable(f"model '{entry.name}' was replaced; retry", reason="model-replaced")
        if now.traits.decoupled and not ask.handling.in_parts and not now.traits.writes:
            raise Unsupported(f"{now.name} may give several responses, but this call takes one")
        return now


def _restarted() -> Unavailable:
    return Unavailable("the engine is being restarted; retry", reason="engine-restarted")
