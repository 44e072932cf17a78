"""Defines what a front end sees of the engine: a catalogue of models, slots for bodies, and one way to infer.

`frontend.remote_door` is the one: across a link, whether the engine is in another process or in this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from carpool.core.front_load import Outside
from carpool.core.job import ADDRESS, INFINITY
from carpool.errors import CarpoolError, InvalidInput
from carpool.link.contents import Content
from carpool.memory.arena import MakeRoom, Slot
from carpool.memory.client_files import Region
from carpool.types import RequestOptions, Signature, Tensor, Timing
from carpool.wire import head
from carpool.wire.v2 import RequestHead

ASK = "carpool_ask"
ASSUMED = "carpool_assumed"
"""The parameter, in the settings that clients read, which says what to set before a model takes pictures."""
DEADLINE = "X-Carpool-Deadline-Ms"
SOURCE = "X-Carpool-Source"
LATEST = "X-Carpool-Latest"
ATTEMPT = "X-Envoy-Attempt-Count"
"""Which try this is: Envoy says so by itself, and others can be told to."""

Json: TypeAlias = Mapping[str, Any]
"""A JSON object."""
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Key(Protocol):
    """Defines what matters here of a key that came with a request."""

    @property
    def name(self) -> str:
        """Returns the name of its holder."""

    @property
    def priority(self) -> int: ...

    @property
    def weight(self) -> float: ...


class Sender(NamedTuple):
    """Describes who asks. `latest`: a newer frame of this source takes the place of one that waits.

    `priority` is that of the key: the most urgent that a request with it may be, and what it is by default;
    0 is none, and 1 the most urgent: a request has the larger of its own and this. `holder` has the key, and
    `weight` is its part of a busy device, which all sources that it names share. `again`: another server was
    asked before, and counted it. `payer` is the address of a client without a key: its source where it names
    none, and who has its places of a model whose places clients share. It begins with `ADDRESS`.
    """

    source: str = ""
    latest: bool = False
    priority: int = 0
    holder: str = ""
    weight: float = 1.0
    again: bool = False
    payer: str = ""

    @property
    def lane(self) -> str:
        """The source that it counts as."""
        return self.source or self.payer

    def paid_by(self, client: str) -> Sender:
        """Returns the sender of a request that comes from there: the holder of a key, or an address."""
        return self if self.holder or not client else self._replace(payer=ADDRESS + client)

    @property
    def named(self) -> str:
        """The source that a request names itself: a key's holder alone is none."""
        return "" if self.source == self.holder else self.source

    def with_key(self, key: Key) -> Sender:
        """The sources that a holder names are its own: none is another's, whatever it is called."""
        source = f"{key.name}/{self.source}" if self.source else key.name
        return Sender(source, self.latest, key.priority, key.name, key.weight, self.again)

    def with_options(self, options: RequestOptions) -> Sender:
        """Returns the sender together with what the request's own parameters say."""
        if not (options.source or options.latest or self.latest):
            return self
        source = self.source
        if options.source and source == self.holder:  # no header names another
            source = f"{source}/{options.source}" if source else options.source
        return checked(self._replace(source=source, latest=self.latest or options.latest))


NOBODY = Sender()


def checked(sender: Sender) -> Sender:
    if sender.latest and not sender.source:
        raise InvalidInput(
            f"{LATEST} needs a source: name the camera in {SOURCE} or in the parameter source", field=LATEST
        )
    return sender


def read_budget(field: bytes | None) -> float:
    """Returns seconds from the request's head to the client's deadline."""
    if field is None:
        return INFINITY
    budget = float(field) / 1e3 if _MILLISECONDS.fullmatch(field) else 0.0
    if not budget:
        raise InvalidInput(f"{DEADLINE} must be a number of milliseconds above 0", field=DEADLINE)
    return budget


def read_source(field: bytes | None) -> str:
    if field is None:
        return ""
    try:
        source = field.decode()
    except UnicodeDecodeError:
        source = "\0"  # which is refused
    return head.read_source(source, SOURCE)


def read_latest(field: bytes | None) -> bool:
    if field in (None, b"0"):
        return False
    if field != b"1":
        raise InvalidInput(f"{LATEST} must be 1 or 0", field=LATEST)
    return True


def read_attempt(field: bytes | str | None) -> bool:
    """Returns whether a balancer says that it has asked another server before. What is no number says no."""
    return field is not None and field.isdigit() and int(field[:9]) > 1


@dataclass(frozen=True, slots=True)
class Batching:
    """Describes how the engine forms the batches of a model: its mode, and the latency that it promises."""

    mode: str  # promise, knobs or eager
    slo: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class Traits:
    """Describes in what a model differs from one that runs in the engine and gives one answer a request."""

    hosted: bool = False  # it runs in a process beside the engine's, which front ends need not know
    fetches: bool = False  # the engine copies inputs in clients' memory itself, into their batch
    decoupled: bool = False  # it gives any number of answers to a request, or none, and then an end
    writes: bool = False  # its answers are pieces of one text, which a request may want as a whole instead

    def in_parts(self, one_answer: str | bool) -> bool:
        """Returns whether its answers come one by one. A request for one answer has all of a text."""
        return self.decoupled and not (self.writes and one_answer)


USUAL_TRAITS = Traits()


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Holds what clients can read about a model."""

    platform: str = ""
    config: Json = field(default_factory=dict)  # Triton's JSON form
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by output
    choices: Sequence[str] = ()  # what was chosen for it at loading and why, in words

    @property
    def ask(self) -> str:
        """Returns what to set before a model that was not recognised takes pictures; empty: nothing would
        help."""
        return str(self.config.get("parameters", {}).get(ASK, {}).get("string_value", ""))


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Describes one version of one model, as the front ends know it."""

    key: int  # its number on the link
    name: str
    version: str
    signature: Signature
    batching: Batching
    traits: Traits = USUAL_TRAITS
    published: PublishedModel = field(default_factory=PublishedModel)
    row: tuple[int, int] = (0, 0)  # its row in the shared counters: number, generation
    vision: Json | None = None  # how it answers pictures; None: it takes only tensors
    extra: Json = field(default_factory=dict)  # by extension: what its front part needs to know

    def due(self, arrived: float, deadline: float) -> float:
        """Returns the client's deadline or the end of the SLO, whichever comes first."""
        slo = self.batching.slo
        return deadline if slo is None else min(deadline, arrived + slo)


class IndexEntry(NamedTuple):
    """Describes a line of the repository index: also models that are not ready, with the reason."""

    name: str
    version: str = ""
    state: str = ""  # READY, LOADING, UNLOADING, UNAVAILABLE; empty, as its version, if it was never loaded
    reason: str = ""

    @property
    def word(self) -> str:
        """Returns the state as one word of `carpool_model_state`: what failed is apart from what nobody asked
        for."""
        if self.state in ("", "UNAVAILABLE"):
            return "failed" if self.reason not in ("", UNLOADED, ON_DEMAND) else "unloaded"
        return self.state.lower()


UNLOADED = "unloaded"
"""The reason of a model that somebody took away."""
ON_DEMAND = "it is loaded on demand"
"""The reason of a model that is not in memory now, where that is all that is needed."""


@dataclass(frozen=True, slots=True)
class LoadingStep:
    """Describes what is done for one of those that are loaded together: `number - 1` of them serve, or
    failed."""

    model: str
    step: str
    number: int
    of: int

    def __str__(self) -> str:
        return f"loading {self.number} of {self.of}: {self.model}, {self.step}"


@dataclass(frozen=True, slots=True)
class PublishedServer:
    """Holds what a server tells its clients about itself, beside its models."""

    name: str = "carpool"  # what the server calls itself
    extensions: Sequence[str] = ()  # of the protocol, besides those that every server has
    logging: Json = field(default_factory=dict)  # v2 log settings, as they are answered
    loading: str = ""  # how far the start is: what is loaded now, in words
    on_demand: Mapping[str, str] = field(default_factory=dict)
    """By name, the models that are loaded when a request names them, and the task of their settings."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Lists everything that is served now. Replaced as a whole, with the next number.

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
    server: PublishedServer = field(default_factory=PublishedServer)
    extra: Json = field(default_factory=dict)  # by extension: what its engine part publishes

    @property
    def able(self) -> bool:
        """Some model can run, or there is none that should: else nothing can be asked of this server."""
        return not self.entries or any(entry.key not in self.down for entry in self.entries.values())


@dataclass(slots=True)
class Answer:
    """Describes how an inference ended. `outputs` may be views of a slot: use them before `Call.release`."""

    outputs: Sequence[Tensor] = ()
    error: CarpoolError | None = None
    timing: Timing = field(default_factory=Timing)
    sent: float = 0.0  # when the engine let go of it, time.monotonic()
    outside: Outside | None = (
        None  # learns how long clients wait from there to their answers; None for a loss
    )
    degraded: str = ""  # why a cascade answered with its cheap model although that is not certain
    finish: str = ""  # of the last part of a text, why it ends: one of `records.FINISHES`
    last: bool = False  # of a part with which its model has said that no other will come
    text: str = ""  # of a part, where that is a piece of text about a picture
    held: Call | None = None  # gives back what the outputs lie in, when the answer was written
    taken: bool = False  # the answer is being written, and its writer releases what is held


class RequestGroup(Protocol):
    """Represents several requests that answer one client, step by step. The gate lets all of them in or none,
    and the engine learns what the later steps take. Its front end says how far it is."""

    entry: ModelEntry  # of the model that is made of these steps
    begun: bool  # the engine has heard of it

    def reaches(self, step: int, images: int) -> None:
        """Says that a step, which is not the first, is about to get so many images; with none, it is over."""

    def over(self, *, answered: bool) -> None:
        """Says that it has ended; what is said after that has no effect."""


class Call(Protocol):
    """Represents one inference under way."""

    def ready(self, slot: Slot) -> None:
        """The tensors of a call that was made before them are in this slot, which is the call's from here on:
        given back at once if it was answered meanwhile."""

    def cancel(self) -> None:
        """The client has gone. `done` is not called any more; everything is released when it is safe."""

    def release(self) -> None:
        """The answer has been sent: give back the slots. Only after `done`."""


class Hears(Protocol):
    """The asker, as the call reaches it. Nothing is called any more after `done` or `Call.cancel`."""

    def admitted(self) -> None:
        """The gate has let in a request whose tensors are still to come: at most once. Before that, nothing
        need be done for it."""

    def part(self, answer: Answer) -> None:
        """Receives one answer of several, in order. Its outputs are in no slot: they stay as long as somebody
        has them."""

    def done(self, answer: Answer) -> None:
        """The request is over: exactly once, without outputs after parts."""


class OneAnswer:
    """Implements `Hears` but for `done`, for askers whose tensors are there and who take one answer."""

    def admitted(self) -> None:
        """Nothing waits for it."""

    def part(self, answer: Answer) -> None:
        """It is not asked for."""


class Handling(NamedTuple):
    """Describes how a request is handled that is not one with all its tensors, for one answer.

    With `ready_in` the tensors are still to come, in about so many seconds. The request counts from now on,
    and the slot stays the caller's until `Call.ready`.

    No client waits for a `background` one, whose tensors are there: it runs out of what the models on its
    device leave over, counts nowhere as a request, and ends with an error of the reason `background` if there
    was no slack for it, or no memory: its slot may be shared with the request that it repeats. `deadline`,
    `sender` and the request's own options mean nothing then.

    With a `booking` it is part of that group: the group's promise holds for it, counted from `arrived`, less
    what the later steps take. The gate decides about the first request of a group.

    The answers of a decoupled model are taken `in_parts`; one that writes may be asked without, and then
    gives all of its text at once.
    """

    ready_in: float | None = None
    in_parts: bool = False
    background: bool = False
    content: Content | None = None  # what is still to be put into the slot, as the front end knows it
    booking: RequestGroup | None = None
    step: int = 0


USUAL = Handling()
IN_PARTS = Handling(in_parts=True)
BACKGROUND = Handling(background=True)


class Ask(NamedTuple):
    """Describes what is asked, by whom, and until when: the one value that goes to the engine.

    The tensors lie in `slot.view[tail:]` at the offsets of `head`. `deadline` is the client's own; the engine
    adds the promise of the model.
    """

    entry: ModelEntry
    head: RequestHead
    slot: Slot | None
    tail: int
    arrived: float
    deadline: float = INFINITY
    sender: Sender = NOBODY
    handling: Handling = USUAL


Ahead: TypeAlias = Callable[[float], int]


def nobody_ahead(_at: float) -> int:
    return 0


class Door(Protocol):
    """Defines how a front end reaches the engine. Everything is called on the front end's loop thread."""

    @property
    def catalog(self) -> Catalog: ...

    @property
    def serving(self) -> bool:
        """Returns False while the engine is starting, draining or being restarted."""

    def watch(self, listener: Callable[[Catalog], None]) -> None:
        """Call it with the catalogue now, and with every new one before the engine hears that it is seen."""

    def slot(self, size: int, make_room: MakeRoom | None = None) -> Slot:
        """Returns memory for a body. Raises `Unavailable` when all of it is in use, `TooLarge` when it never
        fits."""

    def large_slot(self, size: int, answer: int, client: str, make_room: MakeRoom) -> Slot:
        """Returns memory for a long body and its answer, counted for its client. Raises as `slot`."""

    def first_slot(self, size: int, make_room: MakeRoom) -> Slot:
        """For a body that will take so many bytes, which are still to come: it may be shorter."""

    def larger_slot(self, slot: Slot, kept: int, size: int, make_room: MakeRoom) -> Slot:
        """Returns a slot in the place of one whose `kept` first bytes are used, and which is given back
        whatever happens; up to `size` bytes long."""

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
        """Notes that a request ended with this error before it came to `infer`."""

    def answered_here(self, entry: ModelEntry, arrived: float, images: int, source: str) -> None:
        """A request was answered without `infer`."""

    def infer(self, ask: Ask, hears: Hears) -> Call:
        """Run a request. Its slot belongs to the call from here on, unless this raises; `hears` is called
        back in the loop's thread, never before this returns."""

    def begin_booking(self, entry: ModelEntry) -> RequestGroup:
        """Begins a group of requests for a model that is made of steps; the engine hears of it with the first
        of them."""

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Asks the engine a question that is not an inference (statistics, load, unload …): JSON in and
        out."""
