"""The best that somebody who knows the future could do with one noise-free instance."""

from __future__ import annotations

import numpy as np

from carpool.core.curve import BatchCurve


def most_answered_in_time(arrivals: list[float], curve: BatchCurve, slo: float) -> int:
    """Dynamic programme: after the first i jobs with k served, the earliest that the instance can be free.

    Deadlines come in order of arrival, so some optimal plan runs consecutive jobs in each batch.
    """
    count = len(arrivals)
    free = [np.full(count + 1, np.inf) for _ in range(count + 1)]
    free[0][0] = 0.0
    for i in range(count):
        here = free[i][: i + 1]
        np.minimum(free[i + 1][: i + 1], here, out=free[i + 1][: i + 1])
        deadline = arrivals[i] + slo
        for size in range(1, min(curve.max_batch, count - i) + 1):
            seconds = curve.times[size]
            last = arrivals[i + size - 1]
            if last + seconds > deadline:
                break
            ends = np.maximum(here, last) + seconds
            ends[ends > deadline] = np.inf
            target = free[i + size][size : size + i + 1]
            np.minimum(target, ends, out=target)
    return int(np.flatnonzero(np.isfinite(free[count]))[-1])
