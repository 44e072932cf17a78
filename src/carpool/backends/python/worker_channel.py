"""Small messages between the server and a model's process: JSON behind its length, on a Unix socket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

MAX_MESSAGE = 1 << 20
_LENGTH = struct.Struct("<I")


class Channel:
    """`wait` is called before every read; it may raise to give up on the other side."""

    def __init__(self, sock: socket.socket, wait: Callable[[], None] = lambda: None) -> None:
        self._socket = sock
        self._wait = wait

    def send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE}")
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> dict[str, Any]:
        """The next message; EOFError when the other side is gone, ValueError when it sends nonsense."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE}")
        message = json.loads(self._read(length))
        if not isinstance(message, dict):
            raise ValueError("a message must be an object")
        return message

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._wait()
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


# ---- tensors in memory that two processes share
