"""Holds what a front end knows of its engine, and the memory that both use for requests and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from carpool.errors import NotFound, Unavailable, Unsupported
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Ask
from carpool.memory.arena import LARGE, MOST_OF_ARENA, Arena, ArenaSlot, BodySlots, MakeRoom, Slot, check_fits
from carpool.memory.pulse import STALE_S


class EngineState(BodySlots):
    """Outlives the engines that follow one another: each has its own link."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena.allocate, arena.left_with)
        self.arena = arena
        self.catalog = Catalog()
        self.known: Mapping[int, ModelEntry] = {}  # the entries of this engine, by key
        self.serving = self.stalls = False
        self.connected = self.draining = False
        self.still = 0.0  # for how long the engine has stood still
        self._listeners: list[Callable[[Catalog], None]] = []

    # What becomes of the engine.

    def judge(self) -> None:
        """Something has changed that it depends on whether requests are taken."""
        known = self.connected and self.catalog.number > 0
        self.stalls = self.still >= STALE_S
        self.serving = known and not self.draining and not self.stalls

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        self._listeners.append(listener)
        listener(self.catalog)

    def renewed(self, catalog: Catalog) -> None:
        self.catalog = catalog
        entries = (*catalog.entries.values(), *catalog.newest.values(), *catalog.leaving)
        self.known = {entry.key: entry for entry in entries}
        self.judge()
        for listener in self._listeners:
            listener(catalog)

    def forget(self) -> None:
        """The old catalogue can still be looked at, but nothing is served from it."""
        self.catalog = replace(self.catalog, number=0, ready=False)
        self.known = {}
        self.judge()

    def trouble(self) -> Unavailable:
        if not self.connected:
            return restarted()
        if self.still >= STALE_S:
            return stalled()
        return Unavailable("the engine does not take requests fast enough", reason="overload")

    def current(self, ask: Ask) -> ModelEntry:
        """Returns the entry that serves a request now. A request can outlive the entry that it was sent to:
        its model was loaded again and the old entry has no requests left, or a new engine numbers entries
        anew. The entry in its place may take the request."""
        entry, head = ask.entry, ask.head
        if not self.catalog.number:
            raise restarted()
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

    # Memory.

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


def restarted() -> Unavailable:
    return Unavailable("the engine is being restarted; retry", reason="engine-restarted")


def stalled() -> Unavailable:
    return Unavailable("the engine does not respond; retry later", reason="engine-stalled")
