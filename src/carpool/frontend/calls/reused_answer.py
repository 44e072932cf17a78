"""Defines an answer that may serve other requests too, and what is said of that beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class EncodedAnswer(NamedTuple):
    """Holds an answer without what belongs to one request alone: its id and its times."""

    body: bytes
    header_length: int | None = None  # of a v2 answer with binary tensors: how much of it is JSON


class AnswerNote:
    """Describes what a wrapper says of an answer beside it: in a field of this server, and in one that a
    standard has for it."""

    __slots__ = ("fields", "own", "reused", "said", "standard")

    def __init__(self, own: str, said: str, standard: tuple[str, str], *, reused: bool) -> None:
        self.own = own  # this server's field, as over HTTP
        self.said = said
        self.standard = standard
        self.reused = reused  # it was computed for another request
        field, value = standard
        self.fields = f"{own}: {said}\r\n{field}: {value}\r\n".encode()  # over HTTP

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns what is said over gRPC."""
        field, value = self.standard
        return (self.own.lower(), self.said), (field.lower(), value)

    @property
    def parameter(self) -> tuple[str, str]:
        """Returns what a response in a gRPC stream says, which has no metadata of its own."""
        return self.own.lower().replace("-", "_"), self.said

    @property
    def attribute(self) -> tuple[str, str]:
        """Returns what a span says."""
        return self.own.removeprefix("X-").lower().replace("-", "."), self.said

    def fields_of_all(self, notes: Sequence[AnswerNote | None]) -> bytes:
        """Returns the fields of one response with several answers, whose notes these are, in their order."""
        return b"".join(note.fields for note in notes if note is not None)
