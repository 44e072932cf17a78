"""What a load generator reports of one bounded burst, whichever it was."""

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class LoadError(Exception):
    """The load generator is missing or could not finish."""


@dataclass(frozen=True, slots=True)
class Burst:
    """What it saw: answers, how long they took, and everything that was not a good answer."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failures: Mapping[str, int]
    cpu_seconds: float

    @property
    def rps(self) -> float:
        return self.requests / self.seconds


Fire = Callable[[int, float], Burst]
"""Keeps so many requests in flight for so many seconds."""


def children_cpu() -> float:
    """CPU of the children that have ended; servers still run, so a difference is the generator's alone."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
