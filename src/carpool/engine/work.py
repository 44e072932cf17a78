"""One inference inside the engine, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from carpool.core.job import INFINITY, Job
from carpool.errors import CarpoolError
from carpool.link.request_place import RequestPlace
from carpool.types import Array, Timing

_UNTIMED = Timing()  # shared: a timing is replaced by the next owner's, not changed


@dataclass(slots=True)
class Outcome:
    """Either outputs by name, in the order asked for, or an error."""

    outputs: Mapping[str, Array] | None = None
    error: CarpoolError | None = None
    timing: Timing = _UNTIMED


class InBatch(Protocol):
    """A request as the batch that it is part of sees it."""

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


NO_INPUTS: Mapping[str, Array] = {}
"""Of a request that only another process looks at, or that was answered."""


class Work(Job):
    """A request the engine can run. `inputs` hold all its images, the batch dimension included.

    `done` is called exactly once, on the engine's loop thread, perhaps before `submit` returns. `place`,
    where there is one, says where it lies, and copies its rows there in the model's thread.
    """

    __slots__ = ("done", "encoded", "held", "inputs", "key", "place", "sent", "wanted")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        done: Callable[[Work, Outcome], None],
        arrived: float = 0.0,  # time.monotonic(): the last byte of the request
        deadline: float = INFINITY,
        images: int = 1,
        shape: Hashable = None,  # what must be equal to share a batch; None where all requests are alike
        wanted: Sequence[str] = (),  # none: all outputs
        encoded: bool = False,  # the one input is a picture's file, for the model's device to decode
    ) -> None:
        """What else is known of a job (its source, priority …) is set afterwards."""
        Job.__init__(self, arrived, deadline, images, shape)
        self.inputs = inputs
        self.done = done
        self.wanted = wanted
        self.encoded = encoded
        self.sent: float | None = None  # when its front end passed it on
        self.place: RequestPlace | None = None
        self.key = 0  # which model version has it
        self.held: Outcome | None = None  # an answer that waits for earlier ones
