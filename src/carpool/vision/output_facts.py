"""Describes what is known of a model before its task is: what its metadata claims, and its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.config.model import DYNAMIC
from carpool.types import Array, TensorSpec
from carpool.vision.picture_input import FLOATS

FIELD_OF = "preprocessor_config."
"""What names of fields of preprocessor_config.json begin with, among doubts."""


@dataclass(frozen=True, slots=True)
class Claims:
    source: str = ""  # what wrote it; empty: unknown
    task: str | None = None
    labels: tuple[str, ...] = ()
    size: tuple[int, int] | None = None  # height, width
    image: Mapping[str, Any] = field(default_factory=dict)  # fields of ImageSettings
    activation: str | None = None
    keypoints: tuple[int, int] | None = None
    form: str = ""  # what the writer calls the task, where ours is wider
    unread: str = ""  # what it says that the model is for, where no task of ours is that
    lines: tuple[str, ...] = ()  # what was found, in words
    layers: Mapping[str, Any] | None = None  # the values that the file's own first layers take
    doubts: tuple[str, ...] = ()  # settings of [image] that it leaves open, or contradicts itself about
    channels: int | None = None  # of the picture, where the input's shape leaves that open


NO_CLAIMS = Claims()


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
