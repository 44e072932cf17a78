"""Defines how a front end reaches the engine: slots for bodies, and one way to infer.

`frontend.link_client` implements it across a link, whether the engine is in another process or in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from carpool.core.front_load import Outside
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.contents import Content
from carpool.link.senders import NOBODY, Sender
from carpool.memory.arena import MakeRoom, Slot
from carpool.types import Tensor, Timing
from carpool.wire.v2 import RequestHead


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
        """Receives one answer of several, in order. Its outputs are in no slot: they stay as long as they are
        referenced."""

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


class EngineClient(Protocol):
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

    def rejected_here(
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
