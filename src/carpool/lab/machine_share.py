"""Computes what a replica shares with its own decoding and protocol: cores, and what batches lose by it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from carpool.core.curve import BatchCurve, slo_capacity

_ENGINE_MB = 200.0  # with the supervisor, before any model is loaded
_FRONT_END_MB = 80.0
_HELD_MB = 537.0  # what clients can make all front ends hold together: `max_held_bytes`
_SURE = 1e-4  # of the capacity: bisected no further


@dataclass(frozen=True, slots=True)
class Machine:
    """Represents one replica's part of a machine. `decode` and `protocol` are seconds of one core for each
    image, and `instances` so many run side by side, whose batch times are those while all of them are busy.

    Decoding, front ends and engine are many short pieces of work, to which an operating system gives a core
    before it gives it back to the threads of a model. So they are served, and batches take longer: a model on
    a GPU hardly needs the cores, one on the CPU needs all of them.
    """

    cores: float = inf
    infer_cores: float = 0.0  # that batches keep busy while they run, one on each instance
    decode: float = 0.0
    protocol: float = 0.0
    instances: int = 1

    @property
    def beside(self) -> float:
        """Returns seconds of a core that an image takes beside its batch."""
        return self.decode + self.protocol

    def stretch(self, rate: float) -> float:
        """Returns how much longer batches take at this rate; infinite where nothing is left for them."""
        left = self.cores - rate * self.beside
        if left <= 0:
            return inf
        return max(1.0, self.infer_cores / left)

    def outside(self, rate: float) -> float:
        """Returns seconds that a client waits for its own decoding and protocol. Where more threads want to
        run than there are cores, each gets its part of them."""
        wanted = self.infer_cores + 1.0 + rate * self.beside
        return self.beside * max(1.0, wanted / self.cores)

    def curve(self, alone: BatchCurve, rate: float) -> BatchCurve:
        """Batch times at this rate, from those of a model that had the cores for itself."""
        factor = self.stretch(rate)
        if factor == 1.0:
            return alone
        points = [(size, seconds * factor) for size, seconds in alone.points]
        return BatchCurve(points, alone.max_batch, alone.buckets)

    def capacity(self, alone: BatchCurve, slo: float) -> float:
        """Returns images per second that one replica can promise: what the batches carry at the very rate
        whose decoding and protocol they are slowed down by."""
        low, high = 0.0, slo_capacity(alone, slo, self.instances)
        if self.carries(alone, slo, high):
            return high
        while high - low > _SURE * high:
            rate = (low + high) / 2
            low, high = (rate, high) if self.carries(alone, slo, rate) else (low, rate)
        return low

    def carries(self, alone: BatchCurve, slo: float, rate: float) -> bool:
        if self.stretch(rate) == inf:
            return False
        left = slo - self.outside(rate)
        return left > 0 and slo_capacity(self.curve(alone, rate), left, self.instances) >= rate


UNSHARED = Machine()
"""Cores enough for everything: only the batches take time."""


def replica_memory_mb(models_mb: float, front_ends: int = 2) -> float:
    """Megabytes to give to a server whose models take so many, weights and batches, as `carpool profile` says
    of each: its processes and what clients can make it hold are added. It is meant as a container's limit."""
    return models_mb + _ENGINE_MB + _FRONT_END_MB * (front_ends + 1) + _HELD_MB  # one more is for gRPC
