"""Shares that are watched: told once when they moved, and once when they are back."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from carpool.extensions.cascades.cascade_shares import Moved, ShareWatch


def told(watch: ShareWatch, share: float, times: int, random: Random) -> list[Moved]:
    found = [watch.seen(random.random() < share) for _ in range(times)]
    return [one for one in found if one is not None]


def test_a_share_that_moved_is_told_once_and_so_is_its_return() -> None:
    watch, random = ShareWatch(500), Random(1)
    assert told(watch, 0.9, 5000, random) == []
    (moved,) = told(watch, 0.6, 5000, random)
    assert (round(moved.before, 1), round(moved.now, 1), moved.over) == (0.9, 0.6, False)
    (back,) = told(watch, 0.9, 5000, random)
    assert back.over


@given(st.integers(0, 2**32), st.floats(0.01, 0.99))
def test_what_stays_as_it_was_is_hardly_ever_told(seed: int, share: float) -> None:
    """Ten windows of each: the intervals are those of one in a thousand, on both sides."""
    assert len(told(ShareWatch(200), share, 2000, Random(seed))) <= 2
