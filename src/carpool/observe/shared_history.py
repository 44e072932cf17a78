"""Keeps the points of the history at the end of the shared table. `history.py` says what they are.

    senders, as the engine reports them │ places of the points │ the points, one after the other

No locks: the senders have one writer, the points another. What is read has a checksum: a reader who meets it
in mid-write goes without.
"""

from __future__ import annotations

import struct
import zlib

KEPT_S = 900
_SENDERS_BYTES = 1 << 15
_RING_BYTES = 8 << 20
_PLACE = struct.Struct("<QQIII")  # number, offset, length, length before the senders, checksum
_SIZE = struct.Struct("<II")  # length, checksum
_PLACES_BYTES = KEPT_S * _PLACE.size

HISTORY_BYTES = _SENDERS_BYTES + _PLACES_BYTES + _RING_BYTES


class SharedHistory:
    """Holds points over `HISTORY_BYTES` that begin as zeros."""

    def __init__(self, view: memoryview) -> None:
        self._senders = view[:_SENDERS_BYTES]
        self._places = view[_SENDERS_BYTES : _SENDERS_BYTES + _PLACES_BYTES]
        self._ring = view[_SENDERS_BYTES + _PLACES_BYTES : HISTORY_BYTES]
        self._end = 0

    def tell_senders(self, document: bytes) -> None:
        """Writes, for the engine, who sends most, just now. What is too long is left out."""
        if len(document) + _SIZE.size <= len(self._senders):
            head = _SIZE.pack(len(document), zlib.crc32(document))
            self._senders[: _SIZE.size + len(document)] = head + document

    def senders(self) -> bytes:
        length, checksum = _SIZE.unpack_from(self._senders)
        document = bytes(self._senders[_SIZE.size : _SIZE.size + length])
        return document if document and zlib.crc32(document) == checksum else b""

    def write(self, number: int, document: bytes, senders: bytes) -> None:
        """The next point, a JSON object; `number` is larger than all before it."""
        point = document[:-1] + b',"senders":%b}' % senders
        if len(point) > len(self._ring) // 8:
            return  # no second is worth that much memory
        if self._end + len(point) > len(self._ring):
            self._end = 0
        start, self._end = self._end, self._end + len(point)
        self._ring[start : self._end] = point
        place = _PLACE.pack(number, start, len(point), len(document) - 1, zlib.crc32(point))
        at = number % KEPT_S * _PLACE.size
        self._places[at : at + _PLACE.size] = place

    def read(self, after: int = 0, *, with_senders: bool = True) -> list[tuple[int, bytes]]:
        """Returns the points with a larger number than that, the oldest first, perhaps without the senders:
        not every reader may see them. Points that were overwritten are left out."""
        places = sorted(_PLACE.iter_unpack(bytes(self._places)))
        newest = places[-1][0]
        found = []
        for number, start, length, shorter, checksum in places:
            if number > after and number > newest - KEPT_S and length:
                point = bytes(self._ring[start : start + length])
                if zlib.crc32(point) == checksum:
                    found.append((number, point if with_senders else point[:shorter] + b"}"))
        return found
