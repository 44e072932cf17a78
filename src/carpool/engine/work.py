"""One inference inside the engine, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from carpool.core.job import INFINITY, Job
from carpool.errors import CarpoolError
from carpool.types import Array, Timing

_UNTIMED = Timing()  # shared: a timing is replaced by the next owner's, not changed


@dataclass(slots=True)
class Outcome:
    """Either outputs by name, in the order asked for, or an error."""

    outputs: Mapping[str, Array] | None = None
    error: CarpoolError | None = None
    timing: Timing = _UNTIMED


class Family(Protocol):
    """What requests of one kind have in common, for a process that is told it once."""

    identity: int  # never used again
    payload: bytes


@dataclass(slots=True, eq=False)
class Seat:
    """Where a request lies for a model that runs in another process: here nobody looks at its tensors.

    `form` and `payload` are what that process says of the outputs. While it is `held`, that process may still
    write into the request's memory.
    """

    call: int
    family: Family
    arena: int  # the number of the memory that both processes map
    offset: int
    output: int  # where its outputs go
    capacity: int
    form: int | None = None
    payload: bytes = b""
    held: bool = False

    def close(self) -> bool:
        """False while its memory may still be written to."""
        return not self.held


class Rides(Protocol):
    """A request as the batch that it rides in sees it."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Arrays, or what its backend has made of them (`Gathers.view`); the batch dimension included."""

    @property
    def images(self) -> int: ...

    @property
    def wanted(self) -> Sequence[str]:
        """None: all outputs."""

    @property
    def encoded(self) -> bool:
        """The one input is a picture's file."""


NOWHERE: Mapping[str, Array] = {}
"""The inputs of a request that only another process looks at."""


class Work(Job):
    """A request the engine can run. `inputs` hold all its images, the batch dimension included.

    `done` is called exactly once, on the engine's loop thread, perhaps before `submit` returns. `place`,
    where given, is called in the model's thread with this request's rows, to copy them where they are needed.
    """

    __slots__ = ("done", "encoded", "held", "inputs", "key", "place", "seat", "sent", "wanted")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        done: Callable[[Work, Outcome], None],
        arrived: float = 0.0,  # time.monotonic(): the last byte of the request
        deadline: float = INFINITY,
        images: int = 1,
        shape: Hashable = None,  # what must be equal to share a batch; None where all requests are alike
        priority: int = 0,
        source: str = "",
        latest: bool = False,  # a newer frame of the source takes its place while it waits
        timeout: float = 0.0,  # Triton's queue timeout, seconds
        outside: float = 0.0,  # what its client waits beyond what the engine sees, as its front end thinks
        wanted: Sequence[str] = (),  # none: all outputs
        sent: float | None = None,  # when its front end passed it on
        place: Callable[[Mapping[str, Array]], Mapping[str, Array]] | None = None,
        seat: Seat | None = None,  # for a model that runs in another process, instead of `inputs` and `place`
        encoded: bool = False,  # the one input is a picture's file, for the model's device to decode
    ) -> None:
        Job.__init__(self, arrived, deadline, images, shape, priority, source, latest, timeout, outside)
        self.inputs = inputs
        self.done = done
        self.wanted = wanted
        self.sent = sent
        self.place = place
        self.seat = seat
        self.encoded = encoded
        self.key = 0  # which model version has it
        self.held: Outcome | None = None  # an answer that waits for earlier ones
