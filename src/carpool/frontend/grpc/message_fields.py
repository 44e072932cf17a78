"""Walks the fields of protobuf messages where they lie, and makes nothing of them.

A parser makes an object of each field and element under the interpreter lock, and two bytes are enough for
one. So what a message holds is counted here first. What a parser drops, such as fields of an unexpected type,
is stepped over as it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool.errors import InvalidInput
from carpool.wire.v2 import Buffer

VARINT: Final = 0
EIGHT: Final = 1
LENGTH: Final = 2
FOUR: Final = 5

_BEGIN: Final = 3  # of a group, which nothing here has
_END: Final = 4
_DEEPEST: Final = 100
_LONGEST_LENGTH: Final = 2**31 - 1
_LONGEST_TAG: Final = 2**32 - 1
_SHORTEST_LONG_VARINT: Final = 128


class WireField(NamedTuple):
    """Describes one field: the whole lies in `start:end` of its message, and its value in `begin:end`."""

    number: int
    kind: int
    start: int
    begin: int
    end: int


class Malformed(Exception):
    """No parser could read it."""


class FieldBudget:
    """Bounds how many fields are walked for one message, in all the messages within it."""

    __slots__ = ("_left", "_most", "_what")

    def __init__(self, most: int, what: str) -> None:
        """Of at most so many; `what` is what has them."""
        self._most = self._left = most
        self._what = what

    def take(self) -> None:
        """Counts one. Raises `InvalidInput` at the one that is too many."""
        self._left -= 1
        if self._left < 0:
            raise InvalidInput(
                f"{self._what} has more than {self._most:,} fields: give fewer of them, and tensors in"
                " raw_input_contents",
                field="body",
            )


def fields_of(message: Buffer, budget: FieldBudget) -> list[WireField]:
    """Returns the fields of a message, in their order and without groups. Raises `InvalidInput` where there
    are too many, and `Malformed`."""
    found: list[WireField] = []
    position, end = 0, len(message)
    try:
        while position < end:
            budget.take()
            start = position
            tag, position = _read_tag(message, position)
            kind = tag & 7
            if kind == LENGTH:
                length, position = _read_varint(message, position, 5)
                stop = position + length
                if length > _LONGEST_LENGTH:
                    raise Malformed
            elif kind == _BEGIN:
                position = _after_group(message, position, tag >> 3, budget)
                continue
            else:
                stop = _after_number(message, position, kind)
            if stop > end:
                raise Malformed
            found.append(WireField(tag >> 3, kind, start, position, stop))
            position = stop
    except IndexError:
        raise Malformed from None
    return found


def check_fields(message: Buffer, levels: Sequence[tuple[int, int]], what: str) -> None:
    """Raises `InvalidInput` for a message with more fields than a parser should see. Each level says how many
    there may be, and which of them are messages of the next. What is malformed is left to the parser."""
    (most, number), deeper = levels[0], levels[1:]
    try:
        fields = fields_of(message, FieldBudget(most, what))
    except Malformed:
        return
    view = memoryview(message)
    for field in fields:
        if deeper and field.number == number and field.kind == LENGTH:
            check_fields(view[field.begin : field.end], deeper, what)


def _read_tag(message: Buffer, position: int) -> tuple[int, int]:
    tag, position = _read_varint(message, position, 5)
    if tag < 8 or tag > _LONGEST_TAG:
        raise Malformed
    return tag, position


def _read_varint(message: Buffer, position: int, longest: int) -> tuple[int, int]:
    """Returns the number, and where the next thing begins."""
    value = message[position]
    position += 1
    if value < _SHORTEST_LONG_VARINT:
        return value, position
    value &= 0x7F
    for place in range(1, longest):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < _SHORTEST_LONG_VARINT:
            return value, position
    raise Malformed


def _after_number(message: Buffer, position: int, kind: int) -> int:
    if kind == VARINT:
        return _read_varint(message, position, 10)[1]
    if kind == EIGHT:
        return position + 8
    if kind == FOUR:
        return position + 4
    raise Malformed


def _after_group(message: Buffer, position: int, number: int, budget: FieldBudget) -> int:
    """Returns where the group ends."""
    inside = [number]
    while inside:
        budget.take()
        tag, position = _read_tag(message, position)
        kind = tag & 7
        if kind == _BEGIN:
            inside.append(tag >> 3)
            if len(inside) > _DEEPEST:
                raise Malformed
        elif kind == _END:
            if inside.pop() != tag >> 3:
                raise Malformed
        elif kind == LENGTH:
            length, position = _read_varint(message, position, 5)
            position += length
        else:
            position = _after_number(message, position, kind)
        if position > len(message):
            raise Malformed
    return position
