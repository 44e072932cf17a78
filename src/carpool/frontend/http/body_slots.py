"""Slots for bodies that are still arriving, so that announcing one is not enough to take the memory for it.

While there is plenty, a body gets all of its memory when its head is here, and comes straight into it. Else
it gets a little, and more as it comes: what slow clients hold then follows from what they sent, not from
what they said. A share for each peer's address was rejected: behind a proxy all clients have the same.
"""

from __future__ import annotations

from carpool.errors import Unavailable
from carpool.frontend.http.exchange import Exchange
from carpool.link.door import Door, Slot

_PLENTY = 0.25  # of all memory: up to here nobody looks at who takes it
_FIRST_BYTES = 16 * 1024  # so that 4,096 connections that send nothing hold a quarter of the usual 256 MiB
_GROWTH = 4  # bytes copied per byte of a body: at most a third


def first_slot(door: Door, exchange: Exchange, size: int) -> Slot:
    """For a body that will take `size` bytes. Raises `Unavailable` when there is no memory, `TooLarge` when
    there never will be."""
    if size <= _FIRST_BYTES or door.memory_left(size) >= 1 - _PLENTY:
        return _slot(door, exchange, size)
    return _slot(door, exchange, _FIRST_BYTES)


def larger_slot(door: Door, exchange: Exchange, slot: Slot, kept: int, size: int) -> Slot:
    """In the place of one whose `kept` first bytes are used, and which is given back whatever happens; up to
    `size` bytes long. Raises as above."""
    wanted = min(_GROWTH * len(slot.view), size)
    try:
        larger = door.slot(wanted)
        if larger is not None:
            larger.view[:kept] = slot.view[:kept]
            return larger
        part = bytes(slot.view[:kept])  # its own memory may be what is missing
    finally:
        slot.release()
    larger = _slot(door, exchange, wanted)
    larger.view[:kept] = part
    return larger


def no_slots() -> Unavailable:
    return Unavailable("all memory for request bodies is in use", reason="no-slots")


def _slot(door: Door, exchange: Exchange, size: int) -> Slot:
    slot = door.slot(size)
    while slot is None and exchange.make_room():
        slot = door.slot(size)
    if slot is None:
        raise no_slots()
    return slot
