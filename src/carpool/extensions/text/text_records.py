"""What is said of answers that are being written: between an instance and the engine, and over the socket to
those that are in the runner."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from carpool.errors import CarpoolError
from carpool.link.link_failures import read_failure, write_failure
from carpool.link.records import Fields, ProtocolError, RecordReader

STOP, LENGTH = "stop", "length"
"""Why an answer ends: the model says so, or it has as many tokens as it may have."""


class Piece(NamedTuple):
    """Describes what was written for one answer in one step. `finish` says why it ends there; empty: it goes
    on. What comes first of an answer says how long it waited and how long it was encoded, in seconds."""

    number: int
    text: str
    tokens: int  # of the whole answer so far
    finish: str = ""
    waited: float = 0.0
    encoded: float = 0.0


class Failed(NamedTuple):
    """It will not be written, or not to its end."""

    number: int
    error: CarpoolError


class Worked(NamedTuple):
    """The device has encoded so many, or stepped so many slots, or neither; and how full it is."""

    encoded: int
    stepped: int
    seconds: float
    used: int
    waiting: int


Event: TypeAlias = Piece | Failed | Worked

WRITE: Final = 101
LEAVE: Final = 102

ASKED = struct.Struct("<ddI")
"""Behind the place of a request's picture: when it arrived, its deadline, and how many tokens it may have."""

_FROM_WRITER = struct.Struct("<IIQIHHdd")
"""Kind, payload bytes, number, tokens, status and finish, two numbers of seconds."""
_PIECE, _FAILED, _WORKED = 1, 2, 3
_FINISHES = ("", STOP, LENGTH)
_MOST_TEXT = 1 << 20


def write_events(events: Sequence[Event]) -> bytes:
    return b"".join(map(_write, events))


def _write(event: Event) -> bytes:
    if isinstance(event, Piece):
        text = event.text.encode()
        finish = _FINISHES.index(event.finish)
        head = (_PIECE, len(text), event.number, event.tokens, 0, finish, event.waited, event.encoded)
        return _FROM_WRITER.pack(*head) + text
    if isinstance(event, Failed):
        status, payload = write_failure(event.error)
        return _FROM_WRITER.pack(_FAILED, len(payload), event.number, 0, status, 0, 0.0, 0.0) + payload
    used = event.used << 32 | event.waiting
    return _FROM_WRITER.pack(_WORKED, 0, used, event.encoded, event.stepped, 0, event.seconds, 0.0)


class TextEventReader:
    """Reads what `write_events` wrote, in whatever pieces it arrives. It believes nothing: ProtocolError."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._reader = RecordReader(_FROM_WRITER, _MOST_TEXT)

    def feed(self, data: bytes) -> list[Event]:
        try:
            return [self._read(fields, payload) for fields, payload in self._reader.feed(data)]
        except (ValueError, IndexError, struct.error) as error:
            raise ProtocolError(f"an event that cannot be: {error}") from None

    def _read(self, fields: Fields, payload: bytes) -> Event:
        kind, _, number, tokens, status, finish, first, second = fields
        if kind == _PIECE:
            return Piece(number, payload.decode(), tokens, _FINISHES[finish], first, second)
        if kind == _FAILED:
            return Failed(number, read_failure(status, payload, self._model))
        if kind == _WORKED:
            return Worked(tokens, status, first, number >> 32, number & 0xFFFF_FFFF)
        raise ProtocolError(f"an event of kind {kind}")
