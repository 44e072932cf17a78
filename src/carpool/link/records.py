"""Defines what travels over a link: records of a fixed form, each with a payload that may be empty.

Names of sources go as numbers: a name is said once, then only its number. Clients make up names as they like,
so there are only so many numbers: a new name takes the one that was given first. Records are read in the
order in which they were sent, so a number means what it was last said to mean.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from carpool.core.job import ANYWHERE, JobOrigin
from carpool.types import HEAVIEST, LIGHTEST
from carpool.wire.head import MAX_SOURCE_CHARS

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
RUN: Final = 13
RAN: Final = 14
BOOKING: Final = 15
PART: Final = 16
ROOM: Final = 17
PLACE: Final = 18
CATALOG_PIECE: Final = 19

TO_ENGINE = struct.Struct("<IIQQQQQdddddfIII")
"""Kind, payload bytes, number, template, offsets of input and output, capacity; times of arrival, deadline
and sending, and the seconds that its client waits outside the engine's account; Triton's queue timeout and
until its inputs are there, in seconds; priority, the number of its source (0: none) and flags."""

LATEST: Final = 1  # a newer frame of its source takes its place while it waits
COMING: Final = 2  # its inputs are still to come
BACKGROUND: Final = 4  # no client waits for it: it runs if there is slack
AGAIN: Final = 8  # another server has refused it before
STEP: Final = 16  # a step of a pipeline: its payload begins with the booking that it belongs to
REGIONS: Final = 32  # its inputs are in clients' memory: its payload goes on with where
PARTS: Final = 64  # each piece that its model writes is to be sent when it is there

ROOM_SIZE = struct.Struct("<Q")
"""How many bytes an answer takes that does not fit its slot. Its front end says where there is room for it,
in the fields of a request for the output; a capacity of 0 is none."""

STEP_PART = struct.Struct("<QQI")
"""The number of its booking, the pipeline's key and the number of the step."""

BOOKING_NEWS = struct.Struct("<III")
"""What a front end says of a booking: one of these, of which step, and with how many images."""
REACHES: Final = 0  # the step will be asked about so many images; none: it is over
ANSWERED: Final = 1
GIVEN_UP: Final = 2

TO_FRONTEND = struct.Struct("<IIQHHIffffdQ")
"""Kind, payload bytes, number, status, form of the outputs, batch; seconds of queue, input, infer, output;
the time of sending, and the number of the batch. Both sides read the same clock."""

FINISHES: Final = ("", "stop", "length")
"""Why a part is the last of a text, by the form of its record; its batch is LAST or 0."""
LAST: Final = 1  # the model has said with it that no other will come

TO_RUNNER = struct.Struct("<IIQ")
"""Kind, payload bytes, the number of a template."""

RUN_PLACE = struct.Struct("<QQQQQ")
"""Of one request: arena, template, offsets of input and output, capacity."""

FROM_RUNNER = struct.Struct("<IIIIIdfff")
"""Kind, payload bytes, images, batches that memory did not suffice for, flags; seconds in all, and of input,
infer and output."""

CLEAN: Final = 1  # nothing failed
ALIVE: Final = 2  # the instance can take another batch

OK: Final = 0
GONE: Final = 1
"""The answer to a call that was cancelled: nothing touches its slots any more. What is above is an error."""

AS_DECLARED: Final = 0  # outputs lie where the model's signature puts them: no payload
LISTED: Final = 1  # they lie in the output slot, the payload says where
INLINE: Final = 2  # they did not fit: length of the list, the list, their bytes
WITH_STEPS: Final = 0x100  # added to the form: the payload ends with the times of steps, and their length

MAX_TEMPLATES = 1024
MAX_TEMPLATE_BYTES = 1 << 20
MAX_RUNNER_TEMPLATES = 4096
"""That an instance in the runner is to remember."""
MAX_SOURCES = 1024
"""Names that have a number at a time, from 1 on: the next one takes the number that was given first."""
MAX_PRIORITY = 0xFFFF_FFFF
MAX_DETAILS_BYTES = 64 << 10
"""What a request says of itself beyond its tensors: its id and its parameters."""
MAX_PART_BYTES = 16 << 20
"""Of one of the answers of a decoupled model, which travel in their records."""
MAX_ASKS = 64
"""Questions that one front end may have open."""
MAX_ASK_BYTES = 256 << 20
"""Of one question: a model can come as part of one to load it."""

MAX_UNSENT = 256 << 20
"""Bytes that may wait for the other side."""
_ENDING = struct.Struct("<HHI")
_OF_SOURCE = struct.Struct("<dBB")
"""In front of a source's name: the weight of its key, how much of the name is the key's holder's, and how
many characters in front of the name are its client's address."""
_LONGEST_NAME = MAX_SOURCE_CHARS + 65
_LONGEST_ADDRESS = 64
_NO_FIELDS = (0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)

Fields: TypeAlias = tuple[Any, ...]


class ProtocolError(Exception):
    """The other side said something that it never says: the link is of no use any more."""


def to_engine(kind: int, number: int, payload: bytes = b"") -> bytes:
    """Makes any record but SUBMIT, which is packed where it is made."""
    return TO_ENGINE.pack(kind, len(payload), number, *_NO_FIELDS) + payload


def to_frontend(kind: int, number: int, status: int, payload: bytes = b"") -> bytes:
    """Makes any record but a DONE that says when."""
    return TO_FRONTEND.pack(kind, len(payload), number, status, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0) + payload


class RecordReader:
    """Cuts a stream into records and payloads, whatever pieces it arrives in."""

    def __init__(self, record: struct.Struct, most: int) -> None:
        self._record = record
        self._most = most
        self._kept = bytearray()
        self._wanted = 0  # how many bytes have to be there before it is worth looking again

    def feed(self, data: bytes) -> list[tuple[Fields, bytes]]:
        """Returns every record that is complete now."""
        records: list[tuple[Fields, bytes]] = []
        if self._kept:
            self._kept += data
            if len(self._kept) < self._wanted:
                return records
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
            records.append((fields, data[start:stop] if stop > start else b""))
        else:
            stop = position + size
        self._kept = bytearray(data[position:])
        self._wanted = stop - position
        return records


class Outbox:
    """Sends what was said in one turn of the loop as one write.

    What cannot be sent ends the link, by `failed`: both sides then answer for all that they have, and no
    request waits for a record that was lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[str], None]) -> None:
        self._loop = loop
        self.failed = failed
        self._transport: asyncio.Transport | None = None
        self._file = -1  # of the transport's socket
        self._pieces: list[bytes] = []

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._file = transport.get_extra_info("socket").fileno()

    def close(self) -> None:
        """From here on everything is dropped; writing to a closed transport would raise."""
        self._transport = None
        self._pieces.clear()

    def put(self, piece: bytes) -> None:
        pieces = self._pieces
        if not pieces:
            self._loop.call_soon(self._flush)
        pieces.append(piece)

    def send(self, piece: bytes) -> None:
        """Sends a record as `put` does, but at once: for a record that is alone, whose reader can begin while
        this loop goes on with its turn. Nothing overtakes what was put before.

        The system call is made without the interpreter lock, which a transport of uvloop keeps. Its reader
        wakes up, often on this very core, and goes first: this thread is then off the core in the middle of
        its call, and a model's thread that wants the lock would wait until that reader has no more to do.
        """
        transport = self._transport
        if self._pieces:
            self.put(piece)
            return
        if transport is None or transport.is_closing():
            return
        if not transport.get_write_buffer_size():
            try:
                written = os.write(self._file, piece)
            except OSError:  # it is full, or gone, which reading shows
                written = 0
            piece = piece[written:]
        if piece:
            transport.write(piece)

    @property
    def unsent(self) -> int:
        """Returns bytes that the other side has not taken yet."""
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + sum(map(len, self._pieces))

    @property
    def full(self) -> bool:
        """Returns whether too much is unsent because the other side does not read."""
        return self.unsent > MAX_UNSENT

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        try:
            if pieces:
                self.send(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        except Exception as error:
            self.failed(f"it cannot be written to: {error}")


class Ending(NamedTuple):
    """Describes what became of one request: a failure's status and text, or the outputs' form and its
    payload."""

    status: int
    form: int
    payload: bytes = b""


AS_EXPECTED = Ending(OK, AS_DECLARED)


def write_endings(endings: Sequence[Ending]) -> bytes:
    """Returns nothing where all went as expected, which is the rule."""
    if endings.count(AS_EXPECTED) == len(endings):
        return b""
    return b"".join(_ENDING.pack(end.status, end.form, len(end.payload)) + end.payload for end in endings)


def read_endings(payload: bytes, count: int) -> list[Ending]:
    """Reads the endings, and raises ValueError where they are not what `write_endings` wrote for so many."""
    if not payload:
        return [AS_EXPECTED] * count
    endings: list[Ending] = []
    position = 0
    for _ in range(count):
        if position + _ENDING.size > len(payload):
            raise ValueError("fewer endings than requests")
        status, form, size = _ENDING.unpack_from(payload, position)
        position += _ENDING.size
        endings.append(Ending(status, form, payload[position : position + size]))
        position += size
    if position != len(payload):
        raise ValueError("more endings than requests")
    return endings


class SaidSources:
    """Represents the front end's end. `send` takes records for the engine."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self.known: dict[tuple[str, str, float, str], int] = {}
        """Numbers by the source as a tuple, in the order in which they were given."""

    def number(self, source: JobOrigin) -> int:
        """Returns the number of a source, 0 for none; a source that is new to the engine is sent to it."""
        if not source.source and not source.payer:
            return 0
        found = self.known.get(source)
        return self._say(source) if found is None else found

    def _say(self, source: JobOrigin) -> int:
        numbers = self.known
        full = len(numbers) >= MAX_SOURCES
        number = numbers.pop(next(iter(numbers))) if full else len(numbers) + 1
        numbers[source] = number
        payer = source.payer[:_LONGEST_ADDRESS]
        said = _OF_SOURCE.pack(source.weight, len(source.holder), len(payer))
        said += (payer + source.source[:_LONGEST_NAME]).encode(errors="replace")
        self._send(to_engine(SOURCE, number, said))
        return number


class HeardSources:
    """Represents the engine's end, which believes nothing."""

    def __init__(self) -> None:
        self.known = {0: ANYWHERE}

    def hear(self, number: int, payload: bytes) -> None:
        try:
            weight, held, paid = _OF_SOURCE.unpack_from(payload)
            said = payload[_OF_SOURCE.size :].decode()
        except (struct.error, UnicodeDecodeError):
            raise ProtocolError("a source that is no text") from None
        payer, name = said[:paid], said[paid:]
        named = max(held, 0 if payer else 1) <= len(name) <= _LONGEST_NAME
        if not 1 <= number <= MAX_SOURCES or not named or paid > _LONGEST_ADDRESS:
            raise ProtocolError(f"source {number} of {len(name)} characters, {held} of them a key's")
        if not LIGHTEST <= weight <= HEAVIEST:  # NaN too
            raise ProtocolError(f"source {number} of weight {weight}")
        self.known[number] = JobOrigin(name, name[:held], weight, payer or name[:held])

    def source(self, number: int) -> JobOrigin:
        found = self.known.get(number)
        if found is None:
            raise ProtocolError(f"source {number}, which has no name")
        return found
