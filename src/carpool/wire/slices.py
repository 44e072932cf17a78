"""Writes a long answer a piece at a time: JSON in slices of so many elements, bytes as parts of what they lie
in.

A library that writes JSON holds the interpreter from the first element to the last, and code that joins long
bytes holds it for as long: 22 MB of numbers stop a front end for seconds. A piece here takes some tenths of a
millisecond, and nothing is held but the tensors themselves.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import orjson

from carpool.errors import ModelError
from carpool.types import Array, Datatype, Tensor
from carpool.wire.head import Buffer

ELEMENTS: Final = 8192
"""Of JSON that are written at once."""
TEXT_BYTES: Final = 64 * 1024
"""Of strings that are written at once."""
PIECE_BYTES: Final = 256 * 1024
"""Of a tensor that are sent at once."""
_LOOKED_AT: Final = 1 << 18  # numbers, to see whether JSON has them


class Sliced(Protocol):
    """Defines an answer that is made in pieces."""

    @property
    def held(self) -> int:
        """Returns the bytes of memory that it is made of."""

    def pieces(self) -> Iterator[Buffer]:
        """Makes them, in their order. An empty one is a step of work before the first; what cannot be written
        raises `ModelError` there."""

    def move(self) -> None:
        """Copies what it is made of into memory of its own. In any thread, while pieces are made."""


def is_long(tensor: Tensor) -> bool:
    """Returns whether a tensor takes more than one slice of JSON."""
    data = tensor.data
    if data.size > ELEMENTS:
        return True
    return tensor.datatype is Datatype.BYTES and sum(map(len, data.ravel().tolist())) > TEXT_BYTES


class Values:
    """Writes the elements of one output as JSON, without brackets. `as_python`: as Python's own numbers, and
    with replacements for what is no text; else what JSON cannot represent is an error."""

    def __init__(self, tensor: Tensor, *, as_python: bool = False) -> None:
        self.data: Array = tensor.data
        self._owner = f"output '{tensor.name}'"
        self._strings = tensor.datatype is Datatype.BYTES
        self._as_python = as_python

    @property
    def held(self) -> int:
        if not self._strings:
            return int(self.data.nbytes)
        return int(self.data.nbytes) + sum(map(len, self.data.ravel().tolist()))

    def move(self) -> None:
        if not self._strings:  # those are objects, which lie in no slot
            self.data = self.data.copy()

    def checks(self) -> Iterator[None]:
        """Looks at all elements before the first is written. Raises `ModelError`."""
        if self._as_python:
            return
        if self._strings:
            try:
                for _ in self._texts():
                    yield None
            except UnicodeDecodeError:
                why = f"{self._owner} is not UTF-8 text: it can only be binary"
                raise ModelError(why, field=self._owner) from None
        elif self.data.dtype.kind == "f":
            for start in range(0, self.data.size, _LOOKED_AT):
                if not np.isfinite(self._slice(start, _LOOKED_AT)).all():
                    why = f"{self._owner} holds NaN or infinity, which can only be binary"
                    raise ModelError(why, field=self._owner)
                yield None

    def slices(self) -> Iterator[bytes]:
        if self._strings:
            yield from self._texts()
            return
        for start in range(0, self.data.size, ELEMENTS):
            some = self._slice(start, ELEMENTS)
            if self._as_python and some.dtype.kind == "f":
                some = some.astype(np.float64)
            text = orjson.dumps(np.ascontiguousarray(some), option=orjson.OPT_SERIALIZE_NUMPY)
            yield b"," + text[1:-1] if start else text[1:-1]

    def _slice(self, start: int, count: int) -> Array:
        data = self.data
        flat = data.reshape(-1) if data.flags.c_contiguous else data.flat
        some: Array = flat[start : start + count]
        return some

    def _texts(self) -> Iterator[bytes]:
        """Strings, as many at once as are short; a long one in parts."""
        several: list[str] = []
        size, comma = 0, b""
        for start in range(0, self.data.size, ELEMENTS):
            for element in self._slice(start, ELEMENTS).tolist():
                long = len(element) > TEXT_BYTES
                if several and (long or size > TEXT_BYTES):
                    yield comma + orjson.dumps(several)[1:-1]
                    several, size, comma = [], 0, b","
                if long:
                    yield from self._long_text(element, comma)
                    comma = b","
                else:
                    several.append(self._text(element))
                    size += len(element)
            if several:
                yield comma + orjson.dumps(several)[1:-1]
                several, size, comma = [], 0, b","

    def _text(self, element: object) -> str:
        if not isinstance(element, bytes):
            return str(element)
        return element.decode(errors="replace" if self._as_python else "strict")

    def _long_text(self, element: bytes | str, comma: bytes) -> Iterator[bytes]:
        """A part may end within a character, whose rest comes with the next."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace" if self._as_python else "strict")
        yield comma + b'"'
        for start in range(0, len(element), TEXT_BYTES):
            part = element[start : start + TEXT_BYTES]
            if isinstance(part, bytes):
                part = decoder.decode(part, final=start + TEXT_BYTES >= len(element))
            yield orjson.dumps(part)[1:-1]
        yield b'"'


class SlicedJson:
    """Represents a JSON document whose long values are written in slices: `parts` are text and values, in
    their order."""

    def __init__(self, parts: Sequence[bytes | Values]) -> None:
        self._parts = parts

    def within(self, before: bytes, after: bytes) -> SlicedJson:
        """Returns it with something around."""
        return SlicedJson([before, *self._parts, after])

    @property
    def held(self) -> int:
        return sum(part.held for part in self._parts if isinstance(part, Values))

    def move(self) -> None:
        for part in self._parts:
            if isinstance(part, Values):
                part.move()

    def pieces(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, Values):
                for _ in part.checks():
                    yield b""
        for part in self._parts:
            if isinstance(part, Values):
                yield from part.slices()
            else:
                yield part


class SlicedBytes:
    """Represents buffers that are sent one behind the other, in parts that are not copied."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]

    @property
    def held(self) -> int:
        return sum(map(len, self._views))

    def move(self) -> None:
        for index, view in enumerate(self._views):
            self._views[index] = np.frombuffer(view, np.uint8).copy().data

    def pieces(self) -> Iterator[memoryview]:
        for index, view in enumerate(self._views):
            for start in range(0, len(view), PIECE_BYTES):
                yield self._views[index][start : start + PIECE_BYTES]
