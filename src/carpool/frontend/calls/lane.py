"""Defines what the requests for one version pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from carpool.errors import CarpoolError
from carpool.frontend.calls.reused_answer import AnswerNote, EncodedAnswer
from carpool.link.door import Ask, Call, Hears, ModelEntry, Sender
from carpool.observe.counters import Row

if TYPE_CHECKING:
    from carpool.frontend.calls.request import Request
    from carpool.vision.picture_answers import Options


class Infers(Protocol):
    """Defines the way to the engine: the door, or what answers in its place."""

    def infer(self, ask: Ask, hears: Hears) -> Call: ...


Infer: TypeAlias = "Callable[[Request], None]"
"""Answers a request, or wraps what does."""


def places_at(door: Infers) -> Infer:
    """Returns the innermost of a chain: it places requests at this door."""

    def place(request: Request) -> None:
        request.door = door
        request.place()

    return place


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


class ModelLane(NamedTuple):
    """Describes what the requests for one version pass. A lane is made once for each catalogue, and a route
    keeps it in the entry's place, so that no request looks anything up."""

    entry: ModelEntry
    row: Row  # this process's counters of the version
    infer: Infer | None  # the wrappers of the version; None: it has none, and requests place themselves
    holds_back: Callable[[], bool] | None = None
    """While this says so, a request that the gate would reject at its head is read all the same, since it may
    be answered without the engine."""
    divided: bool = False  # a request that finds this version without naming it has a `Choice`
    early: LooksEarly | None = None  # of the outermost wrapper, which may answer pictures that are not read
