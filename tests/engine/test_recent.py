"""The batches of the last seconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.observe.statistics import RECENT_S, RecentBatches

RUNS = st.lists(
    st.tuples(st.integers(1, 8), st.floats(0.001, 1), st.floats(0, 3 * RECENT_S)),
    max_size=60,
)


def test_sizes_are_counted_and_averaged() -> None:
    recent = RecentBatches()
    recent.add(4, 0.010, 100.1)
    recent.add(4, 0.020, 101.7)
    recent.add(1, 0.005, 101.9)
    assert recent.sizes(102.0) == [(1, 1, 0.005), (4, 2, 0.015)]


def test_the_past_is_forgotten_also_when_nothing_comes_after_it() -> None:
    recent = RecentBatches()
    recent.add(4, 0.010, 100.1)
    assert len(recent.sizes(100.1 + RECENT_S - 1)) == 1
    assert recent.sizes(100.1 + RECENT_S) == []


@given(RUNS)
def test_it_counts_what_ran_in_the_window_and_nothing_older(runs: list[tuple[int, float, float]]) -> None:
    recent = RecentBatches()
    runs.sort(key=lambda run: run[2])
    for images, seconds, at in runs:
        recent.add(images, seconds, at)
    now = runs[-1][2] if runs else 0.0
    counted = sum(size.batches for size in recent.sizes(now))
    assert counted >= sum(at > now - RECENT_S + 1 for _, _, at in runs)
    assert counted <= sum(at > now - RECENT_S - 1 for _, _, at in runs)
