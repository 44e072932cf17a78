"""A backend that takes the time its script says, on a clock that only it moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from carpool.config.model import ModelSignature
from carpool.errors import ModelError
from carpool.types import Array, Datatype, Signature, TensorSpec

SIGNATURE = Signature(
    "m", (TensorSpec("x", Datatype.FP32, (2,)),), (TensorSpec("y", Datatype.FP32, (2,)),), 32
)


class Clock(threading.local):
    """Each thread has its own time, so that instances which run at once do not add up."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(eq=False)
class Timed:
    """`takes(images, run)` is the time of the run of this number, from 0."""

    clock: Clock
    takes: Callable[[int, int], float]
    fails: bool = False
    signature: ModelSignature = field(default_factory=ModelSignature)
    alive: bool = True
    closed: bool = False
    sizes: list[int] = field(default_factory=list)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        x = inputs["x"]
        if self.fails:
            raise ModelError("m: it does not take zeros")
        self.clock.seconds += self.takes(len(x), len(self.sizes))
        self.sizes.append(len(x))
        return {"y": np.zeros_like(x)}

    def abort(self) -> None:
        self.alive = False

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.alive = False
