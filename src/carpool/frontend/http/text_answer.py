"""Writes texts piece by piece, in the words of one protocol or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import orjson

from carpool.errors import Cancelled, CarpoolError
from carpool.frontend.http.event_stream import EventStream
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.image_route import PictureOutcome
from carpool.observe.columns import BYTES_SENT
from carpool.observe.counters import Row
from carpool.types import StepTiming


class Written(NamedTuple):
    """Describes a whole text: the document that says it, how long it took, in how many pieces it came, and
    where the time went in each step, if there were several."""

    document: Mapping[str, Any]
    times: Sequence[float]
    pieces: int
    steps: StepTiming | None

    @property
    def text(self) -> str:
        return str(self.document["text"])

    @property
    def finish(self) -> str:
        return str(self.document.get("finish_reason", "stop"))


class Writer(Protocol):
    """Defines in which words a text is answered. Events are whole, as `as_event` makes them of data."""

    @property
    def streams(self) -> bool:
        """Returns whether pieces are sent as they come; else `whole` is the answer."""

    def head(self) -> Sequence[bytes]:
        """Returns what comes before the first piece."""

    def piece(self, text: str, number: int) -> Sequence[bytes]: ...

    def last(self, written: Written) -> Sequence[bytes]: ...

    def whole(self, written: Written) -> bytes: ...

    def error(self, error: CarpoolError) -> Sequence[bytes]:
        """Returns an error after the first piece, when it is too late for a status."""


class TextAnswer:
    """Writes the answer to one request as its model writes it: implements `AnswerInParts`. The head goes out
    with the first piece."""

    __slots__ = ("_exchange", "_row", "_stream", "_writer", "pieces")

    def __init__(self, exchange: Exchange, writer: Writer, row: Row) -> None:
        self._exchange = exchange
        self._writer = writer
        self._row = row
        self._stream: EventStream | None = None
        self.pieces = 0

    def part(self, text: str) -> None:
        if not text:
            return
        if self._writer.streams:
            self._say(self._writer.piece(text, self.pieces))
        self.pieces += 1

    def end(self, fields: bytes, body: bytes, outcome: PictureOutcome | None) -> None:
        """Writes all of it, if nothing was written before: the model answered at once, or its answer was
        known."""
        document = (None if outcome is None else outcome.document) or orjson.loads(body)
        times, steps = ((), None) if outcome is None else (outcome.times, outcome.steps)
        with suppress(Cancelled):  # a client that reads too slowly was cut off, and this is the end anyway
            if not self.pieces:
                self.part(document["text"])
            written = Written(document, times, self.pieces, steps)
            if self._writer.streams:
                self._end(self._writer.last(written))
            else:
                answer = self._writer.whole(written)
                self._row.add(BYTES_SENT, len(answer))
                self._exchange.respond(200, fields, answer)

    def fail(self, error: CarpoolError) -> bool:
        """Returns whether it was written; not before the first piece, when the error has a status."""
        if self._stream is None:
            return False
        if self._exchange.pending:
            with suppress(Cancelled):
                self._end(self._writer.error(error))
        return True

    def _say(self, events: Sequence[bytes]) -> None:
        if self._stream is None:
            events = [*self._writer.head(), *events]
            self._stream = EventStream(self._exchange)
        data = b"".join(events)
        self._row.add(BYTES_SENT, len(data))
        self._stream.write(data)

    def _end(self, events: Sequence[bytes]) -> None:
        self._say(events)
        assert self._stream is not None
        self._stream.end()
