"""What a request brings, on its way into a slot: tensors in place, or in pieces; pictures are more of a kind.

A content belongs to the component that was last called with it. It releases what it holds with `drop`, any
number of times. While it is `kept`, it can be offered again when the engine is done with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from carpool.memory.arena import Slot
from carpool.wire.v2 import Buffer, RequestHead

Waiting: TypeAlias = "asyncio.Future[Any] | None"


class Places(Protocol):
    """Defines the part of a call that puts contents into slots, and asks the engine."""

    def place_in_slot(self, head: RequestHead, content: Content) -> None: ...
    def place_pieces(self, head: RequestHead, pieces: Sequence[Buffer], *, checked: bool) -> Waiting: ...


class Content:
    """Describes tensors that lie in a slot, behind `tail` bytes."""

    slot: Slot | None = None  # the content's own, until it is offered
    tail = 0
    kept = False  # it may be wanted again
    is_pictures = False  # it is `SentPictures`
    copied = False  # its bytes are wanted in the slot also where the engine could fetch them
    sent = False  # its tensors went to the engine
    gone = False  # the engine is done with them, and the slot may be used for something else
    held: Slot | None = None  # a share of the slot that they went in, while it is kept
    offered_as: RequestHead | None = None

    def __init__(self, slot: Slot, tail: int) -> None:
        self.slot = slot
        self.tail = tail

    def bytes_of(self, head: RequestHead) -> Sequence[Buffer]:
        """Returns the bytes that identify it, as they came."""
        assert self.slot is not None
        return (self.slot.view[self.tail : self.tail + head.tail_size],)

    def offer(self, call: Places, head: RequestHead) -> None:
        call.place_in_slot(head, self)

    def take(self) -> Slot:
        """The slot is the caller's from here on."""
        slot, self.slot = self.slot, None
        assert slot is not None
        return slot

    def went(self, head: RequestHead, slot: Slot, tail: int) -> None:
        """The tensors are on their way to the engine."""
        self.sent = True
        self.offered_as, self.tail = head, tail
        if self.kept and self.held is None:
            self.held = slot.share()

    def take_held(self) -> Slot | None:
        slot, self.held = self.held, None
        return slot

    def drop(self) -> None:
        """Give back what it holds."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()
        slot, self.held = self.held, None
        if slot is not None:
            slot.release()


class Pieces(Content):
    """Describes tensors elsewhere in memory, or in the client's own. Without `checked`, it is still to be
    seen whether BYTES and BOOL are such."""

    def __init__(self, pieces: Sequence[Buffer], *, checked: bool) -> None:
        self._pieces = pieces
        self._checked = checked
        self.checking: Waiting = None  # a thread looks at them, before they are offered

    def bytes_of(self, _head: RequestHead) -> Sequence[Buffer]:
        return self._pieces

    def offer(self, call: Places, head: RequestHead) -> None:
        self.checking = call.place_pieces(head, self._pieces, checked=self._checked)

    def went(self, head: RequestHead, slot: Slot, tail: int) -> None:
        super().went(head, slot, tail)
        self._pieces = ()
