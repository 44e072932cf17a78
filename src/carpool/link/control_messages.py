"""Words between the supervisor and a child: JSON messages that can carry files, on a Unix socket.

The socket keeps messages apart, so nothing has to be cut or joined. It takes none that is longer than its
buffer, so a long one (the names of thousands of models) goes as a file. The end of the socket also tells each
side that the other is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from carpool.observe.logs import logger

_LONGEST = 1 << 15  # of a message as such; the kernel's buffer is several times that
_MOST_FILES = 64
_AS_FILE = b"file"  # the message is what the last file holds; no JSON object looks like this
_log = logger("control")


@dataclass(slots=True)
class Message:
    """What was said, and the files that came with it: they belong to the receiver."""

    body: dict[str, Any]
    files: list[int] = field(default_factory=list)

    @property
    def word(self) -> str:
        return str(self.body.get("word", ""))


def control_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Control:
    """One end. To be made and used on a running loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, word: str, files: Sequence[int] = (), **fields: object) -> bool:
        """False when the other side is gone or does not listen; its end is then noticed elsewhere too."""
        if not self._open:
            return False
        message = orjson.dumps({"word": word, **fields})
        try:
            if len(message) > _LONGEST:
                self._send_as_file(message, files)
            else:
                socket.send_fds(self._socket, [message], list(files))
        except OSError as error:
            if not isinstance(error, BrokenPipeError | ConnectionError):
                _log.warning("not-sent", word=word, bytes=len(message), error=str(error))
            return False
        return True

    def _send_as_file(self, message: bytes, files: Sequence[int]) -> None:
        fd = os.memfd_create("carpool-message", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(message)
            file.flush()
            socket.send_fds(self._socket, [_AS_FILE], [*files, fd])

    async def receive(self) -> Message | None:
        """The next message; None for ever once the other side is gone."""
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)
        return message

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._messages.put_nowait(None)

    def _read(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._socket, 2 * _LONGEST, _MOST_FILES)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        if not data:
            self.close()
            return
        for fd in files:
            os.set_inheritable(fd, False)
        if data == _AS_FILE:
            with os.fdopen(files.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        self._messages.put_nowait(Message(orjson.loads(data), files))
