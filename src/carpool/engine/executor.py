"""One instance at work: a thread that gathers a batch, runs it and splits the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import cast

from carpool.backends.backend import Backend, Encoded, Gathers
from carpool.engine.collate import Collator, split
from carpool.engine.work import Outcome, Timing, Work
from carpool.errors import CarpoolError, ModelError
from carpool.types import Signature


@dataclass(slots=True)
class BatchResult:
    """What became of a batch: an outcome for every request, in order, still without its own timing."""

    outcomes: list[Outcome]
    seconds: float  # on the instance, gathering included
    timing: Timing = field(default_factory=Timing)
    clean: bool = True  # nothing failed, so the time says something about the device


Report = Callable[["Executor", Sequence[Work], BatchResult], None]


class Executor:
    """Runs batches one after the other in its own thread and reports from there."""

    def __init__(
        self, backend: Backend, signature: Signature, largest: int, chunk: int, report: Report
    ) -> None:
        self.backend = backend
        self._signature = signature
        self._collator = Collator(signature, max(1, largest))
        self._gathers = backend if isinstance(backend, Gathers) else None
        self._every_output = tuple(signature.output_named)
        self._chunk = max(1, chunk)
        self._report = report
        self._queue: SimpleQueue[Sequence[Work] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"{signature.model}-instance", daemon=True)
        self._thread.start()

    def run(self, works: Sequence[Work]) -> None:
        self._queue.put(works)

    def close(self) -> None:
        """Let the thread end after what it was given, then free the model."""
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _serve(self) -> None:
        while (works := self._queue.get()) is not None:
            began = monotonic()
            timing = Timing(batch=sum(work.images for work in works))
            outcomes: list[Outcome] = []
            for chunk in self._chunks(works):
                outcomes += self._run(chunk, timing)
            clean = all(outcome.error is None for outcome in outcomes)
            self._report(self, works, BatchResult(outcomes, monotonic() - began, timing, clean))
        self.backend.close()

    def _chunks(self, works: Sequence[Work]) -> list[Sequence[Work]]:
        """Some models run a large batch faster in pieces that stay in the cache; riders see one batch."""
        if len(works) <= self._chunk or self._chunk >= self._signature.max_batch:
            return [works]
        chunks: list[list[Work]] = [[]]
        images = 0
        for work in works:
            if chunks[-1] and images + work.images > self._chunk:
                chunks.append([])
                images = 0
            chunks[-1].append(work)
            images += work.images
        return list(chunks)

    def _run(self, works: Sequence[Work], timing: Timing) -> list[Outcome]:
        """Run these together; where that fails, halve them, so that a poisoned input costs one error."""
        try:
            return self._run_together(works, timing)
        except CarpoolError as error:
            if len(works) == 1 or not self.backend.alive:
                return [Outcome(error=error) for _ in works]
        except Exception as error:  # a fault of ours must not take the instance down
            failure = ModelError(f"{self._signature.model}: {type(error).__name__}: {error}")
            if len(works) == 1:
                return [Outcome(error=failure)]
        half = len(works) // 2
        return self._run(works[:half], timing) + self._run(works[half:], timing)

    def _run_together(self, works: Sequence[Work], timing: Timing) -> list[Outcome]:
        if works[0].encoded:
            return self._run_encoded(works, timing)
        start = monotonic()
        wanted = self._wanted(works)
        if self._gathers is not None:  # what it copies, and when, is its own affair and its own time
            gathered = start
            parts = [work.inputs for work in works]
            outputs = self._gathers.run_parts(parts, [work.images for work in works], wanted)
        else:
            inputs = self._collator.gather(works)
            gathered = monotonic()
            outputs = self.backend.run(inputs, wanted)
        ran = monotonic()
        images = sum(work.images for work in works)
        self._collator.check(outputs, wanted, images)
        answers = split(outputs, works, batched=self._signature.max_batch > 0)
        outcomes = [
            Outcome(outputs=part if work.place is None else work.place(part))
            for work, part in zip(works, answers, strict=True)
        ]
        timing.input += gathered - start
        timing.infer += ran - gathered
        timing.output += monotonic() - ran
        return outcomes

    def _run_encoded(self, works: Sequence[Work], timing: Timing) -> list[Outcome]:
        """Files, one picture each. What is wrong with one of them is only its owner's affair."""
        start = monotonic()
        wanted = self._wanted(works)
        pictures = [next(iter(work.inputs.values())) for work in works]
        outputs, errors = cast(Encoded, self.backend).run_encoded(pictures, wanted)
        ran = monotonic()
        self._collator.check(outputs, wanted, len(works))
        outcomes = [
            Outcome(error=errors[number])
            if number in errors
            else Outcome(outputs=part if work.place is None else work.place(part))
            for number, (work, part) in enumerate(
                zip(works, split(outputs, works, batched=True), strict=True)
            )
        ]
        timing.infer += ran - start
        timing.output += monotonic() - ran
        return outcomes

    def _wanted(self, works: Sequence[Work]) -> Sequence[str]:
        if not all(work.wanted for work in works):
            return self._every_output
        names = {name for work in works for name in work.wanted}
        return tuple(name for name in self._every_output if name in names)
