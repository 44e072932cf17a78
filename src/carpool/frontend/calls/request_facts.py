"""Defines what is known of one request; its reply, which is what a protocol does with what comes of it; and
what it needs of its front end, which counts how requests end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from carpool.compiling import mypyc_attr
from carpool.errors import Cancelled, CarpoolError, Unavailable, Unsupported
from carpool.frontend.calls.client_memory import ClientMemory, Outlets
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.lane import Choice
from carpool.frontend.calls.reused_answer import AnswerNote, EncodedAnswer
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.clients.fair_threads import FairThreads, ThreadWork
from carpool.link.catalog import ModelEntry
from carpool.link.contents import Content
from carpool.link.engine_client import Answer, EngineClient
from carpool.link.senders import Sender
from carpool.link.step_times import Times
from carpool.memory.arena import Slot
from carpool.observe.counters import Row, count_failure
from carpool.observe.logs import Logger
from carpool.types import Timing
from carpool.wire.v2 import Placed, RequestHead

if TYPE_CHECKING:
    from carpool.frontend.pictures.picture_service import PictureService
    from carpool.frontend.pictures.sent_pictures import SentPictures

READING: Final = 0
OFFERED: Final = 1
RUNNING: Final = 2
ANSWERING: Final = 3
OVER: Final = 4

LEFT = asyncio.CancelledError("the client left")


class RequestFacts:
    """Holds what is known of one request. `Request` makes and changes it."""

    __slots__ = (
        *("arrived", "choice", "client", "content", "deadline", "done_at", "encoded", "entry", "head"),
        *("heard", "more_fields", "note", "offered_at", "outlets", "pictures", "placed"),
        *("refuses_many", "reply", "row", "sender", "slot", "state", "thread_work", "unread"),
    )

    state: int
    head: RequestHead
    entry: ModelEntry
    row: Row | None  # the counters of its version; None while that is not known
    reply: RequestReply
    sender: Sender
    client: str  # whose account it is charged to, or its address
    deadline: float  # the client's own
    arrived: float  # when all of it was here
    unread: float  # seconds that it lay in its socket before that
    offered_at: float  # to the engine, with its tensors
    done_at: float  # when the engine had answered
    heard: bool  # the engine has heard of it
    slot: Slot | None
    content: Content | None  # for the wrappers
    pictures: SentPictures | None  # until it is over, and while observers hear of it
    choice: Choice | None  # what has chosen its version, between several
    refuses_many: str  # what is said of a model that may give several answers, where one is taken
    note: AnswerNote | None  # what a wrapper says of the answer
    encoded: EncodedAnswer | None  # the answer, where a wrapper has it so
    outlets: Outlets | None  # for outputs that the client wants in its own memory
    placed: Mapping[str, Placed]  # outputs that are in the client's memory
    more_fields: bytes  # for the head of the answer, over HTTP
    thread_work: ThreadWork[Any] | None  # what it waits for, and would else hold up the loop

    # ── what observers see ──

    @property
    def request_id(self) -> str:
        return self.reply.request_id(self)

    @property
    def siblings(self) -> bytes:
        return self.reply.siblings

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]:
        return self.reply.fields()

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        return self.reply.origin(error)


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestReply:
    """Writes what comes of a request, in the words of its protocol; and says what the protocol knows of it.
    This one is of a client that has left."""

    __slots__ = ()

    form = ""  # distinguishes its encoded answers from other protocols'; empty: they are not encoded
    siblings = b""  # is the same for requests that came as one, and differs from all others'
    looked: object = None  # what was found where its answer was looked for already

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        """Sends the outputs, those in `request.placed` excepted, or `request.encoded` in their place. What
        goes on when this returns is marked as `Answer.taken`."""

    def part(self, request: RequestFacts, answer: Answer) -> None:
        """Writes one of several answers, in their order; then come `answer`, without any outputs, or `error`.
        What this raises ends the request: a client that reads too slowly is cut off."""

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        """Writes an error. `times` is None for a request that never came to the engine."""

    def encode(self, request: RequestFacts, answer: Answer) -> EncodedAnswer:
        """Returns the outputs as `answer` sends them, without what belongs to this request alone."""
        raise Unsupported("answers of this form are not encoded")

    def current(self) -> ModelEntry:
        """Returns the version that would serve it now."""
        raise Unavailable("the client left")

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        """Returns how it came, and how it was answered, for its span."""
        return RequestOrigin("", {})

    def request_id(self, request: RequestFacts) -> str:
        """Returns it as the client calls it; empty where it does not."""
        return request.head.id

    def fields(self) -> Mapping[bytes, bytes]:
        """Returns what the client sent beside it, by its name in lower case: headers, or metadata."""
        return {}

    def named(self, head: RequestHead) -> RequestHead:
        """Returns the head with the request's own id, where the head is one that many share."""
        return head

    def facts(self, request: RequestFacts) -> Mapping[str, str]:
        """Returns what a log line says of it."""
        return {"model": request.entry.name}

    def takes_long(self) -> None:
        """Notes that a thread works on the answer."""


NO_REPLY: Final = RequestReply()


class Observer(Protocol):
    """Sees how requests end, in the loop's thread: it must not raise or take long."""

    def answered(self, call: RequestFacts, answer: Answer, times: tuple[float, float, float]) -> None:
        """Notes that a call was answered well: when it was offered, when that was done, and now, by
        `time.monotonic()`."""

    def failed(self, call: RequestFacts, error: CarpoolError, timing: Timing | None, now: float) -> None: ...


SeesPictures: TypeAlias = "Callable[[ModelEntry, SentPictures, Slot | None], None]"
"""Sees what goes to the engine before it is decoded, with the slot of a file that lies in one already."""


class RequestService:
    """Holds what every request needs of its front end."""

    engine: EngineClient
    log: Logger
    server_row: Row  # this process's counters that belong to no model
    memory: ClientMemory
    threads: ThreadPoolExecutor
    fair_threads: FairThreads  # their work is charged to clients
    forward: ForwardedHeaders | None  # headers that models receive
    observers: tuple[Observer, ...]
    see_pictures: tuple[SeesPictures, ...]
    pictures: PictureService
    """Serves images. There is none before a model takes images, or `with_pictures` is called."""

    def answer_error(
        self, request: RequestFacts, error: CarpoolError, timing: Timing | None, times: Times | None
    ) -> None:
        """Counts a request that failed, sends the error, and shows it to observers. The engine's `timing`,
        and the `times` with it, are None where it has not answered."""
        now = monotonic()
        row, head, sender = request.row, request.head, request.sender
        if times is None and request.heard:
            times = Times(decode=(now - request.arrived) * 1e3)
        if row is not None:
            unheard = head.batch if times is None and not sender.again else 0
            if times is None:
                source = sender.source or head.options.source
                self.engine.rejected_here(request.entry, error, request.arrived, head.batch, source)
            count_failure(row, error, now - request.arrived, unheard)
        request.reply.error(request, error, times)
        for observer in self.observers:
            observer.failed(request, error, timing, now)

    def count_left(self, request: RequestFacts) -> None:
        """Counts a request whose client has left, and shows it to observers."""
        now = monotonic()
        if request.row is not None:
            count_failure(request.row, LEFT, now - request.arrived if request.arrived else 0.0)
        for observer in self.observers:
            observer.failed(request, Cancelled("the client left"), None, now)
