"""gzip and deflate, in both directions. Nothing here belongs on the hot path."""

from __future__ import annotations

import zlib

from carpool.frontend.http.body import Gather, GatheredBody, Ledger, too_large
from carpool.frontend.http.responses import Fault, bad_request

_GZIP = 16 + zlib.MAX_WBITS
_ZLIB = zlib.MAX_WBITS
_RAW = -zlib.MAX_WBITS
_STEP = 256 * 1024  # bytes of output
_WINDOW = 16 * 1024  # bytes of input
_STEPS_PER_TURN = 64
_AT_ONCE = 8 * 1024  # bytes, in or out
_SHORT_MEMBERS = 64  # each is some work, however little is in it
_MEMBER = 1024  # bytes, on average, where there are more

MOST_MEMBERS = 2048
"""Of one gzip body. Tools that write blocks of 64 KiB need half as many for 64 MiB."""


def body_encoding(field: bytes | None) -> bytes | None:
    """What a Content-Encoding field asks to undo: gzip, deflate or None; raises 415 for anything else."""
    if field is None:
        return None
    encoding = field.strip(b" \t").lower()
    if encoding in (b"", b"identity"):
        return None
    if encoding in (b"gzip", b"x-gzip"):
        return b"gzip"
    if encoding == b"deflate":
        return b"deflate"
    raise Fault(415, "the Content-Encoding has to be gzip, deflate or identity", "unsupported-encoding")


class Inflater:
    """Decompresses one body in steps, and stops at the step that takes it over `limit`.

    Each step looks at a window of the compressed bytes: what zlib leaves of its input comes back as a copy,
    and so a copy is never of more than the window, however long the body is.
    """

    def __init__(
        self, encoding: bytes, data: bytes | bytearray, limit: int, ledger: Ledger, *, whole: bool = True
    ) -> None:
        """Of `data` that is not `whole`, there may be more."""
        self._wbits = _GZIP if encoding == b"gzip" else _deflate_kind(data)
        self._data = memoryview(data)
        self._whole = whole
        self._at = 0
        self._members = 1
        self._limit = limit
        self._stream = zlib.decompressobj(self._wbits)
        self.body = GatheredBody(ledger)

    def step(self) -> bool:
        """Produce one more piece; True when the body is complete."""
        window = self._data[self._at : self._at + _WINDOW]
        try:
            piece = self._stream.decompress(window, _STEP)
        except zlib.error:
            raise bad_request("the compressed body is damaged") from None
        if len(self.body) + len(piece) > self._limit:
            raise too_large(self._limit)
        self.body.grow(piece)
        if not self._stream.eof:
            self._at += len(window) - len(self._stream.unconsumed_tail)
            if not piece and self._at == len(self._data) and self._whole:
                raise bad_request("the compressed body ends too early")
            return False
        self._at += len(window) - len(self._stream.unused_data)
        if self._at == len(self._data):
            return True
        self._next_member()
        return False

    def _next_member(self) -> None:
        """gzip may be several members in a row."""
        if self._wbits != _GZIP:
            raise bad_request("something follows the compressed body")
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise bad_request(f"the compressed body has more than {MOST_MEMBERS} members")
        if self._members > _SHORT_MEMBERS and len(self.body) < _MEMBER * (self._members - 1):
            raise bad_request(
                f"the compressed body has more than {_SHORT_MEMBERS} members of under {_MEMBER} bytes"
            )
        self._stream = zlib.decompressobj(self._wbits)

    def begin(self) -> bool:
        """What takes no longer than a thread would to begin: short bodies and members, and what is wrong
        with them. True when the body is complete."""
        while self._at < _AT_ONCE and len(self.body) < _AT_ONCE:
            if self.step():
                return True
        return False

    def turn(self) -> bool:
        """A few milliseconds of steps; True when the body is complete."""
        return any(self.step() for _ in range(_STEPS_PER_TURN))


class GatherCompressed(Gather):
    """Looks at the start of a body before the rest is kept: what is wrong with it is often wrong there."""

    __slots__ = ("_encoding", "_looked", "_most")

    def __init__(self, encoding: bytes, limit: int, most: int, ledger: Ledger) -> None:
        """`limit` is of the body as it comes, `most` of what may become of it."""
        super().__init__(limit, ledger)
        self._encoding = encoding
        self._most = most
        self._looked = False

    def take(self, piece: memoryview) -> None:
        super().take(piece)
        if not self._looked and len(self.body) >= _WINDOW:
            self._looked = True
            start = bytes(self.body[:_WINDOW])
            Inflater(self._encoding, start, self._most, self.body.ledger, whole=False).begin()


def _deflate_kind(data: bytes | bytearray) -> int:
    """`deflate` means zlib, but some senders leave out its two-byte header."""
    is_zlib = len(data) >= 2 and data[0] & 0x0F == 8 and (data[0] * 256 + data[1]) % 31 == 0
    return _ZLIB if is_zlib else _RAW


def choose_encoding(accepted: bytes | None) -> bytes | None:
    """The best answer to an Accept-Encoding field: gzip, deflate, or None for the plain body."""
    if not accepted:
        return None
    quality: dict[bytes, float] = {}
    for part in accepted.lower().split(b","):
        name, _, parameter = part.partition(b";")
        quality[name.strip()] = _quality(parameter)
    anything = quality.get(b"*", 0.0)
    gzip = quality.get(b"gzip", quality.get(b"x-gzip", anything))
    deflate = quality.get(b"deflate", anything)
    if max(gzip, deflate, quality.get(b"identity", 0.0)) <= 0 or quality.get(b"identity", 0.0) > max(
        gzip, deflate
    ):
        return None
    return b"gzip" if gzip >= deflate else b"deflate"


def _quality(parameter: bytes) -> float:
    name, _, value = parameter.partition(b"=")
    if name.strip() != b"q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def compress(body: bytes, encoding: bytes, level: int = 6) -> bytes:
    """`body` in one of the encodings that `choose_encoding` names."""
    compressor = zlib.compressobj(level, zlib.DEFLATED, _GZIP if encoding == b"gzip" else _ZLIB)
    return compressor.compress(body) + compressor.flush()
