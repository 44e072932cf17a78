"""One gRPC call from an address of its own, its message compressed beforehand or very large.

No library's client offers that. The call keeps to the windows that the server opens, and reads what the
server says while it sends: a call that is rejected sends no more."""

import select
import socket
import struct

from attacks.isolation import frame, grpc_head, grpc_message

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SETTING = 4
_FRAME = 16_384
_WIDE = (1 << 31) - 1
_RETRY_AFTER = b"retry-after"


class OneCall:
    """A call on a connection of its own; stream 1 is the only one."""

    def __init__(self, client: socket.socket) -> None:
        self.retry_after_s = 0.1  # where it was rejected; the server may say another time
        self._client = client
        self._here = bytearray()  # received, but not used yet
        self._connection_window = self._stream_window = self._initial_window = 65_535
        self._over = False

    def run(self, path: str, message: bytes, *, compressed: bool) -> bool:
        """Return whether the answer had any data, which only a success has."""
        fields = ((b"grpc-encoding", b"gzip"),) if compressed else ()
        settings = struct.pack(">HI", _INITIAL_WINDOW_SETTING, _WIDE)
        self._client.sendall(
            _PREFACE
            + frame(_SETTINGS, 0, 0, settings)
            + frame(_WINDOW, 0, 0, struct.pack(">I", _WIDE - 65_535))
            + frame(_HEADERS, _END_HEADERS, 1, grpc_head(path, "", *fields))
        )
        data, at, answered = memoryview(grpc_message(message, compressed)), 0, False
        while at < len(data) and not self._over:
            room = min(_FRAME, len(data) - at, self._connection_window, self._stream_window)
            if room <= 0 or self._has_more():
                answered |= self._read()
                continue
            last = _END_STREAM if at + room == len(data) else 0
            self._client.sendall(frame(_DATA, last, 1, bytes(data[at : at + room])))
            self._connection_window -= room
            self._stream_window -= room
            at += room
        while not self._over:
            answered |= self._read()
        return answered

    def _has_more(self) -> bool:
        return bool(self._here) or bool(select.select([self._client], (), (), 0)[0])

    def _received(self, size: int) -> bytes:
        while len(self._here) < size:
            data = self._client.recv(1 << 18)
            if not data:
                raise ConnectionResetError
            self._here += data
        found = bytes(self._here[:size])
        del self._here[:size]
        return found

    def _read(self) -> bool:
        """Take one frame; return whether it had data."""
        head = self._received(9)
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream, payload = int.from_bytes(head[5:], "big"), self._received(size)
        if kind == _HEADERS:
            self._take_wait(payload)
        if kind == _WINDOW:
            self._widen(stream, int.from_bytes(payload, "big"))
        elif kind == _SETTINGS and not flags & _ACK:
            self._take_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._client.sendall(frame(_PING, _ACK, 0, payload))
        elif kind in (_RST, _GOAWAY) or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            self._over = True
        return kind == _DATA and size > 0

    def _take_wait(self, block: bytes) -> None:
        """A field of the server's is a name and a value in plain text, each behind its length."""
        found = block.partition(_RETRY_AFTER)[2]
        digits = found[1 : 1 + found[0]] if found else b""
        if digits.isdigit():
            self.retry_after_s = float(digits)

    def _widen(self, stream: int, more: int) -> None:
        if stream:
            self._stream_window += more
        else:
            self._connection_window += more

    def _take_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW_SETTING:
                self._stream_window += value - self._initial_window
                self._initial_window = value
        self._client.sendall(frame(_SETTINGS, _ACK, 0))
