"""A clock of the day that goes on evenly, whatever happens to the machine's."""

from __future__ import annotations

import time
from collections.abc import Callable


def steady_time(
    wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Returns a clock that agrees with the machine's now. That one may be set later, by years on a machine
    that boots without the time: what lies between two moments is then only what has passed."""
    ahead = wall() - monotonic()
    return lambda: ahead + monotonic()
