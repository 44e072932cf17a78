"""Defines who chooses between the versions of a model, and what looks at a picture that is not read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from carpool.errors import CarpoolError
from carpool.frontend.calls.reused_answer import AnswerNote, EncodedAnswer
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Ask, Call, Hears
from carpool.link.senders import Sender

if TYPE_CHECKING:
    from carpool.vision.picture_answers import Options


class Infers(Protocol):
    """Defines the way to the engine: its client, or what answers in its place."""

    def infer(self, ask: Ask, hears: Hears) -> Call: ...


class Choice(Protocol):
    """Chooses between versions of one model, for requests with one head that name none."""

    @property
    def entries(self) -> Sequence[ModelEntry]:
        """Returns the versions that may be chosen; tensors are made for the first."""

    def choose(self, sender: Sender, at: float) -> ModelEntry:
        """Returns who answers a request of this sender whose head came at this time."""

    def instead(self, entry: ModelEntry) -> ModelEntry | None:
        """Returns who is asked if the gate rejects a request for this version at its head."""

    def rejected(self, entry: ModelEntry, error: CarpoolError) -> None:
        """Notes that a request for this version ended with this error before its body was read."""


class UnreadPicture(NamedTuple):
    """Describes a request on a picture route whose one picture has come, before anything of it is read."""

    form: str  # of its reply
    picture: bytes | bytearray
    options: Options
    drawn: str | None  # the format of the picture to answer with, instead of JSON
    sender: Sender
    fields: Mapping[bytes, bytes]  # of its head
    arrived: float


class EarlyLook(NamedTuple):
    """Describes what a wrapper knows of a picture that is not read yet."""

    looked: object  # what it has found, which `RequestReply.looked` gives it if the request comes to it
    answer: EncodedAnswer | None = None  # None: the request goes its way
    note: AnswerNote | None = None


LooksEarly: TypeAlias = Callable[[UnreadPicture], EarlyLook]
