"""Describes the steps of a run through a pipeline: what is asked in each, what was answered, and how long
that took."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

from carpool.extensions.pipelines.picture_graph import Document, Item
from carpool.link.engine_client import Answer, Call, OneAnswer
from carpool.memory.arena import Slot
from carpool.types import PartTiming, StepTiming
from carpool.vision.geometry import Geometry


class Run(Protocol):
    """Defines the way through a pipeline that a request is part of."""

    def admitted(self) -> None: ...
    def answered(self, number: int, answer: Answer) -> None: ...


class StepRequest:
    """Represents a part of a step: these of its items, in one slot, as one request."""

    __slots__ = ("answer", "call", "geometries", "items", "sizes", "slot")

    def __init__(self, items: Sequence[int]) -> None:
        self.items = items
        self.slot: Slot | None = None  # ours, while it is cut into
        self.call: Call | None = None
        self.answer: Answer | None = None
        self.geometries: list[Geometry] = []
        self.sizes: list[tuple[int, int]] = []  # of what was cut out


class RequestHears(OneAnswer):
    """Hears of a request for the run that it is part of; only its call knows this, so that nothing refers to
    itself."""

    __slots__ = ("_number", "_request", "_run")

    def __init__(self, run: Run, number: int, request: StepRequest) -> None:
        self._run = run
        self._number = number
        self._request = request

    def admitted(self) -> None:
        self._run.admitted()

    def done(self, answer: Answer) -> None:
        self._request.answer = answer
        self._run.answered(self._number, answer)


class StepState:
    """Describes a step that has begun. `answers` are there when it is over."""

    __slots__ = ("answers", "began", "cut", "items", "requests", "waiting")

    def __init__(self, items: Sequence[Item], requests: Sequence[StepRequest]) -> None:
        self.items = items
        self.requests = requests
        self.waiting = len(requests)
        self.answers: list[Document] | None = None
        self.began = monotonic()
        self.cut = 0.0  # seconds


def give_back(requests: Sequence[StepRequest]) -> None:
    """Gives back slots that no request took over."""
    for request in requests:
        slot, request.slot = request.slot, None
        if slot is not None:
            slot.release()


def release_all(requests: Sequence[StepRequest]) -> None:
    """Releases outputs that were read."""
    for request in requests:
        call, request.call = request.call, None
        if call is not None:
            call.release()


def told(timing: StepTiming) -> list[dict[str, Any]]:
    """Returns the times in milliseconds."""
    return [
        {
            "step": name,
            "images": each.images,
            "cut_ms": round(each.cut * 1e3, 3),
            "queue_ms": round(each.queue * 1e3, 3),
            "infer_ms": round((each.input + each.infer + each.output) * 1e3, 3),
            "batch": each.batch,
        }
        for name, each in timing.steps
        if isinstance(each, PartTiming) and name != "merge"
    ]
