"""The live document's counters: what the cells say, as plain cumulative numbers."""

from __future__ import annotations

import pytest

from carpool.observe import columns
from carpool.observe.columns import BATCH_BOUNDS, SECONDS_BOUNDS
from carpool.observe.counters import Table, table_bytes
from carpool.observe.statistics import BOUNDS, model_counts, server_counts


@pytest.fixture
def table() -> Table:
    return Table(bytearray(table_bytes(2)))


def test_counts_of_a_model_are_summed_over_processes(table: Table) -> None:
    slot = table.directory.assign("m", "1")
    rows = [table.block(number).row(slot) for number in range(2)]
    for row in rows:
        row.observe(columns.REQUEST_SECONDS, 0.02)
        row.observe(columns.REQUEST_SECONDS, 99.0)
    rows[0].add(columns.SHED["overload"], 3)
    rows[1].add(columns.FAILURES["BACKEND"])
    rows[1].set(columns.PENDING, 4)
    rows[1].set(columns.SATURATION, 0.123456)
    rows[1].add_batch(8, [0.001] * 8, input_s=0.0, infer_s=0.004, output_s=0.0, ended_ms=1.0)
    counts = model_counts(table.cells(slot))
    assert counts["ok"] == 4
    assert counts["request"]["buckets"][SECONDS_BOUNDS.index(0.02)] == 2
    assert counts["request"]["buckets"][-1] == 2
    assert counts["request"]["sum"] == pytest.approx(198.04)
    assert counts["sheds"] == {"overload": 3}
    assert counts["failures"] == {"BACKEND": 1}
    assert (counts["pending"], counts["saturation"]) == (4, 0.1235)
    assert counts["batch"] == {"buckets": [0, 0, 0, 1, 0, 0, 0, 0, 0, 0], "sum": 8.0}
    assert sum(counts["queue"]["buckets"]) == sum(counts["infer"]["buckets"]) == 8
    assert len(counts["queue"]["buckets"]) == len(BOUNDS["seconds"]) + 1
    assert len(counts["batch"]["buckets"]) == len(BATCH_BOUNDS) + 1


def test_counts_of_the_server(table: Table) -> None:
    row = table.block(0).server
    row.set(columns.CONNECTIONS, 3)
    row.add(columns.BYTES_RECEIVED, 1e6)
    row.add(columns.RESTARTS["engine"])
    counts = server_counts(table.server())
    assert counts == {
        "connections": 3,
        "bytes_received": 1_000_000,
        "bytes_sent": 0,
        "restarts": {"engine": 1},
    }
