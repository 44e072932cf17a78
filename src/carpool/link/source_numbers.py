"""Names of sources as numbers, on both ends of a link: a name is said once, then only its number.

Clients make up names as they like, so there are only so many numbers: a new name takes the one that was given
first. Records are read in the order in which they were sent, so a number means what it was last said to mean.
"""

from __future__ import annotations

from collections.abc import Callable

from carpool.link.records import MAX_SOURCES, SOURCE, ProtocolError, to_engine
from carpool.wire.head import MAX_SOURCE_CHARS


class SaidSources:
    """The front end's end. `send` takes records for the engine."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._numbers: dict[str, int] = {}  # in the order in which they were given

    def number(self, source: str) -> int:
        """0 for none; the engine is told of a name that it does not know."""
        if not source:
            return 0
        found = self._numbers.get(source)
        return self._say(source) if found is None else found

    def _say(self, source: str) -> int:
        numbers = self._numbers
        full = len(numbers) >= MAX_SOURCES
        number = numbers.pop(next(iter(numbers))) if full else len(numbers) + 1
        numbers[source] = number
        name = source[:MAX_SOURCE_CHARS].encode(errors="replace")
        self._send(to_engine(SOURCE, number, name))
        return number


class HeardSources:
    """The engine's end, which believes nothing."""

    def __init__(self) -> None:
        self._names = {0: ""}

    def hear(self, number: int, payload: bytes) -> None:
        try:
            name = payload.decode()
        except UnicodeDecodeError:
            raise ProtocolError("a source that is no text") from None
        if not 1 <= number <= MAX_SOURCES or not 1 <= len(name) <= MAX_SOURCE_CHARS:
            raise ProtocolError(f"source {number} of {len(name)} characters")
        self._names[number] = name

    def name(self, number: int) -> str:
        found = self._names.get(number)
        if found is None:
            raise ProtocolError(f"source {number}, which has no name")
        return found
