"""What a front end sees of the engine: a catalogue of models, slots for bodies, and one way to infer.

`frontend.remote_door` is the one: across a link, whether the engine is in another process or in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from carpool.core.front_load import Outside
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError
from carpool.link.asked_fields import NOBODY, Sender
from carpool.memory.client_files import Region
from carpool.types import Signature, Tensor, Timing
from carpool.wire.v2 import RequestHead


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One version of one model, as the front ends know it."""

    key: int  # its number on the link
    name: str
    version: str
    signature: Signature
    platform: str
    mode: str  # promise, knobs or eager
    slo: float | None  # seconds
    config: Mapping[str, Any]  # Triton's JSON form
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by output
    row: tuple[int, int] = (0, 0)  # its row in the shared counters: number, generation
    vision: Mapping[str, Any] | None = None  # how it answers pictures, as JSON; None: it takes only tensors
    choices: Sequence[str] = ()  # what was chosen for it at loading and why, in words
    hosted: bool = False  # it runs in a process beside the engine's, which front ends need not know


class IndexEntry(NamedTuple):
    """A line of the repository index: also models that are not ready, with the reason."""

    name: str
    version: str = ""
    state: str = ""  # READY, LOADING, UNLOADING, UNAVAILABLE; empty, as its version, if it was never loaded
    reason: str = ""


UNLOADED = "unloaded"
"""The reason of a model that somebody took away."""


@dataclass(frozen=True, slots=True)
class LoadingStep:
    """What is done for one of those that are loaded together: `number - 1` of them serve, or failed."""

    model: str
    step: str
    number: int
    of: int

    def __str__(self) -> str:
        return f"loading {self.number} of {self.of}: {self.model}, {self.step}"


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that is served now. Replaced as a whole, with the next number.

    What every front end must agree on travels with it: a question that changed it is answered only when all
    of them have it.
    """

    number: int = 0
    ready: bool = False
    entries: Mapping[tuple[str, str], ModelEntry] = field(default_factory=dict)  # by (name, version)
    newest: Mapping[str, ModelEntry] = field(default_factory=dict)  # by name: what serves without a version
    index: Sequence[IndexEntry] = ()
    leaving: Sequence[ModelEntry] = ()  # replaced or unloaded, but front ends may still send to them
    down: Collection[int] = ()  # keys of those without an instance that could run anything now
    regions: Mapping[str, Region] = field(default_factory=dict)  # by name
    logging: Mapping[str, Any] = field(default_factory=dict)  # v2 log settings, as they are answered
    tracing: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # v2 trace settings; "" is global
    extensions: Sequence[str] = ()  # of the protocol, besides those that every server has
    server_name: str = "carpool"  # what the server calls itself to clients
    loading: str = ""  # how far the start is: what is loaded now, in words

    @property
    def able(self) -> bool:
        """Some model can run, or there is none that should: else nothing can be asked of this server."""
        return not self.entries or any(entry.key not in self.down for entry in self.entries.values())


class Slot(Protocol):
    """Memory for one body. It belongs to whoever asked for it until `release`."""

    view: memoryview

    def release(self) -> None: ...


@dataclass(slots=True)
class Answer:
    """How an inference ended. `outputs` may be views of a slot: use them before `Call.release`."""

    outputs: Sequence[Tensor] = ()
    error: CarpoolError | None = None
    timing: Timing = field(default_factory=Timing)
    sent: float = 0.0  # when the engine let go of it, time.monotonic()
    outside: Outside | None = (
        None  # learns how long clients wait from there to their answers; None for a loss
    )


class Call(Protocol):
    """One inference under way."""

    def ready(self, slot: Slot) -> None:
        """The tensors of a call that was made before them are in this slot, which is the call's from here on:
        given back at once if it was answered meanwhile."""

    def cancel(self) -> None:
        """The client has gone. `done` is not called any more; everything is released when it is safe."""

    def release(self) -> None:
        """The answer has been sent: give back the slots. Only after `done`."""


Ahead: TypeAlias = Callable[[float], int]


def nobody_ahead(_at: float) -> int:
    return 0


class Door(Protocol):
    """How a front end reaches the engine. Everything is called on the front end's loop thread."""

    @property
    def catalog(self) -> Catalog: ...

    @property
    def serving(self) -> bool:
        """False while the engine is starting, draining or being restarted."""

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        """Call it with the catalogue now, and with every new one before the engine hears that it is seen."""

    def slot(self, size: int) -> Slot | None:
        """Memory for a body, or None when all of it is in use. Raises `TooLarge` for what can never fit."""

    def memory_left(self, size: int) -> float:
        """How much of all memory for bodies would be free with so many bytes more in use, from 0 to 1."""

    def refuses(
        self,
        entry: ModelEntry,
        deadline: float,
        now: float,
        sender: Sender = NOBODY,
        *,
        certain: bool = True,
        ahead: Ahead = nobody_ahead,
    ) -> CarpoolError | None:
        """The gate's advice before the body is read: a refusal that the engine would make as well.

        Not `certain` is what the body may still change: whose it is, and how urgent. `ahead` says of how
        many others, who were let pass, the engine had not heard at a time.
        """

    def turned_away(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        """A request ended with this error before it came to `infer`."""

    def infer(
        self,
        entry: ModelEntry,
        head: RequestHead,
        slot: Slot,
        tail: int,
        done: Callable[[Answer], None],
        *,
        arrived: float,
        deadline: float = INFINITY,
        sender: Sender = NOBODY,
        ready_in: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> Call:
        """Run a request whose tensors lie in `slot.view[tail:]` at the offsets of `head`.

        The slot belongs to the call from here on, unless this raises. `done` is called at most once, never
        before this returns. `deadline` is the client's own; the promise is added behind the door.

        With `ready_in` the tensors are still to come, in about so many seconds. The request counts from now
        on; `admitted` is called, at most once and never before this returns, when the gate has let it in, and
        before that nothing need be done for it. The slot stays the caller's until `Call.ready`.
        """

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """A question to the engine that is not an inference (statistics, load, unload …): JSON in and out."""
