"""One inference inside the engine: what it takes, checked against its model, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from carpool.config.model import ModelConfig, TensorConfig
from carpool.core.job import INFINITY, Job
from carpool.errors import CarpoolError, InvalidInput
from carpool.link.request_place import RequestPlace
from carpool.types import DATATYPES, Array, Datatype, Signature, TensorSpec, Timing

_UNTIMED = Timing()  # shared: a timing is replaced by the next owner's, not changed


@dataclass(slots=True)
class Outcome:
    """Either outputs by name, in the order asked for, or an error."""

    outputs: Mapping[str, Array] | None = None
    error: CarpoolError | None = None
    timing: Timing = _UNTIMED


class Route(Protocol):
    """Called on the loop's thread. `done` of every work is called once, whatever happens."""

    def submit(self, works: Sequence[Work]) -> None:
        """What came at once."""

    def ready(self, work: Work) -> None:
        """The inputs of a work that was submitted before them (`ready_at`) are there."""

    def cancel(self, work: Work) -> None:
        """Nobody waits for it any more."""


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

    __slots__ = ("done", "encoded", "held", "inputs", "place", "route", "sent", "wanted")

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
        self.route: Route | None = None  # who has it
        self.held: Outcome | None = None  # an answer that waits for earlier ones


def signature_of(config: ModelConfig) -> Signature:
    """What the engine checks requests against; the settings are complete."""

    def specs(tensors: Sequence[TensorConfig]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t.name, DATATYPES[t.datatype], t.dims, t.optional) for t in tensors)

    return Signature(config.name, specs(config.inputs), specs(config.outputs), config.max_batch or 0)


def shape_key(signature: Signature, arrays: Mapping[str, Array]) -> tuple[Any, ...] | None:
    """What must be equal to share a batch: only what may vary in shape, or be left out, can differ."""
    varying = [spec.name for spec in signature.inputs if spec.optional or -1 in spec.shape]
    if not varying:
        return None
    return tuple(arrays[name].shape[1:] if name in arrays else None for name in varying)


def only_input(signature: Signature) -> TensorSpec:
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise InvalidInput(f"{signature.model} has several inputs ({names}): give them by name")
    return signature.inputs[0]


def check_inputs(signature: Signature, given: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
    """Arrays with their batch dimension, and whether we added it."""
    for name in given:
        if name not in signature.input_named:
            raise InvalidInput(f"{signature.model} has no input {name!r}", field=name)
    arrays: dict[str, Array] = {}
    added = set()
    for spec in signature.inputs:
        if spec.name not in given and spec.optional:
            continue
        if spec.name not in given:
            raise InvalidInput(f"{signature.model} needs the input {spec.name!r}", field=spec.name)
        array = np.asarray(given[spec.name])
        _check_datatype(spec, array)
        alone = bool(signature.max_batch) and array.ndim == len(spec.shape)
        added.add(alone)
        arrays[spec.name] = array[np.newaxis] if alone else array
        _check_shape(spec, arrays[spec.name], signature)
    if not arrays and signature.max_batch:
        raise InvalidInput(f"{signature.model} needs one of its inputs at least")
    if len({len(array) for array in arrays.values()} if signature.max_batch else {1}) > 1 or len(added) > 1:
        raise InvalidInput(f"the inputs of {signature.model} hold different numbers of images")
    return arrays, added == {True}


def _check_datatype(spec: TensorSpec, array: Array) -> None:
    if array.dtype != spec.datatype.dtype:
        hint = " (an array of bytes objects)" if spec.datatype is Datatype.BYTES else ""
        raise InvalidInput(
            f"input {spec.name!r} must be {spec.datatype.value}{hint}, not {array.dtype}", field=spec.name
        )


def _check_shape(spec: TensorSpec, array: Array, signature: Signature) -> None:
    expected = spec.full_shape(signature.max_batch)
    if array.ndim != len(expected) or any(
        want not in (-1, got) for want, got in zip(expected, array.shape, strict=True)
    ):
        raise InvalidInput(
            f"input {spec.name!r} must have the shape {list(expected)}, not {list(array.shape)}",
            field=spec.name,
        )
    if signature.max_batch and not 1 <= len(array) <= signature.max_batch:
        raise InvalidInput(
            f"{signature.model} takes 1 to {signature.max_batch} images at once, not {len(array)}",
            field=spec.name,
        )
