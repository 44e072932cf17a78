"""The metrics of cascades, read back with Prometheus' own parser."""

from __future__ import annotations

from carpool.observe import columns
from carpool.observe.counters import Table, table_bytes
from observe.test_prometheus import MODEL, parsed, value


def test_a_cascade_says_who_answered_and_whether_they_agree() -> None:
    table = Table(bytearray(table_bytes(1)))
    row = table.block(0).row(table.directory.assign("detector", "1"))
    assert not any(name.startswith("carpool_cascade") for name in parsed(table))
    row.add(columns.by_word("cascades", "answered")["cheap"], 3)
    row.add(columns.single("cascades", "saved"), 1.5)
    metrics = parsed(table)
    assert value(metrics, "carpool_cascade_total", **MODEL, by="cheap") == 3
    assert value(metrics, "carpool_cascade_total", **MODEL, by="degraded") == 0
    assert value(metrics, "carpool_cascade_saved_seconds_total", **MODEL) == 1.5
    assert "carpool_cascade_agreement" not in metrics
    row.add(columns.by_word("cascades", "audits")["same"], 3)
    row.add(columns.by_word("cascades", "audits")["differs"])
    row.add(columns.by_word("cascades", "audits")["skipped"], 5)
    assert value(parsed(table), "carpool_cascade_agreement", **MODEL) == 0.75
