"""One end of a socket on the engine's loop, written to at once: a batch must not wait for the loop's turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

_READ_BYTES = 1 << 18


class Wire:
    """`heard` gets what arrives; `gone` is called once, when the other side has closed or died."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        heard: Callable[[bytes], None],
        gone: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = loop
        self._heard = heard
        self._gone = gone
        self._unsent = bytearray()
        self._open = True
        loop.add_reader(sock.fileno(), self._read)

    def send(self, data: bytes) -> None:
        """Nothing after it is gone: whoever sends is told of that by `gone`."""
        if not self._open or self._unsent:
            self._unsent += data
            return
        sent = self._send(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def finish(self) -> None:
        """Say that nothing more will come; what was sent is still answered."""
        if self._open and not self._unsent:
            with suppress(OSError):  # it was faster
                self._socket.shutdown(socket.SHUT_WR)
        elif self._open:
            self._end()  # it does not listen

    def _flush(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent and self._open:
            self._loop.remove_writer(self._socket.fileno())

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it is gone, which reading tells too

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._heard(data)
        else:
            self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._gone()
