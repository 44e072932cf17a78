"""Describes what is known of a model's outputs before its task is known: shapes, a dry run, metadata."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.model import DYNAMIC
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.claims import NO_CLAIMS, Claims

FLOATS = (Datatype.FP32, Datatype.FP16, Datatype.FP64, Datatype.BF16)


@dataclass(frozen=True, slots=True, eq=False)
class OutputFact:
    """`sample` is what a dry run answered for one picture; without one, -1 stands where a length varies."""

    spec: TensorSpec  # without the batch
    sample: Array | None = None
    loud: Array | None = (
        None  # the same for a picture with far larger values: what ends in a sigmoid stays small
    )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape if self.sample is None else self.sample.shape

    def called(self, *words: str) -> bool:
        return any(word in self.spec.name.lower() for word in words)

    def __str__(self) -> str:
        return f'"{self.spec.name}" {list(self.shape)}'


@dataclass(frozen=True, slots=True)
class Facts:
    """`task` and `form` are what the settings say: readings then need not be certain, only possible."""

    height: int  # of the picture in the model's input; -1 where it is not declared
    width: int
    planar: bool
    outputs: tuple[OutputFact, ...]
    labels: tuple[str, ...] = ()
    claims: Claims = NO_CLAIMS
    task: str | None = None
    form: str | None = None

    @property
    def insist(self) -> bool:
        return self.task is not None

    def floats(self, *ranks: int) -> list[OutputFact]:
        """Returns outputs of so many dimensions. A length that is not known fits nothing, unless the task is
        set."""
        return [
            one
            for rank in ranks
            for one in self.outputs
            if len(one.shape) == rank
            and one.spec.datatype in FLOATS
            and (self.insist or DYNAMIC not in one.shape)
        ]

    def in_words(self) -> str:
        return ", ".join(map(str, self.outputs)) or "none"
