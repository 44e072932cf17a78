"""A client that writes frames of HTTP/2 by hand, right or wrong, and reads what comes back."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import hpack

from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.h2_frames import Code, field, frame
from frontend.grpc.front_end import SERVICE
from frontend.http.harness import PATIENCE

INFER = SERVICE + "ModelInfer"
OPENING = h2.PREFACE + h2.frame(h2.SETTINGS, 0, 0)
WHOLE = h2.END_HEADERS
LAST = h2.END_HEADERS | h2.END_STREAM


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class Said(NamedTuple):
    """How a call ended: its fields, its messages with their five bytes, and the code of a reset."""

    fields: Mapping[str, str]
    data: bytes
    reset: Code | None = None

    @property
    def status(self) -> int:
        return int(self.fields["grpc-status"])


def block(path: str = INFER, method: str = "POST", **more: str) -> bytes:
    """Of a call, without any table."""
    fields = {":method": method, ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    fields |= {"content-type": "application/grpc"} | {name.replace("_", "-"): v for name, v in more.items()}
    return b"".join(field(name.encode(), value.encode()) for name, value in fields.items())


def framed(message: bytes, compressed: bool = False) -> bytes:
    return bytes((compressed,)) + struct.pack(">L", len(message)) + message


def head(stream: int, flags: int = WHOLE, **more: str) -> bytes:
    return frame(h2.HEADERS, flags, stream, block(**more))


def data(stream: int, payload: bytes, flags: int = h2.END_STREAM) -> bytes:
    return frame(h2.DATA, flags, stream, payload)


class HasPort(Protocol):
    @property
    def port(self) -> int: ...


class Wire:
    def __init__(self, front: HasPort, opening: bytes = OPENING, source: str = "127.0.0.1") -> None:
        address, ours = ("127.0.0.1", front.port), (source, 0)
        self.socket = socket.create_connection(address, PATIENCE, source_address=ours)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""
        self._decoder = hpack.Decoder()
        self.send(opening)

    def send(self, *frames: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(b"".join(frames))

    def receive(self) -> Frame | None:
        """The next frame; None at the end of the connection."""
        while len(self._read) < 9 or len(self._read) < 9 + int.from_bytes(self._read[:3], "big"):
            try:
                more = self.socket.recv(1 << 16)
            except ConnectionResetError:
                more = b""
            if not more:
                return None
            self._read += more
        length = int.from_bytes(self._read[:3], "big")
        found = Frame(
            self._read[3],
            self._read[4],
            int.from_bytes(self._read[5:9], "big"),
            self._read[9 : 9 + length],
        )
        self._read = self._read[9 + length :]
        return found

    def frames(self) -> Iterator[Frame]:
        while (found := self.receive()) is not None:
            yield found

    def until(self, kind: int, flags: int = 0) -> Frame:
        for found in self.frames():
            if found.kind == kind and found.flags & flags == flags:
                return found
        raise AssertionError("the connection ended before")

    def goaway(self) -> Code:
        """Why the connection ends."""
        return Code(int.from_bytes(self.until(h2.GOAWAY).payload[4:8], "big"))

    def answer(self, stream: int) -> Said:
        """Of one call; frames of others are read past."""
        return self.answers(stream)[stream]

    def answers(self, *streams: int) -> dict[int, Said]:
        """Of several calls, in whatever order they end; frames of others are read past."""
        said: dict[int, Said] = {}
        fields: dict[int, dict[str, str]] = {stream: {} for stream in streams}
        received = dict.fromkeys(streams, b"")
        for found in self.frames():
            stream = found.stream
            if stream not in fields or stream in said:
                assert found.kind != h2.GOAWAY, found.payload
                continue
            if found.kind == h2.RST_STREAM:
                reset = Code(int.from_bytes(found.payload, "big"))
                said[stream] = Said(fields[stream], received[stream], reset)
            elif found.kind == h2.HEADERS:
                listed = self._decoder.decode(found.payload)
                fields[stream] |= {str(name): str(value) for name, value in listed}
            elif found.kind == h2.DATA:
                received[stream] += found.payload
            if found.flags & h2.END_STREAM and stream not in said:
                said[stream] = Said(fields[stream], received[stream])
            if len(said) == len(fields):
                return said
        raise AssertionError("the connection ended before")

    def is_alive(self) -> bool:
        self.send(frame(h2.PING, 0, 0, b"are you "))
        return self.until(h2.PING, h2.ACK).payload == b"are you "

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def wire(front: HasPort, opening: bytes = OPENING, source: str = "127.0.0.1") -> Iterator[Wire]:
    """`source` is the address of the client."""
    made = Wire(front, opening, source)
    try:
        yield made
    finally:
        made.close()
