"""One batch on one instance: gathered, run, checked and split; halved where it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar, cast

from carpool.backends.backend import Backend, Encoded, Gathers, OnDevice
from carpool.engine.collate import Collator
from carpool.engine.work import InBatch, Outcome
from carpool.errors import CarpoolError, ModelError
from carpool.types import Array, Signature, Timing

Request = TypeVar("Request", bound=InBatch)

Answer = Callable[[int, Sequence[Request], Mapping[str, Array], Mapping[int, CarpoolError]], list[Outcome]]
"""Takes requests that ran together, the first with its number in the batch; the outputs of all of them, one
behind the other; and by index what is wrong with those whose rows hold anything. It is not to raise."""

_NO_ERRORS: Mapping[int, CarpoolError] = {}


@dataclass(slots=True)
class BatchResult:
    """What became of a batch: an outcome for every request, in order, still without its own timing."""

    outcomes: list[Outcome]
    seconds: float  # on the instance, gathering included
    timing: Timing = field(default_factory=Timing)
    clean: bool = True  # nothing failed, so the time says something about the device
    out_of_memory: int = 0  # batches that the device had no room for in one piece


class BatchRun(Generic[Request]):
    """Runs batches on one backend, one after the other, in whichever thread calls it."""

    def __init__(
        self, backend: Backend, signature: Signature, largest: int, chunk: int, answer: Answer[Request]
    ) -> None:
        self._backend = backend
        self._answer = answer
        self._signature = signature
        self._collator = Collator(signature, max(1, largest))
        self._gathers = backend if isinstance(backend, Gathers) else None
        self._on_device = backend if isinstance(backend, OnDevice) else None
        self._every_output = tuple(signature.output_named)
        self._chunk = max(1, chunk)

    def run(self, works: Sequence[Request]) -> BatchResult:
        began = monotonic()
        timing = Timing(batch=sum(work.images for work in works))
        outcomes: list[Outcome] = []
        before = self._out_of_memory()
        for chunk in self._chunks(works):
            outcomes += self._run(chunk, len(outcomes), timing)
        short = self._out_of_memory() - before
        clean = not short and all(outcome.error is None for outcome in outcomes)
        return BatchResult(outcomes, monotonic() - began, timing, clean, short)

    def _out_of_memory(self) -> int:
        return 0 if self._on_device is None else self._on_device.out_of_memory

    def _chunks(self, works: Sequence[Request]) -> list[Sequence[Request]]:
        """Some models run a large batch faster in pieces that stay in the cache; riders see one batch."""
        if len(works) <= self._chunk or self._chunk >= self._signature.max_batch:
            return [works]
        chunks: list[list[Request]] = [[]]
        images = 0
        for work in works:
            if chunks[-1] and images + work.images > self._chunk:
                chunks.append([])
                images = 0
            chunks[-1].append(work)
            images += work.images
        return list(chunks)

    def _run(self, works: Sequence[Request], first: int, timing: Timing) -> list[Outcome]:
        """Run these together; where that fails, halve them, so that a poisoned input costs one error."""
        try:
            return self._run_together(works, first, timing)
        except CarpoolError as error:
            if len(works) == 1 or not self._backend.alive:
                return [Outcome(error=error) for _ in works]
        except Exception as error:  # a fault of ours must not take the instance down
            failure = ModelError(f"{self._signature.model}: {type(error).__name__}: {error}")
            if len(works) == 1:
                return [Outcome(error=failure)]
        half = len(works) // 2
        return self._run(works[:half], first, timing) + self._run(works[half:], first + half, timing)

    def _run_together(self, works: Sequence[Request], first: int, timing: Timing) -> list[Outcome]:
        if works[0].encoded:
            return self._run_encoded(works, first, timing)
        start = monotonic()
        wanted = self._wanted(works)
        images = [work.images for work in works]
        if self._gathers is not None:  # what it copies, and when, is its own affair and its own time
            gathered = start
            parts = [work.inputs for work in works]
            outputs = self._gathers.run_parts(parts, images, wanted)
        else:
            inputs = self._collator.gather(works)
            gathered = monotonic()
            outputs = self._backend.run(inputs, wanted)
        ran = monotonic()
        self._collator.check(outputs, wanted, sum(images))
        outcomes = self._answer(first, works, outputs, _NO_ERRORS)
        timing.input += gathered - start
        timing.infer += ran - gathered
        timing.output += monotonic() - ran
        return outcomes

    def _run_encoded(self, works: Sequence[Request], first: int, timing: Timing) -> list[Outcome]:
        """Files, one picture each. What is wrong with one of them is only its owner's affair."""
        start = monotonic()
        wanted = self._wanted(works)
        (name,) = works[0].inputs
        pictures = [work.inputs[name] for work in works]
        outputs, errors = cast(Encoded, self._backend).run_encoded(pictures, wanted)
        ran = monotonic()
        self._collator.check(outputs, wanted, len(works))
        outcomes = self._answer(first, works, outputs, errors)
        timing.infer += ran - start
        timing.output += monotonic() - ran
        return outcomes

    def _wanted(self, works: Sequence[Request]) -> Sequence[str]:
        if not all(work.wanted for work in works):
            return self._every_output
        names = {name for work in works for name in work.wanted}
        return tuple(name for name in self._every_output if name in names)
