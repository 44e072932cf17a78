"""Before a model is ready: run the batches it will run, and measure t(B) where a promise needs it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import numpy as np

from carpool.backends.backend import Backend
from carpool.config.model import ModelConfig
from carpool.core.curve import BatchCurve
from carpool.core.policy import Promise
from carpool.types import Array, Datatype, Signature

_ANY_LENGTH = 64  # stands in for a dimension that differs from request to request
_SECONDS_PER_SIZE = 0.15
_MOST_RUNS = 7
_WORTH_IT = 0.85  # a piece must be this much cheaper per image before large batches are run in pieces


def sample(signature: Signature, images: int) -> dict[str, Array]:
    """Zeros in the shape of a request."""
    inputs = {}
    for spec in signature.inputs:
        shape = tuple(_ANY_LENGTH if length < 0 else length for length in spec.shape)
        shape = (images, *shape) if signature.max_batch else shape
        if spec.datatype is Datatype.BYTES:
            inputs[spec.name] = np.full(shape, b"", dtype=object)
        else:
            inputs[spec.name] = np.zeros(shape, spec.datatype.dtype)
    return inputs


def sizes(largest: int) -> list[int]:
    """Powers of two, and the largest batch itself."""
    powers = [1 << n for n in range(largest.bit_length())]
    return sorted({*powers, largest})


def run_time(backend: Backend, signature: Signature, images: int) -> float:
    """Seconds for one batch: the shortest of a few, after one that does not count.

    The shortest, because whatever disturbs a run only makes it longer; what is usual is learned in service.
    """
    requests = sample(signature, images)
    batch = {name: array.copy() for name, array in requests.items()}
    backend.run(batch, ())
    times: list[float] = []
    began = monotonic()
    while len(times) < _MOST_RUNS and (len(times) < 2 or monotonic() - began < _SECONDS_PER_SIZE):
        start = monotonic()
        if images > 1:  # gathering is part of a batch's time; one request alone is run where it lies
            for name, array in requests.items():
                batch[name][...] = array
        backend.run(batch, ())
        times.append(monotonic() - start)
    return min(times)


def measure(
    config: ModelConfig, backend: Backend, signature: Signature, progress: Callable[[int], None]
) -> BatchCurve:
    """The curve of this instance, as far as it matters: larger batches than the promise allows do not."""
    largest = max(1, signature.max_batch)
    if config.fake is not None:
        return BatchCurve.parse(config.fake.curve, largest)
    budget = config.policy.slo if isinstance(config.policy, Promise) else float("inf")
    points: list[tuple[int, float]] = []
    for images in sizes(largest):
        progress(images)
        points.append((images, run_time(backend, signature, images)))
        if points[-1][1] > budget:
            break
    return BatchCurve.measured(points, largest)


def best_piece(curve: BatchCurve) -> int:
    """The size in which a large batch is run: the whole, unless pieces are clearly cheaper per image."""
    whole = curve.max_batch
    piece = min((size for size, _ in curve.points), key=lambda size: curve.times[size] / size)
    cheaper = curve.times[piece] / piece < _WORTH_IT * curve.times[whole] / whole
    return piece if cheaper else whole
