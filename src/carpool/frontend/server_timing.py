"""Where a request's time went, in the words and units of `Server-Timing`: the same over every protocol."""

from __future__ import annotations

from typing import NamedTuple

from carpool.types import Timing


class Times(NamedTuple):
    """Milliseconds, and the number of images in the batch."""

    decode: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    post: float = 0.0
    batch: int = 0


def times_of(timing: Timing, before: float, after: float) -> Times:
    """`before` and `after` are the front end's own seconds, around the engine's."""
    return Times(
        (before + timing.input) * 1e3,
        timing.queue * 1e3,
        timing.infer * 1e3,
        (after + timing.output) * 1e3,
        timing.batch,
    )
