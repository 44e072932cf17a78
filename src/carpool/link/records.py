"""What the two sides say to each other: records of a fixed size, some with a payload of bytes behind them.

    front end → engine   TEMPLATE  number, JSON: what a family of requests has in common
                         RESET     forget every template
                         SOURCE    number, text: the source of this name has this number from now on
                         SUBMIT    call, template, where its inputs lie and its outputs may go, times, options
                         READY     call: its inputs, which were still to come, are there
                         CANCEL    call: nobody waits for it any more
                         SEEN      number of a catalogue that is in force here
                         ASK       number, JSON: a question that is not an inference
    engine → front end   DONE      call, status, batch and seconds; an error or unusual outputs as payload
                         ADMITTED  call: it is let in, and waits for its inputs
                         CATALOG   number, JSON
                         ANSWER    number, status, JSON

Every SUBMIT is answered by exactly one DONE, a cancelled one as well: only then are its slots free again. One
whose inputs are still to come is let in first, by ADMITTED, or refused by DONE; nobody reads its inputs
before READY.
Each side reads records in bulk, and writes in one piece what it has to say in one turn of its loop.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

TEMPLATE: Final = 1
RESET: Final = 2
SUBMIT: Final = 3
CANCEL: Final = 4
SEEN: Final = 5
ASK: Final = 6
DONE: Final = 7
CATALOG: Final = 8
ANSWER: Final = 9
SOURCE: Final = 10
READY: Final = 11
ADMITTED: Final = 12

TO_ENGINE = struct.Struct("<IIQQQQQdddddfIII")
"""Kind, payload bytes, number, template, offsets of input and output, capacity; times of arrival, deadline
and sending, and the seconds that its client waits outside the engine's account; Triton's queue timeout and
until its inputs are there, in seconds; priority, the number of its source (0: none) and flags."""

LATEST: Final = 1  # a newer frame of its source takes its place while it waits
COMING: Final = 2  # its inputs are still to come

TO_FRONTEND = struct.Struct("<IIQHHIffffd")
"""Kind, payload bytes, number, status, form of the outputs, batch; seconds of queue, input, infer, output;
the time of sending. Both sides read the same clock."""

OK: Final = 0
GONE: Final = 1
"""The answer to a call that was cancelled: nothing touches its slots any more. What is above is an error."""

AS_DECLARED: Final = 0  # outputs lie where the model's signature puts them: no payload
LISTED: Final = 1  # they lie in the output slot, the payload says where
INLINE: Final = 2  # they did not fit: length of the list, the list, their bytes

MAX_TEMPLATES = 1024
MAX_TEMPLATE_BYTES = 1 << 20
MAX_SOURCES = 1024
"""Names that have a number at a time, from 1 on: the next one takes the number that was given first."""
MAX_PRIORITY = 0xFFFF_FFFF
MAX_ASKS = 64
"""Questions that one front end may have open."""
MAX_ASK_BYTES = 256 << 20
"""Of one question: a model can come as part of one to load it."""

_MAX_UNSENT = 256 << 20
_NO_FIELDS = (0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)

Fields: TypeAlias = tuple[Any, ...]


class ProtocolError(Exception):
    """The other side said something that it never says: the link is of no use any more."""


def to_engine(kind: int, number: int, payload: bytes = b"") -> bytes:
    """Any record but SUBMIT, which is packed where it is made."""
    return TO_ENGINE.pack(kind, len(payload), number, *_NO_FIELDS) + payload


def to_frontend(kind: int, number: int, status: int, payload: bytes = b"") -> bytes:
    """Any record but a DONE that says when."""
    return TO_FRONTEND.pack(kind, len(payload), number, status, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0) + payload


class RecordReader:
    """Cuts a stream into records and payloads, whatever pieces it arrives in."""

    def __init__(self, record: struct.Struct, most: int) -> None:
        self._record = record
        self._most = most
        self._kept = bytearray()
        self._wanted = 0  # how many bytes have to be there before it is worth looking again

    def feed(self, data: bytes) -> Iterator[tuple[Fields, bytes]]:
        """Every record that is complete now. Go through all of them before the next call."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._wanted:
                return
            data = bytes(self._kept)
        size, unpack = self._record.size, self._record.unpack_from
        position, end = 0, len(data)
        while position + size <= end:
            fields = unpack(data, position)
            start = position + size
            stop = start + fields[1]
            if stop > end:
                if fields[1] > self._most:
                    raise ProtocolError(f"a payload of {fields[1]} bytes, over the limit of {self._most}")
                break
            position = stop
            yield fields, data[start:stop] if stop > start else b""
        else:
            stop = position + size
        self._kept = bytearray(data[position:])
        self._wanted = stop - position


class Outbox:
    """Sends what was said in one turn of the loop as one write.

    What cannot be sent ends the link, by `failed`: both sides then answer for all that they have, and nobody
    waits for a record that was lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[str], None]) -> None:
        self._loop = loop
        self.failed = failed
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def close(self) -> None:
        """From here on everything is dropped; writing to a closed transport would raise."""
        self._transport = None
        self._pieces.clear()

    def put(self, piece: bytes) -> None:
        pieces = self._pieces
        if not pieces:
            self._loop.call_soon(self._flush)
        pieces.append(piece)

    @property
    def unsent(self) -> int:
        """Bytes that the other side has not taken yet."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + sum(map(len, self._pieces))

    @property
    def full(self) -> bool:
        """The other side does not take what it is told."""
        return self.unsent > _MAX_UNSENT

    def _flush(self) -> None:
        pieces = self._pieces
        if pieces and self._transport is not None and not self._transport.is_closing():
            try:
                self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            except Exception as error:
                self.failed(f"it cannot be written to: {error}")
        pieces.clear()
