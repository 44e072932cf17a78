"""Reads long JSON a slice at a time.

A library that reads JSON holds the interpreter from the first byte to the last, whichever thread calls it:
22 MB of numbers stop a front end for tenths of a second. Here long lists of numbers and long texts are cut
out of the document first. What is left is short, and what was cut out is read in slices of some tenths of a
millisecond. After each slice other threads have their turn.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from secrets import token_hex
from time import sleep
from typing import Any, Final, TypeAlias

import orjson

from carpool.errors import InvalidInput

_SLICE: Final = 64 * 1024
_GLANCE: Final = 512  # most texts, and what is between them, are short
_REST_S: Final = 5e-5
_WORTH_CUTTING: Final = 256  # bytes
_MOST_TEXTS: Final = 200_000  # and keys
_DEEPEST: Final = 100
_FEW: Final = 64  # bytes around a list that may be blank, or a comma
_QUOTE: Final = ord('"')
_IN_TEXT: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_HEX: Final = rb"[0-9a-fA-F]"
_WHOLE: Final = re.compile(  # characters as they are, and whole escapes: of some characters there are two
    rb'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])%b{4}|\\u[dD][89abAB]%b{2}\\u[dD][c-fC-F]%b{2})*+'
    % (_HEX, _HEX, _HEX)
)
_NO_LIST: Final = (b"{", b"}", b":")
_NO_TOKENS: Final = bytes(set(range(256)) - set(b"[],"))
_AS_BLANKS: Final = bytes.maketrans(b"[]", b"  ")

_View: TypeAlias = memoryview


class LongNumbers:
    """Holds a list of numbers, flat or nested, as the bytes of its JSON."""

    __slots__ = ("_json",)

    def __init__(self, json: _View) -> None:
        self._json = json

    def shape(self) -> tuple[int, ...]:
        """Returns how many elements each level has; raises `InvalidInput` unless all lists of a level are of
        one length."""
        tokens = b"".join(piece.translate(None, _NO_TOKENS) for piece in _pieces(self._json))
        levels = _leading(tokens)
        if levels > _DEEPEST:
            raise InvalidInput(f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST})", field="body")
        lengths: list[int] = []
        row, width = b",", 1  # of a level, the pattern and the length of one element with its comma
        for level in range(1, levels + 1):
            end = tokens.find(b"]" * level)
            if end < 0:
                raise _uneven()
            size = end + 2 * level - levels  # of the first list of this level
            length = size - 1 if level == 1 else (size - 1) // width
            row = b"[" + (row * length)[:-1] + b"],"
            width = len(row)
            lengths.append(length)
        if not levels or row[:-1] != tokens:
            raise _uneven()
        return tuple(reversed(lengths))

    def slices(self) -> Iterator[list[Any]]:
        """Returns its elements in order, some thousands at a time."""
        view, position = self._json, 0
        while position < len(view):
            piece = bytes(view[position : position + _SLICE])
            if position + _SLICE < len(view):
                end = piece.rfind(b",")
                if end < 0:
                    raise _invalid()
                piece = piece[:end]
            values: list[Any] = _read(b"[" + piece.translate(_AS_BLANKS) + b"]")
            if len(values) != piece.count(b",") + 1:
                raise _invalid()
            yield values
            position += len(piece) + 1
            _let_others_run()


def decode_base64(text: str) -> bytes:
    """Returns what a text says in base64, which may be broken into lines; raises `ValueError`."""
    pieces: list[bytes] = []
    left, is_over = b"", False
    for start in range(0, len(text), _SLICE):
        data = left + text[start : start + _SLICE].encode("ascii").translate(None, b"\r\n \t")
        if is_over and data:
            raise ValueError
        whole = len(data) & ~3 if start + _SLICE < len(text) else len(data)
        pieces.append(binascii.a2b_base64(data[:whole], strict_mode=True))
        left, is_over = data[whole:], data[:whole].endswith(b"=")
        _let_others_run(len(text))
    return b"".join(pieces)


class ShortJson:
    """Holds a document without its long lists and texts, and puts them back into what was read of it. A short
    document stays whole."""

    def __init__(self, json: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(json)
        self._mark = token_hex(16)  # it cannot be guessed, and so not be written into a document
        self._pieces: list[bytes | _View] = []
        self._cuts: list[object] = []
        self._kept_to = 0  # what is before it is in `_pieces`, or was cut out
        if len(json) > _SLICE:
            self._cut_all()
        else:
            self._pieces.append(self._view)
        self.left = b"".join(self._pieces)
        """The document, in which a mark stands for what was cut out."""

    def _cut_all(self) -> None:
        view, position, texts = self._view, 0, 0
        while position < len(view):
            quote = self._next_quote(position)
            if quote - position > _WORTH_CUTTING:
                self._cut_lists(position, quote)
            if quote == len(view):
                break
            end = self._end_of_text(quote + 1)
            if end - quote > _WORTH_CUTTING:
                self._cut(quote, end + 1, _text(view[quote + 1 : end]))
            position = end + 1
            texts += 1
            if texts > _MOST_TEXTS:
                raise InvalidInput(
                    f"the JSON has more than {_MOST_TEXTS} texts: send tensors as binary", field="body"
                )
        self._pieces.append(view[self._kept_to :])

    def _next_quote(self, position: int) -> int:
        view, size = self._view, _GLANCE
        while position < len(view):
            found = bytes(view[position : position + size]).find(b'"')
            if found >= 0:
                return position + found
            if size == _SLICE:
                _let_others_run()
            position, size = position + size, _SLICE
        return len(view)

    def _end_of_text(self, position: int) -> int:
        view, size = self._view, _GLANCE
        while True:
            end = _text_to(view, position, size)
            if end < len(view) and view[end] == _QUOTE:
                return end
            if end == position:
                raise _invalid()
            if size == _SLICE:
                _let_others_run()
            position, size = end, _SLICE

    def _cut_lists(self, position: int, end: int) -> None:
        """Cuts the long lists out of what has neither texts nor keys."""
        view, start = self._view, position
        while position < end:
            piece = bytes(view[position : min(position + _SLICE, end)])
            stop = position + min(found if found >= 0 else len(piece) for found in map(piece.find, _NO_LIST))
            if stop < end and stop == position + _SLICE:
                position = stop
                _let_others_run()
                continue
            if stop - start > _WORTH_CUTTING:
                self._cut_list(start, stop)
            start = position = stop + 1

    def _cut_list(self, start: int, stop: int) -> None:
        view = self._view
        first = bytes(view[start : start + _FEW]).find(b"[")
        last = bytes(view[stop - _FEW : stop]).rfind(b"]")
        if first >= 0 and last >= 0:
            begin, end = start + first, stop - _FEW + last + 1
            if bytes(view[begin : begin + _DEEPEST + 1]).count(b"[") > _DEEPEST:
                raise InvalidInput("the JSON is nested too deeply", field="body")
            self._cut(begin, end, LongNumbers(view[begin:end]))
        elif stop - start > _SLICE:
            raise _invalid()

    def _cut(self, start: int, end: int, found: object) -> None:
        self._pieces += (self._view[self._kept_to : start], f'"{self._mark}{len(self._cuts)}"'.encode())
        self._cuts.append(found)
        self._kept_to = end

    def restored(self, value: Any) -> Any:
        """Returns what was read of `left` with what was cut out: texts, and `LongNumbers` for lists."""
        if not self._cuts:
            return value
        if type(value) is str:
            return self._cuts[int(value[len(self._mark) :])] if value.startswith(self._mark) else value
        if type(value) is list:
            return [self.restored(one) for one in value]
        if type(value) is dict:
            return {self.restored(name): self.restored(one) for name, one in value.items()}
        return value


def _text_to(view: _View, position: int, size: int) -> int:
    """Returns where the text ends, or where to look on for its end."""
    piece = bytes(view[position : position + size])
    if b"\\" in piece:
        return _matched(_IN_TEXT, view, position, position + size)
    quote = piece.find(b'"')
    return position + (quote if quote >= 0 else len(piece))


def _text(view: _View) -> str:
    """Reads what stands between two quotes. A piece ends where no character is cut into two."""
    pieces: list[str] = []
    position = 0
    while position < len(view):
        end = min(position + _SLICE, len(view))
        if end < len(view):
            if b"\\" in bytes(view[position:end]):
                end = _matched(_WHOLE, view, position, end)
            while end > position and view[end] & 0xC0 == 0x80:  # which begins no character
                end -= 1
            if end == position:
                raise _invalid()
        pieces.append(_read(b'"%b"' % bytes(view[position:end])))
        position = end
        _let_others_run()
    return "".join(pieces)


def _pieces(view: _View) -> Iterator[bytes]:
    for start in range(0, len(view), _SLICE):
        yield bytes(view[start : start + _SLICE])
        _let_others_run()


def _leading(tokens: bytes) -> int:
    count = 0
    while count < len(tokens) and count <= _DEEPEST and tokens[count] == ord("["):
        count += 1
    return count


def _matched(pattern: re.Pattern[bytes], view: _View, start: int, end: int) -> int:
    found = pattern.match(view, start, end)
    assert found is not None  # as of every pattern that matches nothing, too
    return found.end()


def _read(json: bytes) -> Any:
    try:
        return orjson.loads(json)
    except orjson.JSONDecodeError:
        raise _invalid() from None


def _let_others_run(size: int = _SLICE) -> None:
    """Rests for a moment: a thread that wants the interpreter would wait for longer else."""
    if size >= _SLICE:
        sleep(_REST_S)


def _uneven() -> InvalidInput:
    return InvalidInput("a list of numbers is nested unevenly, or is not closed", field="body")


def _invalid() -> InvalidInput:
    return InvalidInput("the request is not valid JSON: in a long list or text", field="body")
