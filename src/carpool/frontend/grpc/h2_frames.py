"""Frames of HTTP/2 (RFC 9113): their names, how they are written, and what a peer may do wrong.

And the header blocks within them (RFC 7541), read with the tables of the `hpack` library. What we write never
uses the dynamic table: our heads are constant bytes, and there is no state that could be lost.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Final

from hpack.exceptions import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
"""Of those that always have the same."""
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST: Final = 6

FRAME_BYTES: Final = 9
FRAME: Final = Struct(">HBBBL")  # two parts of the length, kind, flags, stream
SETTING: Final = Struct(">HL")
NUMBER: Final = Struct(">L")
DEFAULT_WINDOW: Final = 65_535
LARGEST_WINDOW: Final = 2**31 - 1
SMALLEST_FRAME: Final = 1 << 14
LARGEST_FRAME: Final = (1 << 24) - 1
SMALL: Final = 16  # bytes of a frame that is hardly worth its head

NO_TABLE: Final = b"\x20"
"""At the start of a block: the writer uses no dynamic table. Needed once, if a peer has changed its size."""

_MANY: Final = 1024  # bytes of a frame that is taken with others: so many frames take no time worth a look
_TABLE_BYTES = HeaderTable.DEFAULT_SIZE
_FIELD_BYTES: Final = 32  # what a field counts beside its name and value
_MOST_FIELDS: Final = 512
_MOST_SETTINGS: Final = 64
_LONGEST_SHIFT: Final = 28
_CANNOT_BE_KEPT: Final = 4 * _TABLE_BYTES  # a code in Huffman's table has up to 30 bits


class Code(IntEnum):
    """Lists the codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Breach(Exception):
    """Describes what a peer did that ends its connection."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def reset(stream: int, code: Code) -> bytes:
    return frame(RST_STREAM, 0, stream, NUMBER.pack(code))


def window_update(stream: int, more: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, NUMBER.pack(more))


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in values.items()))


def goaway(last: int, code: Code, words: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, NUMBER.pack(last) + NUMBER.pack(code) + words.encode()[:256])


def read_number(payload: memoryview) -> int:
    return int(NUMBER.unpack(payload)[0]) & LARGEST_WINDOW


def end_of_preface(data: bytes | bytearray, end: int) -> int:
    """Returns where the first frame begins; 0 while that is not here."""
    if not PREFACE.startswith(bytes(data[: min(end, len(PREFACE))])):
        raise Breach(Code.PROTOCOL_ERROR, "this port speaks gRPC, over HTTP/2")
    return 0 if end < len(PREFACE) else len(PREFACE)


def head_block(flags: int, stream: int, payload: memoryview) -> bytes:
    """Returns the header block of HEADERS, without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not end or payload[0] >= end:
            raise Breach(Code.PROTOCOL_ERROR, "a frame has more padding than bytes")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        if end - start < 5:
            raise Breach(Code.FRAME_SIZE_ERROR, "a priority is cut off")
        if read_number(payload[start : start + 4]) == stream:
            raise Breach(Code.PROTOCOL_ERROR, "a stream depends on itself")
        start += 5
    if not stream & 1:
        raise Breach(Code.PROTOCOL_ERROR, "clients open streams of odd numbers")
    return bytes(payload[start:end])


def read_settings(flags: int, payload: memoryview) -> list[tuple[int, int]]:
    """Returns what SETTINGS says; nothing where it only acknowledges ours."""
    if len(payload) % SETTING.size or (flags & ACK and len(payload)):
        raise Breach(Code.FRAME_SIZE_ERROR, "settings have six bytes each")
    if len(payload) > _MOST_SETTINGS * SETTING.size:
        raise Breach(Code.ENHANCE_YOUR_CALM, "too many settings")
    return list(SETTING.iter_unpack(payload))


def copy_data(
    view: memoryview, position: int, end: int, stream: int, into: memoryview
) -> tuple[int, int, bool]:
    """Copies frames of data of one stream that are here whole, one behind the other, as far as there is room
    for what they bring: without what stands before each, and up to the one that ends the stream. Those that
    are padded or hardly worth their heads are for others to take. Returns where the rest begins, how much was
    copied, and whether the stream ended.

    Many clients cut messages into frames of 16 KiB, and what is done for each costs more than to copy it.
    """
    room, copied = len(into), 0
    while position + FRAME_BYTES <= end:
        high, low, kind, flags, number = FRAME.unpack_from(view, position)
        start, length = position + FRAME_BYTES, high << 8 | low
        stop, filled = start + length, copied + length
        if kind or flags > END_STREAM or number != stream or stop > end or filled > room:
            break
        if length < _MANY and not flags:
            break
        into[copied:filled] = view[start:stop]
        position, copied = stop, filled
        if flags:
            return position, copied, True
    return position, copied, False


SETTINGS_SEEN = frame(SETTINGS, ACK, 0)

# ── header blocks ──


def field(name: bytes, value: bytes) -> bytes:
    """Returns a field as a literal, which the peer does not add to its table."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    if size < 0x7F:
        return bytes((size,))
    out = bytearray(b"\x7f")
    size -= 0x7F
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


Fields = list[tuple[bytes, bytes]]


class BlockReader:
    """Reads the header blocks of one connection in their order. A `Breach` leaves it unusable."""

    __slots__ = ("_limit", "_table", "changes")

    def __init__(self, limit: int) -> None:
        self._table = HeaderTable()
        self._limit = limit  # bytes of the longest list that is returned
        self.changes = 0  # of the dynamic table: between two equal numbers, equal blocks mean the same

    def read(self, block: bytes) -> tuple[Fields, int]:
        """Returns the fields, and the size that they count. A list over the limit has none: it is read only
        for what later blocks may refer to in the table."""
        try:
            return self._read(block)
        except (HPACKError, IndexError) as error:
            raise Breach(Code.COMPRESSION_ERROR, "a header block cannot be read") from error

    def _read(self, block: bytes) -> tuple[Fields, int]:
        fields: Fields = []
        table = self._table
        size = position = count = 0
        end = len(block)
        most_read = _CANNOT_BE_KEPT if end > self._limit else end
        while position < end:
            first = block[position]
            if first & 0x80:
                index, position = _number(block, position, 0x7F)
                found = table.get_by_index(index)
            elif first & 0x60 == 0x20:
                position = self._resize(block, position, bool(count))
                continue
            else:
                indexed = first & 0x40
                index, position = _number(block, position, 0x3F if indexed else 0x0F)
                if index:
                    name = table.get_by_index(index)[0]
                else:
                    name, position = _text(block, position, most_read)
                value, position = _text(block, position, most_read)
                found = name, value
                if indexed:
                    table.add(name, value)
                    self.changes += 1
            count += 1
            size += _FIELD_BYTES + len(found[0]) + len(found[1])
            if count > _MOST_FIELDS:
                raise Breach(Code.ENHANCE_YOUR_CALM, "the header list is too long")
            if size <= self._limit:
                fields.append(found)
        return (fields if size <= self._limit else []), size

    def _resize(self, block: bytes, position: int, late: bool) -> int:
        size, position = _number(block, position, 0x1F)
        if late or size > _TABLE_BYTES:
            raise Breach(Code.COMPRESSION_ERROR, "the header table cannot be resized like that")
        self._table.maxsize = size
        self.changes += 1
        return position


def _number(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Returns a number, with where it ends. Raises IndexError if the block ends before."""
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    shift = 0
    while True:
        more = block[position]
        position += 1
        number += (more & 0x7F) << shift
        if more < 0x80:
            return number, position
        shift += 7
        if shift > _LONGEST_SHIFT:
            raise Breach(Code.COMPRESSION_ERROR, "a number in a header block is too long")


def _text(block: bytes, position: int, most: int) -> tuple[bytes, int]:
    """Returns a text, with where it ends; as it is in the block, if it is longer than `most`."""
    coded = block[position] & 0x80
    size, position = _number(block, position, 0x7F)
    end = position + size
    if end > len(block):
        raise IndexError
    text = block[position:end]
    if not coded or size > most:
        return text, end
    return _known_text(text) if size <= 64 else bytes(decode_huffman(text)), end


@lru_cache(maxsize=256)
def _known_text(coded: bytes) -> bytes:
    return bytes(decode_huffman(coded))
