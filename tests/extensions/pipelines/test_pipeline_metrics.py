"""The metrics of pipelines, read back with Prometheus' own parser."""

from __future__ import annotations

from carpool.observe import columns
from carpool.observe.counters import Table, table_bytes
from observe.test_prometheus import parsed


def test_steps_of_pipelines_have_rows_of_their_own() -> None:
    table = Table(bytearray(table_bytes(1)))
    row = table.block(0).row(table.directory.assign("street", "1\0kind"))
    row.observe(columns.QUEUE_SECONDS, 0.004)
    row.observe(columns.FAN_OUT, 0.0)
    row.observe(columns.FAN_OUT, 3.0)
    labels = {"pipeline": "street", "version": "1", "step": "kind"}
    metrics = parsed(table)
    samples = {
        (s.name, s.labels.get("phase"), s.labels.get("le")): s for m in metrics.values() for s in m.samples
    }
    none = samples["carpool_pipeline_fan_out_bucket", None, "0.0"]
    assert (none.value, {**none.labels, "le": ""}) == (1.0, {**labels, "le": ""})
    assert samples["carpool_pipeline_step_duration_seconds_count", "queue", None].value == 1.0
    assert samples["carpool_pipeline_step_duration_seconds_count", "infer", None].value == 0.0
    assert all(row.model != "street" for row in table.models())  # it is no model
