"""What batches take beside a model's weights, as the kernel counts it, and how it is given back.

A runtime keeps the memory of its batches for the next ones. That is worth its while in service: a batch whose
pages are all new takes up to 1.4 times as long. It is not after measuring, which runs larger batches than
service does, nor while no requests come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from carpool.backends.backend import Backend, KeepsMemory
from carpool.engine.profile.measuring import Measuring
from carpool.memory.free_memory import give_back, own_bytes

MUCH_MEMORY = 32 << 20
"""Bytes; less is not worth running batches in pieces, nor giving it back."""
REST_S = 5.0
"""After so long without a batch, a model gives back what its batches took."""


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Counts the bytes while all instances run at once; none where the runtime keeps its memory to itself."""

    measuring: int = 0  # what it held after every size was measured
    service: int = 0  # what batches take in the size in which they are run


def give_back_all(instances: Iterable[object]) -> None:
    """Gives back what these keep of the memory of their batches, and what the C library keeps of that."""
    for instance in instances:
        if isinstance(instance, KeepsMemory):
            instance.give_back()
    give_back()


def kept_bytes(instances: Sequence[Backend]) -> int:
    """Returns what they keep, which they give back by this. All of the process is looked at: what another
    model loads in this moment is counted as well."""
    give_back()
    before = own_bytes()
    give_back_all(instances)
    return max(0, before - own_bytes())


def batch_bytes(measuring: Measuring, images: int) -> int:
    """Returns what a batch takes on every instance at once. One instance runs alone: whether all of them
    would need their memory at the same moment is chance."""
    instances = measuring.backends
    give_back_all(instances)
    before = own_bytes()
    replace(measuring, backends=instances[:1]).once(images)
    return len(instances) * max(0, own_bytes() - before)
