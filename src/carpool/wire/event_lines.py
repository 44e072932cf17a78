"""Reads server-sent events: the data of one event after the other, out of bytes that come in any pieces.
Comments, which keep connections open, and names of events are read past."""

from __future__ import annotations

import re

MOST_EVENT_BYTES = 1 << 20
_LINE_END = re.compile(rb"\r\n|\n|\r(?!$)")  # a last CR may be half of a line's end


class NoEvents(ValueError):
    """What comes is not made of events, or of one that has no end."""


class EventReader:
    def __init__(self, most_bytes: int = MOST_EVENT_BYTES) -> None:
        self._most = most_bytes
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the data of the events that are complete now, in order."""
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        found: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._size += len(line)
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > self._most:
            raise NoEvents(f"an event has more than {self._most} bytes")
        return found

    @property
    def inside(self) -> bool:
        """Returns whether it is inside an event whose end has not come: what was cut off there is not
        complete."""
        return bool(self._data or self._rest)
