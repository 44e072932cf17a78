"""Decides whether two answers of a model are the same: those of two forms of a network, of two runtimes, or
of a batch and of the requests in it."""

from __future__ import annotations

from math import inf

import numpy as np

from carpool.types import Array


def how_far(right: Array, found: Array) -> float:
    """Returns the distance of `found` from `right`; 0: they are equal.

    Fractions: the size of their difference, divided by the size of `right`. All others: the share of
    elements that differ. Infinity, where shapes or datatypes differ, or the places of NaN and infinities.
    """
    if right.shape != found.shape or right.dtype != found.dtype:
        return inf
    if not right.size:
        return 0.0
    if right.dtype.kind != "f":
        return float(np.mean(right != found))
    finite = np.isfinite(right)
    if not np.array_equal(finite, np.isfinite(found)):
        return inf
    before, after = right[finite].astype(np.float64), found[finite].astype(np.float64)
    off = float(np.linalg.norm(after - before))
    return off / max(float(np.linalg.norm(before)), 1e-12) if off else 0.0
