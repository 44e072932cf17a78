"""The shared table: exact sums, no lost counts over deaths and reuse."""

from __future__ import annotations

import multiprocessing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.observe import columns
from carpool.observe.columns import (
    BATCH_SIZE,
    BYTES_SENT,
    CONNECTIONS,
    FAILURES,
    INFER_SECONDS,
    LAST_INFERENCE_MS,
    PENDING,
    QUEUE_SECONDS,
    REQUEST_SECONDS,
    SATURATION,
)
from carpool.observe.counters import CounterRow, Table, table_bytes
from observe.counting import count_in_child, shared

REJECTED = FAILURES["REJECTED"]


@pytest.fixture
def table() -> Table:
    return Table(bytearray(table_bytes(3)))


def test_columns_do_not_overlap() -> None:
    taken: list[int] = []
    for value in vars(columns).values():
        if isinstance(value, columns.HistogramColumns):
            assert value.sum == value.first + len(value.bounds) + 1
            taken += range(value.first, value.sum + 1)
            assert all(low < high for low, high in pairwise(value.bounds))
    for group in (columns.FAILURES, columns.SHED, columns.RESTARTS):
        taken += group.values()
    assert len(taken) == len(set(taken))
    assert max(taken) < columns.WIDTH


def test_blocks_are_summed(table: Table) -> None:
    for index in range(3):
        table.block(index).server.add(BYTES_SENT, 10.0 + index)
    assert table.server()[BYTES_SENT] == 33.0


def test_gauges_are_summed_or_the_largest_counts(table: Table) -> None:
    slot = table.directory.assign("m", "1")
    for index, (pending, saturation) in enumerate([(3, 0.2), (4, 0.9)]):
        row = table.block(index).row(slot)
        row.set(PENDING, pending)
        row.set(SATURATION, saturation)
    cells = table.cells(slot)
    assert (cells[PENDING], cells[SATURATION]) == (7.0, 0.9)


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(0.0, 0), (0.0005, 0), (0.00051, 1), (0.05, 7), (10.0, 18), (10.1, 19), (-1.0, 0), (float("nan"), 0)],
)
def test_an_observation_lands_in_the_bucket_of_its_upper_bound(
    table: Table, value: float, bucket: int
) -> None:
    slot = table.directory.assign("m", "1")
    table.block(0).row(slot).observe(REQUEST_SECONDS, value)
    cells = table.cells(slot)
    assert [i for i, count in enumerate(cells[REQUEST_SECONDS.buckets]) if count] == [bucket]
    assert cells[REQUEST_SECONDS.sum] == (value if value > 0 else 0.0)


@given(st.lists(st.floats(0.0, 20.0), max_size=40), st.booleans())
def test_no_observation_is_lost(values: list[float], at_once: bool) -> None:
    table = Table(bytearray(table_bytes(1)))
    slot = table.directory.assign("m", "1")
    row = table.block(0).row(slot)
    if at_once:
        row.observe_each(QUEUE_SECONDS, [*values, float("nan"), -1.0])
        values = [*values, 0.0, 0.0]
    for value in () if at_once else values:
        row.observe(QUEUE_SECONDS, value)
    cells = table.cells(slot)
    counts = cells[QUEUE_SECONDS.buckets]
    assert sum(counts) == len(values)
    assert cells[QUEUE_SECONDS.sum] == pytest.approx(sum(values))
    for upto, bound in enumerate(QUEUE_SECONDS.bounds, 1):
        assert sum(counts[:upto]) == sum(value <= bound for value in values)


def test_a_batch_charges_every_request_with_its_whole_time(table: Table) -> None:
    slot = table.directory.assign("m", "1")
    row = table.block(0).row(slot)
    row.add_batch(5, [0.001, 0.004], input_s=0.5, infer_s=0.02, output_s=0.25, ended_ms=1000.0)
    row.add_batch(1, [0.0], input_s=0.5, infer_s=0.04, output_s=0.25, ended_ms=2000.0)
    cells = table.cells(slot)
    assert sum(cells[QUEUE_SECONDS.buckets]) == sum(cells[INFER_SECONDS.buckets]) == 3
    assert cells[INFER_SECONDS.sum] == pytest.approx(2 * 0.02 + 0.04)
    assert cells[columns.INPUT_SECONDS] == 1.5
    assert cells[columns.OUTPUT_SECONDS] == 0.75
    assert (sum(cells[BATCH_SIZE.buckets]), cells[BATCH_SIZE.sum]) == (2, 6)
    assert cells[LAST_INFERENCE_MS] == 2000.0


def test_a_successor_goes_on_where_the_dead_one_stopped(table: Table) -> None:
    slot = table.directory.assign("m", "1")
    first = table.block(1)
    first.row(slot).add(REJECTED)
    first.row(slot).set(PENDING, 9)
    first.server.set(CONNECTIONS, 9)
    successor = table.block(1)
    assert (table.cells(slot)[PENDING], table.server()[CONNECTIONS]) == (0.0, 0.0)
    successor.row(slot).add(REJECTED)
    assert table.cells(slot)[REJECTED] == 2.0


def test_a_reused_row_starts_at_zero_whoever_comes_late(table: Table) -> None:
    old = table.directory.assign("old", "1")
    early, late = table.block(0), table.block(1)
    stale = late.row(old)
    for row in (early.row(old), stale):
        row.add(REJECTED, 5)
    new = _next_life(table, old.row)
    assert new.generation == old.generation + 1
    early.row(new).add(REJECTED)
    stale.add(REJECTED)  # has not heard of the change yet
    assert table.cells(new)[REJECTED] == 1.0
    late.row(new).add(REJECTED)
    assert table.cells(new)[REJECTED] == 2.0


def _next_life(table: Table, row: int) -> CounterRow:
    """Retires the row and assigns new names until it comes round again."""
    table.directory.retire(*table.directory.live().popitem()[1])
    for number in range(1000):
        slot = table.directory.assign(f"filler{number}", "1")
        if slot.row == row:
            return slot
    raise AssertionError("the row never came back")


def test_a_buffer_too_small_and_a_block_too_many(table: Table) -> None:
    with pytest.raises(ValueError, match="takes at least"):
        Table(bytearray(64))
    with pytest.raises(IndexError, match="has 3 blocks"):
        table.block(3)


def test_several_processes_lose_nothing(tmp_path: Path) -> None:
    """Three at once, then a successor in the first one's block."""
    path = tmp_path / "counters"
    path.write_bytes(bytes(table_bytes(4)))
    table = shared(path)
    slot = table.directory.assign("m", "1")
    spawn = multiprocessing.get_context("spawn")
    for blocks in ([0, 1, 2], [0]):
        children = [spawn.Process(target=count_in_child, args=(path, block, 2000)) for block in blocks]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
    cells = table.cells(slot)
    assert sum(cells[REQUEST_SECONDS.buckets]) == 8000
    assert cells[REQUEST_SECONDS.sum] == 2000.0
