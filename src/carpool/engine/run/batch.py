"""Runs one batch on one instance, in its thread: gathered, run, checked and split; halved where it fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import orjson

from carpool.backends.backend import (
    AnswersEach,
    AnswersRows,
    Backend,
    Gathers,
    OnDevice,
    RunsEncoded,
    RunsRows,
    RunsSingly,
    StatefulRow,
)
from carpool.compiling import mypyc_attr
from carpool.core.job import INFINITY, Job
from carpool.engine.run.collator import Collator, InBatch, InTurn, inputs_of
from carpool.errors import CarpoolError, ModelError, without_stack
from carpool.link.request_place import COPIED_AT_ONCE, RequestPlace
from carpool.link.templates import PLAIN_FORM, RequestForm
from carpool.memory.client_files import RegionReads
from carpool.types import Array, Datatype, Signature, Timing
from carpool.wire.head import MAX_STRINGS

if TYPE_CHECKING:
    from carpool.core.instance import Batch, Instance
    from carpool.core.scheduler import Scheduler
    from carpool.engine.run.parts import PartSink

_UNTIMED = Timing()  # shared: a timing is replaced by the next owner's, not changed


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(slots=True)
class Outcome:
    """Holds either outputs by name, in the order asked for, or an error."""

    outputs: Mapping[str, Array] | None = None
    error: CarpoolError | None = None
    timing: Timing = _UNTIMED


Done = Callable[["Work", Outcome], None]


class Route(Protocol):
    """Defines what is called on the loop's thread. `done` of every work is called once, whatever happens."""

    def submit(self, works: Sequence[Work]) -> None:
        """Submits what came at once."""

    def ready(self, work: Work) -> None:
        """The inputs of a work that was submitted before them (`ready_at`) are there."""

    def cancel(self, work: Work) -> None:
        """Cancels a work whose client no longer waits for it."""


NO_INPUTS: Mapping[str, Array] = {}
"""Of a request that only another process looks at, or that was answered."""


class Extras:
    """Holds what few requests have. Those that have none of it share `NO_EXTRAS`, which no one changes."""

    __slots__ = ("_details", "gives_way", "held", "parameters", "parts", "reads", "then")

    def __init__(self) -> None:
        self._details = b""
        self.parameters: Mapping[str, int | str] | None = None  # of a caller in this process, without JSON
        self.reads: RegionReads | None = None  # where its inputs are, if they are in a client's memory
        self.held: Outcome | None = None  # an answer that waits for earlier ones
        self.parts: PartSink | None = None  # where each of several answers goes, until it is done
        self.gives_way = False  # it gets no more of them: its place is to be another's
        self.then: Done | None = None  # its own `done`, while a route before the driver has put another there

    @property
    def details(self) -> bytes:
        """Returns the id and parameters of the request in JSON, for models that read them. Those of a caller
        in this process become JSON at the first call, which most models never make."""
        if self.parameters is not None and not self._details:
            self._details = orjson.dumps({"parameters": self.parameters})
        return self._details

    @details.setter
    def details(self, details: bytes) -> None:
        self._details = details


NO_EXTRAS = Extras()


class Work(Job):
    """A request the engine can run. `inputs` hold all its images, the batch dimension included.

    `done` is called exactly once, on the engine's loop thread, perhaps before `submit` returns. `place`,
    where there is one, says where it lies, and copies its rows there in the model's thread.
    """

    __slots__ = ("done", "extras", "form", "inputs", "place", "route", "sent")

    def __init__(
        self,
        inputs: Mapping[str, Array],
        done: Done,
        arrived: float = 0.0,  # time.monotonic(): the last byte of the request
        deadline: float = INFINITY,
        images: int = 1,
        shape: Hashable = None,  # what must be equal to share a batch; None where all requests are alike
        form: RequestForm = PLAIN_FORM,
    ) -> None:
        """What else is known of a job (its origin, its options …) is set afterwards."""
        Job.__init__(self, arrived, deadline, images, shape)
        self.inputs = inputs
        self.done = done
        self.form = form
        self.extras = NO_EXTRAS
        self.place: RequestPlace | None = None
        self.route: Route | None = None  # which has it
        self.sent: float | None = None  # when its front end passed it on

    def own_extras(self) -> Extras:
        """Returns its extras, which from here on are no other request's, so that they may be changed."""
        if self.extras is NO_EXTRAS:
            self.extras = Extras()
        return self.extras


def answer_each(
    _first: int, works: Sequence[Work], outputs: Mapping[str, Array], errors: Mapping[int, CarpoolError]
) -> list[Outcome]:
    """Implements the `Answer` for requests that say themselves where their rows go."""
    if len(works) == 1 and not errors:
        work = works[0]
        form = work.form
        wanted, all_wanted = form.wanted, len(outputs) == len(form.wanted) and not form.may_omit
        rows = outputs if all_wanted or not wanted else _chosen(outputs, work)
        return [Outcome(rows if work.place is None else work.place(rows))]
    return [
        Outcome(error=errors[number])
        if number in errors
        else Outcome(outputs=rows if work.place is None else work.place(rows))
        for number, (work, rows) in enumerate(zip(works, _split(outputs, works), strict=True))
    ]


def _split(outputs: Mapping[str, Array], works: Sequence[Work]) -> list[Mapping[str, Array]]:
    """Returns each request's rows, only the outputs it asked for, without copying."""
    if len(works) == 1:  # also where there are no rows, but one answer to one request
        return [_chosen(outputs, works[0])]
    parts: list[Mapping[str, Array]] = []
    start = 0
    for work in works:
        end = start + work.images
        parts.append({name: array[start:end] for name, array in _chosen(outputs, work).items()})
        start = end
    return parts


def _chosen(outputs: Mapping[str, Array], work: Work) -> Mapping[str, Array]:
    wanted = work.form.wanted
    return {name: outputs[name] for name in wanted if name in outputs} if wanted else outputs


def _rows(works: Sequence[InBatch]) -> list[StatefulRow]:
    """Returns those of works, whose route has left them there."""
    return [cast(Work, work).payload for work in works]


def _kept_bytes(signature: Signature) -> float:
    """Returns the bytes of the outputs for one image; infinity where they are not known beforehand."""
    fixed = all(spec.datatype is not Datatype.BYTES and -1 not in spec.shape for spec in signature.outputs)
    return sum(prod(spec.shape) * spec.datatype.size for spec in signature.outputs) if fixed else INFINITY


def _strings_in(work: InBatch) -> int:
    return sum(array.size for array in work.inputs.values() if array.dtype.kind == "O")


_images_of = attrgetter("images")


RequestT = TypeVar("RequestT", bound=InBatch)

Answer = Callable[[int, Sequence[RequestT], Mapping[str, Array], Mapping[int, CarpoolError]], list[Outcome]]
"""Takes requests that ran together, the first with its number in the batch; the outputs of all of them, one
behind the other; and by index what is wrong with those whose rows hold anything. It is not to raise."""

_NO_ERRORS: Mapping[int, CarpoolError] = {}


@dataclass(slots=True)
class BatchResult:
    """Describes what became of a batch: an outcome for every request, in order, still without its own
    timing."""

    outcomes: list[Outcome]
    seconds: float  # on the instance, gathering included
    timing: Timing = field(default_factory=Timing)
    clean: bool = True  # nothing failed, so the time says something about the device
    out_of_memory: int = 0  # batches that the device had no room for in one piece


@mypyc_attr(allow_interpreted_subclasses=True)
class Watcher:
    """Receives what the driver observes: for counters, and to replace instances."""

    def batch_ended(self, result: BatchResult, batch: Batch) -> None: ...

    def instance_lost(self, instance: Instance, why: str) -> None: ...

    def turned(self, scheduler: Scheduler, now: float) -> None: ...


class BatchRun(Generic[RequestT]):
    """Runs batches on one backend, one after the other, in whichever thread calls it."""

    def __init__(
        self, backend: Backend, signature: Signature, largest: int, chunk: int, answer: Answer[RequestT]
    ) -> None:
        self._backend = backend
        self._answer = answer
        self._signature = signature
        self._collator = Collator(signature, max(1, largest))
        self._gathers = backend if isinstance(backend, Gathers) else None
        self._on_device = backend if isinstance(backend, OnDevice) else None
        self._answers_each = backend if isinstance(backend, AnswersEach | AnswersRows) else None
        self._runs_rows = backend if isinstance(backend, RunsRows) else None
        self._every_output = tuple(signature.output_named)
        self._chunk = max(1, chunk)
        singly = self._chunk == 1 < signature.max_batch and _kept_bytes(signature) <= COPIED_AT_ONCE
        self._singly = backend if singly and isinstance(backend, RunsSingly) else None

    def run(self, works: Sequence[RequestT]) -> BatchResult:
        began = monotonic()
        timing = Timing(batch=sum(map(_images_of, works)))
        outcomes: list[Outcome] = []
        device, short = self._on_device, 0
        before = 0 if device is None else device.out_of_memory
        if len(works) > 1 and works[0].form.packed:
            for chunk in self._chunks(works):
                outcomes += self._run(chunk, len(outcomes), timing)
        elif len(works) <= self._chunk or self._chunk >= self._signature.max_batch:
            outcomes = self._run(works, 0, timing)
        elif self._singly is not None:
            outcomes = self._run_singly(self._singly, works, timing)
        else:
            for chunk in self._chunks(works):
                outcomes += self._run(chunk, len(outcomes), timing)
        if device is not None:
            short = device.out_of_memory - before
        clean = not short
        for outcome in outcomes:
            clean = clean and outcome.error is None
        return BatchResult(outcomes, monotonic() - began, timing, clean, short)

    def _chunks(self, works: Sequence[RequestT]) -> list[Sequence[RequestT]]:
        """Divides the works, since some models run a large batch faster in pieces that stay in the cache, and
        strings are passed to an engine under the interpreter lock. To its requests it is one batch."""
        chunks: list[list[RequestT]] = [[]]
        images = strings = 0
        for work in works:
            more = _strings_in(work) if work.form.packed else 0
            if chunks[-1] and (images + work.images > self._chunk or strings + more > MAX_STRINGS):
                chunks.append([])
                images = strings = 0
            chunks[-1].append(work)
            images += work.images
            strings += more
        return list(chunks)

    def _run(self, works: Sequence[RequestT], first: int, timing: Timing) -> list[Outcome]:
        """Run these together; where that fails, halve them, so that a poisoned input costs one error."""
        try:
            return self._run_together(works, first, timing)
        except CarpoolError as error:
            if len(works) == 1 or not self._backend.alive:
                return [Outcome(error=error) for _ in works]
        except Exception as fault:
            if len(works) == 1:
                return [Outcome(error=self._as_failure(fault))]
        half = len(works) // 2
        return self._run(works[:half], first, timing) + self._run(works[half:], first + half, timing)

    def _run_together(self, works: Sequence[RequestT], first: int, timing: Timing) -> list[Outcome]:
        if works[0].form.encoded:
            return self._run_encoded(works, first, timing)
        if self._answers_each is not None:
            return self._run_each(self._answers_each, works, first, timing)
        if self._runs_rows is not None:
            return self._run_rows(self._runs_rows, works, first, timing)
        start = monotonic()
        wanted = self._wanted(works)
        errors: dict[int, CarpoolError] = {}
        if self._gathers is not None:  # what it copies, and when, is its own affair and its own time
            parts = inputs_of(works, errors)
            gathered = start
            if len(errors) < len(works):
                outputs = self._gathers.run_parts(parts, [work.images for work in works], wanted)
        else:
            inputs = self._collator.gather(works, errors)
            gathered = monotonic()
            if len(errors) < len(works):
                outputs = self._backend.run(inputs, wanted)
        if len(errors) == len(works):
            return [Outcome(error=errors[index]) for index in range(len(works))]
        ran = monotonic()
        self._collator.check(outputs, wanted, sum(map(_images_of, works)))
        outcomes = self._answer(first, works, outputs, errors)
        timing.input += gathered - start
        timing.infer += ran - gathered
        timing.output += monotonic() - ran
        return outcomes

    def _run_encoded(self, works: Sequence[RequestT], first: int, timing: Timing) -> list[Outcome]:
        """Runs files, one picture each, whose mistakes are only their owners' affair; or parts of pictures
        that are on the device, of which a request has a list."""
        start = monotonic()
        wanted = self._wanted(works)
        (name,) = works[0].inputs
        pictures = [work.inputs[name] for work in works]
        if isinstance(pictures[0], list):
            pictures = [part for parts in pictures for part in parts]
        outputs, errors = cast(RunsEncoded, self._backend).run_encoded(pictures, wanted)
        ran = monotonic()
        self._collator.check(outputs, wanted, len(pictures))
        outcomes = self._answer(first, works, outputs, errors)
        timing.infer += ran - start
        timing.output += monotonic() - ran
        return outcomes

    def _run_rows(
        self, backend: RunsRows, works: Sequence[RequestT], first: int, timing: Timing
    ) -> list[Outcome]:
        """Runs rows for a model with a state. One whose inputs cannot be read is not run as zeros, which the
        state would go on from. What fails is not tried again, since the model may have changed its state."""
        start = monotonic()
        errors: dict[int, CarpoolError] = {}
        inputs = self._collator.gather(works, errors)
        if errors:
            able = [work for index, work in enumerate(works) if index not in errors]
            outcomes = self._run_rows(backend, able, first, timing) if able else []
            for index in sorted(errors):
                outcomes.insert(index, Outcome(error=errors[index]))
            return outcomes
        gathered = monotonic()
        wanted = self._wanted(works)
        try:
            outputs = backend.run_rows(inputs, _rows(works), wanted)
            ran = monotonic()
            self._collator.check(outputs, wanted, len(works))
        except CarpoolError as error:
            failure: CarpoolError = without_stack(error)
        except Exception as fault:
            failure = ModelError(f"{self._signature.model}: {type(fault).__name__}: {fault}")
        else:
            outcomes = self._answer(first, works, outputs, _NO_ERRORS)
            timing.input += gathered - start
            timing.infer += ran - gathered
            timing.output += monotonic() - ran
            return outcomes
        return [Outcome(error=failure) for _ in works]

    def _run_each(
        self,
        backend: AnswersEach | AnswersRows,
        works: Sequence[RequestT],
        first: int,
        timing: Timing,
    ) -> list[Outcome]:
        """Requests that ran together and are answered one by one, whatever the others' answers are."""
        start = monotonic()
        errors: dict[int, CarpoolError] = {}
        inputs = inputs_of(works, errors)
        able = [index for index in range(len(works)) if index not in errors]
        asked = [(inputs[index], works[index].form.wanted or self._every_output) for index in able]
        details = [works[index].extras.details for index in able]
        if isinstance(backend, AnswersEach):
            answers = backend.run_each(asked, details) if able else []
        else:
            rows = _rows([works[index] for index in able])
            answers = backend.run_row_each(asked, rows, details) if able else []
        for index in sorted(errors):
            answers.insert(index, errors[index])
        ran = monotonic()
        outcomes = self._answer_each(works, answers, first)
        timing.infer += ran - start
        timing.output += monotonic() - ran
        return outcomes

    def _run_singly(self, backend: RunsSingly, works: Sequence[RequestT], timing: Timing) -> list[Outcome]:
        """Requests that are best run one by one. All of them run before the first answer is looked at: what
        a model reads and writes pushes everything else out of the caches, and what came between two runs
        would be slow each time."""
        start = monotonic()
        wanted = self._wanted(works)
        inputs = InTurn(works)
        answers: list[Mapping[str, Array] | CarpoolError] = []
        while len(answers) + len(inputs.errors) < len(works):
            try:
                backend.run_singly(inputs, wanted, answers)
                break
            except Exception as error:
                answers.append(self._as_failure(error))
                inputs.next = len(answers) + len(inputs.errors)  # also where it had not come to the next one
        for index in sorted(inputs.errors):
            answers.insert(index, inputs.errors[index])
        ran = monotonic()
        outcomes = self._answer_each(works, answers, 0)
        timing.input += inputs.copying
        timing.infer += ran - start - inputs.copying
        timing.output += monotonic() - ran
        return outcomes

    def _answer_each(
        self, works: Sequence[RequestT], answers: Sequence[Mapping[str, Array] | CarpoolError], first: int
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for number, (work, answered) in enumerate(zip(works, answers, strict=True), start=first):
            try:
                if isinstance(answered, CarpoolError):
                    raise answered
                names = work.form.wanted or self._every_output
                owed = [name for name in names if name in answered] if work.form.may_omit else names
                self._collator.check(answered, owed, work.images, apart=True)
            except CarpoolError as error:
                outcomes.append(Outcome(error=without_stack(error)))
            else:
                outcomes += self._answer(number, [work], answered, _NO_ERRORS)
        return outcomes

    def _as_failure(self, error: Exception) -> CarpoolError:
        """A fault of ours must not take the instance down."""
        if isinstance(error, CarpoolError):
            return error
        return ModelError(f"{self._signature.model}: {type(error).__name__}: {error}")

    def _wanted(self, works: Sequence[RequestT]) -> Sequence[str]:
        if len(works) == 1:
            return works[0].form.wanted or self._every_output
        for work in works:
            if not work.form.wanted:
                return self._every_output
        names = {name for work in works for name in work.form.wanted}
        return tuple(name for name in self._every_output if name in names)
