"""When a client that was refused may come back: the same advice over HTTP and gRPC."""

from __future__ import annotations

import math

from carpool.errors import CarpoolError, Refused, Unavailable

_LONGEST_WAIT_S = 3600


def retry_after(error: CarpoolError) -> int | None:
    """Whole seconds, or None where trying again would not help."""
    if isinstance(error, Refused) and error.retry_after_s is not None:
        return _whole_seconds(error.retry_after_s)
    return 1 if isinstance(error, Unavailable) else None


def _whole_seconds(seconds: float) -> int:
    if not math.isfinite(seconds):
        return 1
    return min(max(1, math.ceil(seconds)), _LONGEST_WAIT_S)
