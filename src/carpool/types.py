"""The messages every part of Carpool passes on: tensors, what a model takes and gives, requests, answers."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Scalar: TypeAlias = bool | int | float | str

MAX_ASKED_CLASSES = 1000
"""Classes of an output that a request may ask for; as many as there are labels, where those are more."""

LIGHTEST, HEAVIEST = 0.01, 1000.0
"""Weights of keys, where a device is divided between their holders."""


class Datatype(enum.Enum):
    """Protocol v2 datatypes: `dtype` is how numpy holds an element, `size` its bytes on the wire or 0."""

    dtype: np.dtype[Any]
    size: int

    BOOL = "BOOL", "?"
    UINT8 = "UINT8", "<u1"
    UINT16 = "UINT16", "<u2"
    UINT32 = "UINT32", "<u4"
    UINT64 = "UINT64", "<u8"
    INT8 = "INT8", "<i1"
    INT16 = "INT16", "<i2"
    INT32 = "INT32", "<i4"
    INT64 = "INT64", "<i8"
    FP16 = "FP16", "<f2"
    FP32 = "FP32", "<f4"
    FP64 = "FP64", "<f8"
    BF16 = "BF16", "<u2"  # numpy has no bfloat16: its 16 bits are carried as they are
    BYTES = "BYTES", "O"  # an object array of bytes

    def __new__(cls, wire_name: str, dtype: str) -> Datatype:
        member = object.__new__(cls)
        member._value_ = wire_name
        member.dtype = np.dtype(dtype)
        member.size = 0 if dtype == "O" else member.dtype.itemsize
        return member

    __hash__ = object.__hash__  # members are one of a kind: Enum's own is a call in Python

    @property
    def binary_only(self) -> bool:
        """JSON has no form for these."""
        return self is Datatype.FP16 or self is Datatype.BF16


DATATYPES: Mapping[str, Datatype] = {datatype.value: datatype for datatype in Datatype}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model: the shape is without the batch dimension, -1 is any length."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False  # an input that requests may leave out

    def full_shape(self, max_batch: int) -> tuple[int, ...]:
        """Returns the shape that clients are sent, which starts with -1 when the model takes batches."""
        return (-1, *self.shape) if max_batch else self.shape


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """Describes what a model takes and gives. `max_batch` 0 means that it has no batch dimension."""

    model: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int = 0
    told: bool = False  # the model hears the id and the parameters of each request
    classes: int = MAX_ASKED_CLASSES  # of an output, which a request may ask for
    unbatched: str = ""  # why its requests never share a batch, where no setting says so
    input_named: Mapping[str, TensorSpec] = field(init=False, repr=False)
    output_named: Mapping[str, TensorSpec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_named", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_named", {spec.name: spec for spec in self.outputs})

    def why_unbatched(self) -> str:
        """Why requests of this model never share a batch; empty where they can."""
        if self.unbatched:
            return f"{self.unbatched}, so each request runs alone"
        firsts = {spec.shape[0] for spec in self.inputs if spec.shape}
        if self.max_batch > 1 or not firsts:
            return ""
        if self.max_batch == 1 or -1 in firsts:
            return f"its settings say max_batch = {self.max_batch}, so requests cannot be batched"
        fixed = firsts == {1} and all(len(spec.shape) > 1 for spec in self.inputs)
        if not fixed:
            return "its tensors have no batch dimension, so requests cannot be batched"
        return (
            "the file fixes the batch to 1, so requests cannot be batched; export with a dynamic "
            "first dimension"
        )

    def is_like(self, other: Signature) -> bool:
        """Returns whether a request that was checked against one fits the other as well."""
        mine = (self.inputs, self.outputs, self.max_batch)
        return mine == (other.inputs, other.outputs, other.max_batch)


@dataclass(slots=True)
class Tensor:
    """A named array; `data` has exactly this shape and the datatype's numpy dtype."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: Array


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Describes where a tensor lies in a region the client registered."""

    region: str
    byte_size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """Describes one output the client asked for, and in which form."""

    name: str
    binary: bool = False
    classification: int = 0  # above 0: the best k classes as strings instead of the values
    shared_memory: SharedMemory | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Holds a request's parameters. `timeout` is in seconds; `custom` holds what Carpool has no meaning
    for."""

    priority: int = 0  # 0 is the model's default, 1 the highest
    timeout: float | None = None
    source: str = ""
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    custom: Mapping[str, Scalar] = field(default_factory=dict)
    latest: bool = False  # a newer frame of the source takes its place while it waits


@dataclass(slots=True)
class InferRequest:
    """One inference: empty `version` is the newest, empty `outputs` are all of them."""

    model: str
    inputs: list[Tensor]
    version: str = ""
    id: str = ""
    outputs: Sequence[RequestedOutput] = ()
    options: RequestOptions = field(default_factory=RequestOptions)
    binary_output: bool = False
    batch: int = 1


@dataclass(slots=True)
class InferResponse:
    """Represents the answer to one inference."""

    model: str
    outputs: list[Tensor]
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(slots=True, unsafe_hash=True)
class Timing:
    """Records where the time went, in seconds. `batch` is the number of images it rode with."""

    queue: float = 0.0
    input: float = 0.0
    infer: float = 0.0
    output: float = 0.0
    batch: int = 0
    number: int = field(default=0, kw_only=True)  # of that batch, among all of the server; 0: none


@dataclass(slots=True, unsafe_hash=True)
class PartTiming(Timing):
    """Records the time of a step that was asked about so many parts of a picture, and how long it took to cut
    them out."""

    images: int = 0
    cut: float = 0.0


@dataclass(slots=True, unsafe_hash=True)
class StepTiming(Timing):
    """Records the times of a request that went through several models: the sums, and each model's own by its
    name."""

    steps: tuple[tuple[str, Timing], ...] = ()

    @classmethod
    def of(cls, steps: Iterable[tuple[str, Timing]]) -> StepTiming:
        listed = tuple(steps)
        whole = cls(steps=listed)
        for _, timing in listed:
            whole.queue += timing.queue
            whole.input += timing.input
            whole.infer += timing.infer
            whole.output += timing.output
            whole.batch = max(whole.batch, timing.batch)
        return whole
