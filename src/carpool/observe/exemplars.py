"""Keeps examples beside the numbers: for each bucket of a histogram, a request that fell into it and has
spans.

    block 0: 512 records │ block 1: … │ …

They lie behind the shared table of counters, since a scrape asks any front end. A block has one
writer; its records are found by their bucket, and one that falls on another's place takes it. A reader may
come while one is being written: the checksum then does not fit, and it is left out.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from carpool.observe.columns import HistogramColumns

_PLACES = 512
_RECORD = struct.Struct("<IIqqdd16s8s")  # checksum, row, generation, column, value, Unix time, trace, span
_SKIPPED = 4  # what the checksum is not of: itself
EXEMPLAR_BYTES = _PLACES * _RECORD.size


class Exemplar(NamedTuple):
    value: float
    at: float  # Unix time
    trace: bytes
    span: bytes


class Exemplars:
    """Holds the part that one process writes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def note(
        self,
        row: tuple[int, int],
        trace: bytes,
        span: bytes,
        at: float,
        histogram: HistogramColumns,
        value: float,
    ) -> None:
        """`row` is that of the model version, with its generation. The last of each bucket is kept."""
        value = value if value > 0.0 else 0.0
        column = histogram.first + bisect_left(histogram.bounds, value)
        record = _RECORD.pack(0, row[0], row[1], column, value, at, trace, span)
        checksum = zlib.crc32(record[_SKIPPED:])
        start = (row[0] * 31 + column) % _PLACES * _RECORD.size
        self._view[start : start + _RECORD.size] = checksum.to_bytes(4, "little") + record[_SKIPPED:]


def read_exemplars(view: memoryview) -> Mapping[tuple[int, int, int], Exemplar]:
    """Returns the newest of all blocks, by row, generation and column."""
    found: dict[tuple[int, int, int], Exemplar] = {}
    for record in _RECORD.iter_unpack(bytes(view)):
        checksum, row, generation, column, *told = record
        if not row or checksum != zlib.crc32(_RECORD.pack(*record)[_SKIPPED:]):
            continue
        exemplar = Exemplar(*told)
        known = found.get((row, generation, column))
        if known is None or known.at < exemplar.at:
            found[row, generation, column] = exemplar
    return found
