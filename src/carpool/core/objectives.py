"""What a model is to do about time: promise a latency, or use fixed batching settings, as Triton does.

Plain settings, never compiled: they are read from JSON by the types that they declare, of which a compiled
class keeps half.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Promise:
    """Answer every accepted request within `slo` seconds; refuse early what cannot make it."""

    slo: float
    max_batch: int
    max_queue: int = 4096  # images; a bound on memory, far above what the gate lets wait


class TimeoutAction(enum.Enum):
    """Defines what happens to a request that waited longer than its queue timeout."""

    REJECT = "reject"
    DELAY = "delay"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Implements Triton's ModelQueuePolicy, for one priority level."""

    max_size: int = 0  # requests waiting; 0 is no limit
    timeout: float = 0.0  # seconds a request may wait; 0 is no limit
    allow_override: bool = False  # a request may ask for a shorter timeout, never for a longer one
    action: TimeoutAction = TimeoutAction.REJECT


@dataclass(frozen=True, slots=True)
class FixedBatching:
    """Triton's dynamic_batching, with Triton's meaning; the defaults batch whatever waits, at once."""

    max_batch: int
    preferred: tuple[int, ...] = ()
    max_delay: float = 0.0  # seconds, counted from the arrival of the oldest request in the batch
    priority_levels: int = 0  # 1 is the most urgent; 0 levels means that priorities are ignored
    default_priority: int = 0
    limits: QueueLimits = QueueLimits()
    level_limits: Mapping[int, QueueLimits] = field(default_factory=dict)
    preserve_ordering: bool = False
    across_shapes: bool = False  # gather one shape past the others; Triton closes the batch at another shape
    max_queue: int = 65536  # requests; a bound on memory where no queue size was asked for
