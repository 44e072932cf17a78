"""Defines the protocol every runtime stands behind, and what the runtimes' own files share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from carpool.config.model import DYNAMIC, ModelConfig, ModelSignature, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.errors import CarpoolError, ModelError
from carpool.types import Array


class Backend(Protocol):
    """Represents one instance of one model version.

    `run`, `close` and the rest are called from one thread at a time; only `abort` and `alive` may be used
    beside them. A backend checks neither shapes nor datatypes of what the model answers: it passes on what it
    got, and the engine, which knows what was declared, names what does not fit.
    """

    @property
    def signature(self) -> ModelSignature:
        """Returns what the model file says about its tensors; empty where it says nothing."""

    @property
    def alive(self) -> bool:
        """False once this instance can answer no more (aborted, closed, or its process died): replace it."""

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        """Runs a whole batch, with the GIL released while the model works.

        None `wanted` are all of the outputs. The arrays that come back belong to the caller. Raises
        ModelError with the cause in one sentence, or InvalidInput where a value could never be given to
        this model; both leave an instance that is `alive` ready for the next batch.
        """

    def abort(self) -> None:
        """Aborts from another thread: the batch that runs ends soon, with a ModelError, and no other will
        start."""

    def close(self) -> None:
        """Give back memory, threads and processes; more than once does no harm."""


@dataclass(frozen=True, slots=True)
class FileToKeep:
    """Describes a picture's file whose pixels, uint8 [3, h, w] on the device, are wanted for later."""

    file: Array
    keep: Callable[[Any], None]


class Cut(NamedTuple):
    """Describes a part of a picture that is on a device already."""

    pixels: Any
    left: int
    top: int
    width: int
    height: int

    @property
    def part(self) -> Any:
        """Returns a view of its pixels."""
        return self.pixels[:, self.top : self.top + self.height, self.left : self.left + self.width]


Seen: TypeAlias = "Array | FileToKeep | Cut"
"""A picture for a model's device. Those of one batch are files, kept or not, or they are all parts."""


class FillPictures(Protocol):
    """Decodes pictures into rows of a model's uint8 input, on its device."""

    def fill(self, pictures: Sequence[Seen], into: Any) -> Mapping[int, CarpoolError]:
        """Fills one row of `into` for each picture: 1-D uint8 arrays of file bytes, which may be shared
        memory, or parts of pictures.

        `into` is a uint8 tensor on the device; the work goes to its current stream, and the caller waits for
        that stream before the next `fill`. Returns by index what is wrong with those that cannot be read,
        whose rows then hold anything.
        """


Filling = Callable[[Any], FillPictures | None]
"""Takes a device; None where pictures for it are better decoded elsewhere."""


@runtime_checkable
class Gathers(Protocol):
    """Defines a backend that makes one batch of several requests itself, where its device can best read
    it."""

    def view(self, inputs: Mapping[str, Array]) -> Mapping[str, Any] | None:
        """Returns what `run_parts` takes as well, and faster, for requests that lie in the same memory again
        and again; None where that would be a copy."""

    def run_parts(
        self, parts: Sequence[Mapping[str, Any]], images: Sequence[int], wanted: Sequence[str]
    ) -> Mapping[str, Array]:
        """Does the same as `run`, for the inputs of requests that stand one behind the other, with their
        images each."""


@runtime_checkable
class RunsSingly(Protocol):
    """A backend that runs requests one after the other in one call, where that is the best way to do it."""

    def run_singly(
        self,
        requests: Iterable[Mapping[str, Array]],
        wanted: Sequence[str],
        answers: list[Mapping[str, Array] | CarpoolError],
    ) -> None:
        """Runs each request as `run` does, and asks for the next one only when the one before it has run:
        its inputs may be copied just then. Each answer is appended to `answers`, so that a caller who catches
        an error knows which request caused it. The caller may keep the arrays."""


@runtime_checkable
class AnswersEach(Protocol):
    """Defines a backend that sees requests, not rows: what is wrong with one of a batch is not the others'
    affair."""

    def run_each(
        self, requests: Sequence[tuple[Mapping[str, Array], Sequence[str]]], details: Sequence[bytes] = ()
    ) -> list[Mapping[str, Array] | CarpoolError]:
        """Returns, for the inputs and the wanted outputs of each request, its outputs, or why there are none.
        `details` are what each says of itself, its id and parameters, as JSON or nothing."""


class StatefulRow(Protocol):
    """Describes a row for a model that keeps a state from one row to the next of the same name, and which
    slot that state has in this instance. Nothing of it changes while it runs."""

    slot: int
    name: int | str
    start: bool
    end: bool


@runtime_checkable
class RunsRows(Protocol):
    """Defines a backend that gets with each row of a batch the state that it belongs to."""

    def run_rows(
        self, inputs: Mapping[str, Array], rows: Sequence[StatefulRow], wanted: Sequence[str]
    ) -> Mapping[str, Array]:
        """Does the same as `run`, for one row of each."""


@runtime_checkable
class AnswersRows(Protocol):
    """Defines the same where requests are seen: what is wrong with one of a batch is not the others'
    affair."""

    def run_row_each(
        self,
        requests: Sequence[tuple[Mapping[str, Array], Sequence[str]]],
        rows: Sequence[StatefulRow],
        details: Sequence[bytes],
    ) -> list[Mapping[str, Array] | CarpoolError]:
        """Does the same as `AnswersEach.run_each`."""


class Rider(Protocol):
    """Defines one request for a decoupled model, and the client that waits for its answers. Belongs to the
    thread of the instance."""

    @property
    def inputs(self) -> Mapping[str, Array]: ...

    @property
    def outputs(self) -> Sequence[str]:
        """Returns the names of those that are wanted."""

    @property
    def details(self) -> bytes: ...

    @property
    def wanted(self) -> bool:
        """False: the client has gone."""

    def send(self, outputs: Mapping[str, Array], *, last: bool = False) -> None:
        """One more answer; the model has said whether it is the last. Raises what is wrong with it."""

    def end(self, error: CarpoolError | None) -> None:
        """Nothing more will come, for this reason. Called once, or `run_many` raises."""


class AnswersMany(Protocol):
    """A backend of decoupled models: each request has any number of answers, and then an end."""

    @property
    def most_open(self) -> int:
        """Requests that may be under way in it at once."""

    def run_many(self, riders: Sequence[Rider], more: Callable[[], Sequence[Rider]]) -> None:
        """Sends each request its answers, until all requests have ended. `more` is called repeatedly and
        returns the requests that have arrived meanwhile: they join. Raises what ends all that are open."""


class AsksModels(Protocol):
    """Defines the way of one instance to the other models of its server. For every thread."""

    def ask(
        self,
        model: str,
        version: str,
        inputs: Mapping[str, Array],
        wanted: Sequence[str],
        timeout: float,
        answer: Callable[[Mapping[str, Array] | CarpoolError], None],
        details: bytes = b"",
    ) -> None:
        """`answer` is called once, soon after in another thread, which it must not keep. An empty `version`
        is the newest, and a `timeout` of 0 none. `details` are the id and parameters, as JSON."""

    def leave(self) -> None:
        """Notes that the instance is gone: the answers to its calls are no longer needed."""


@runtime_checkable
class OnDevice(Protocol):
    """Defines a backend with memory of its own that can run short."""

    @property
    def out_of_memory(self) -> int:
        """Returns how many batches did not fit, and were run in smaller ones or failed."""

    @property
    def notes(self) -> Sequence[str]:
        """Returns what was found and chosen when it was loaded, a sentence each."""


@dataclass(frozen=True, slots=True)
class CompiledSize:
    """Describes what became of compiling one batch size: the seconds of its device that a batch took before
    and takes now, or why it runs as it did. Without times it was compiled already."""

    size: int
    before: float = 0.0
    after: float = 0.0
    why_not: str = ""
    began: float = 0.0  # seconds since 1970
    steps: Mapping[str, float] = field(default_factory=dict)  # seconds that each took, in their order


@runtime_checkable
class Compiles(Protocol):
    """Defines a backend that can be compiled while it serves."""

    def compile(self, size: int) -> CompiledSize:
        """In a thread of its own, beside `run`; batches of this size are faster when it returns, or run as
        they did."""


@runtime_checkable
class BreaksProcess(Protocol):
    """Defines a backend whose runtime can fail so that no instance in this process works any more."""

    broken: bool


@runtime_checkable
class KeepsMemory(Protocol):
    """Defines a backend that keeps the memory of its largest batch, so that the next one finds it."""

    def give_back(self) -> None:
        """Frees what no run uses now. Any thread may call it, also while batches run."""


class RunsEncoded(Protocol):
    def run_encoded(
        self, pictures: Sequence[Seen], wanted: Sequence[str]
    ) -> tuple[Mapping[str, Array], Mapping[int, CarpoolError]]:
        """Does the same as `run`, for a batch of pictures' files or of parts; and returns by index what is
        wrong with those that cannot be read, whose rows of the outputs then hold anything."""


class Finish(Protocol):
    """Makes further outputs of a batch's outputs, on the device and within its graph."""

    @property
    def adds(self) -> Sequence[str]: ...

    def __call__(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns all of the outputs, by name, on the device."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Describes where one instance goes: its number within the version, its GPU if any, and its share of the
    cores.

    With `fill`, an instance on a device that it suits also takes encoded pictures; `finish` is run after the
    model, and what it adds is declared among the model's outputs. `tell` receives the progress of a long load
    as text. `hurry` skips what only makes the instance faster: a caller waits, and a full load follows.
    `plain` skips the compiler alone, which takes most of the time. With `calls`, its model may call others.
    """

    instance: int = 0
    threads: int | None = None
    gpu: int | None = None
    fill: Filling | None = None
    finish: Finish | None = None
    tell: Callable[[str], None] = lambda _: None
    hurry: bool = False
    plain: bool = False
    calls: AsksModels | None = None


@runtime_checkable
class RunsAnywhere(Protocol):
    """Defines a backend that computes, and waits for nothing else, in whichever thread calls `run`."""

    in_any_thread: bool  # False: not this instance


@runtime_checkable
class SharesDevice(Protocol):
    device: str  # its name; empty: it shares none


@runtime_checkable
class SharesWeights(Protocol):
    def weights(self) -> object:
        """Returns what further instances share with it; it stays in memory while a reference to it exists."""


class Loader(Protocol):
    """Defines the two functions that each runtime's file offers. One that fills in the settings itself also
    has `describe(config, version)`, and one that chooses among GPUs `devices` and `device_names(config)`."""

    def load(self, config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend: ...

    def read_signature(self, config: ModelConfig, version: ModelVersion) -> ModelSignature: ...


def check_wanted(model: str, wanted: Sequence[str], known: Collection[str]) -> Sequence[str]:
    """The outputs to answer: those asked for, which the model must have, or all of them."""
    for name in wanted:
        if name not in known:
            raise ModelError(f"{model} has no output {name!r}; it has {', '.join(known) or 'none'}")
    return wanted or tuple(known)


def listed_gpus(config: ModelConfig) -> tuple[int, ...]:
    """Returns the GPUs that the settings name, else the first: for runtimes that do not report how many
    there are."""
    return tuple(sorted({gpu for group in config.instances for gpu in group.gpus})) or (0,)


def aborted(model: str) -> ModelError:
    return ModelError(f"{model}: the batch was stopped before it ended", reason="aborted")


# ---- `reshape` in the settings: clients and the model see the same elements in different shapes

Shape = tuple[int, ...]


def reshaped(backend: Backend, config: ModelConfig) -> Backend:
    """Returns the same instance for those who speak in `dims`; the very one where no tensor has another
    shape."""
    tensors = (*config.inputs, *config.outputs)
    if all(t.reshape is None for t in tensors):
        return backend
    return ReshapingEach(backend, config) if isinstance(backend, AnswersEach) else Reshaping(backend, config)


class Around:
    """Wraps a backend, and hands all but the running to it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def signature(self) -> ModelSignature:
        return self._backend.signature

    @property
    def alive(self) -> bool:
        return self._backend.alive

    def abort(self) -> None:
        self._backend.abort()

    def give_back(self) -> None:
        if isinstance(self._backend, KeepsMemory):
            self._backend.give_back()

    def close(self) -> None:
        self._backend.close()


class Padded(Around):
    """Fills smaller batches up to the rows that the model's file insists on, with the last row again."""

    def __init__(self, backend: Backend, rows: int) -> None:
        super().__init__(backend)
        self._rows = rows
        self.in_any_thread: bool = getattr(backend, "in_any_thread", False)
        self.device: str = getattr(backend, "device", "")  # that it shares with other models

    @property
    def signature(self) -> ModelSignature:
        return self._backend.signature.with_any_rows(self._rows)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        rows = len(next(iter(inputs.values()))) if inputs else self._rows
        missing = max(0, self._rows - rows)
        full = {name: np.concatenate((one, np.repeat(one[-1:], missing, 0))) for name, one in inputs.items()}
        outputs = self._backend.run(full if missing else inputs, wanted)
        return {name: array[:rows] for name, array in outputs.items()}


class Reshaping(Around):
    def __init__(self, backend: Backend, config: ModelConfig) -> None:
        super().__init__(backend)
        self._batched = int(bool(config.max_batch))
        self._inputs = _shapes(config.inputs)
        self._outputs = {name: (model, dims) for name, (dims, model) in _shapes(config.outputs).items()}

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        return self._told(self._backend.run(self._given(inputs), wanted))

    def _given(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: self._changed(array, self._inputs.get(name)) for name, array in inputs.items()}

    def _told(self, answered: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: self._changed(array, self._outputs.get(name)) for name, array in answered.items()}

    def _changed(self, array: Array, shapes: tuple[Shape, Shape] | None) -> Array:
        """What does not have the shape that it should is left alone: the engine says so."""
        if shapes is None:
            return array
        before, after = shapes
        batch, rest = array.shape[: self._batched], array.shape[self._batched :]
        if len(rest) != len(before) or any(
            want not in (DYNAMIC, got) for want, got in zip(before, rest, strict=True)
        ):
            return array
        # As in Triton: the lengths that vary keep their order.
        lengths = iter(got for want, got in zip(before, rest, strict=True) if want == DYNAMIC)
        return array.reshape(batch + tuple(next(lengths) if dim == DYNAMIC else dim for dim in after))


class ReshapingEach(Reshaping):
    def run_each(
        self, requests: Sequence[tuple[Mapping[str, Array], Sequence[str]]], details: Sequence[bytes] = ()
    ) -> list[Mapping[str, Array] | CarpoolError]:
        given = [(self._given(inputs), wanted) for inputs, wanted in requests]
        answers = cast(AnswersEach, self._backend).run_each(given, details)
        return [one if isinstance(one, CarpoolError) else self._told(one) for one in answers]


def _shapes(tensors: Sequence[TensorConfig]) -> dict[str, tuple[Shape, Shape]]:
    return {t.name: (t.dims, t.reshape) for t in tensors if t.reshape is not None}


# ---- pictures decoded on a device: what its decoder has to know of the input and of one picture


class PlacedRectangle(NamedTuple):
    """A rectangle of the picture fills one of the input, its pixels mixed by `kernel`."""

    left: int
    top: int
    width: int
    height: int
    into_left: int
    into_top: int
    into_width: int
    into_height: int
    kernel: str  # area, bilinear or bicubic


Place: TypeAlias = Callable[[int, int], PlacedRectangle]
"""Takes the width and height of a picture."""

Decode: TypeAlias = Callable[[Array], Array]
"""A file's bytes to upright RGB pixels [h, w, 3], on the CPU; raises what is wrong with the file."""


@dataclass(frozen=True, slots=True)
class PictureForm:
    """Describes the input as a picture of three channels."""

    height: int
    width: int
    planar: bool  # [3, h, w], else [h, w, 3]
    bgr: bool = False
    pad: int = 114  # what is left free
