"""Triton's statistics document, field for field."""

from __future__ import annotations

import json

from absent import rows
from carpool.observe import columns
from carpool.observe.counters import Table, table_bytes
from carpool.observe.statistics import BatchStatistics, model_statistics, statistics


def test_the_whole_document() -> None:
    table = Table(bytearray(table_bytes(2)))
    slot = table.directory.assign("detector", "3")
    engine, door = table.block(0).row(slot), table.block(1).row(slot)
    batches = BatchStatistics()
    for images, queued in ((4, [0.001, 0.002, 0.003]), (1, [0.0])):
        engine.add_batch(
            images, queued, input_s=0.001, infer_s=0.01, output_s=0.002, ended_ms=1.7e12 + images
        )
        batches.add(images, 1_000_000, 10_000_000, 2_000_000)
    for seconds in (0.02, 0.02, 0.03, 0.03):
        door.observe(columns.REQUEST_SECONDS, seconds)
    door.add(columns.FAILURES["BACKEND"])
    door.add(columns.FAILURES["REJECTED"])
    door.add(columns.FAILURE_SECONDS, 0.25)
    nothing = {"count": 0, "ns": 0}

    def times(size: int) -> dict[str, object]:
        phases = {"compute_input": 1_000_000, "compute_infer": 10_000_000, "compute_output": 2_000_000}
        return {"batch_size": size} | {name: {"count": 1, "ns": ns} for name, ns in phases.items()}

    [row] = table.models()
    document = statistics([model_statistics(row, batches)])
    assert json.loads(json.dumps(document)) == {
        "model_stats": [
            {
                "name": "detector",
                "version": "3",
                "last_inference": 1_700_000_000_001,
                "inference_count": 5,
                "execution_count": 2,
                "inference_stats": {
                    "success": {"count": 4, "ns": 100_000_000},
                    "fail": {"count": 2, "ns": 250_000_000},
                    "queue": {"count": 4, "ns": 6_000_000},
                    "compute_input": {"count": 4, "ns": 4_000_000},
                    "compute_infer": {"count": 4, "ns": 40_000_000},
                    "compute_output": {"count": 4, "ns": 8_000_000},
                    **dict.fromkeys(rows("cache", "cache_hit", "cache_miss"), nothing),
                },
                "response_stats": {},
                "batch_stats": [times(1), times(4)],
                "memory_usage": [],
            }
        ]
    }


def test_batches_of_one_size_add_up() -> None:
    batches = BatchStatistics()
    batches.add(17, 1, 2, 3)
    batches.add(17, 10, 20, 30)
    [size] = batches.document()
    assert size["batch_size"] == 17
    assert size["compute_input"] == {"count": 2, "ns": 11}
    assert size["compute_infer"] == {"count": 2, "ns": 22}
    assert size["compute_output"] == {"count": 2, "ns": 33}


def test_a_model_nobody_asked_yet() -> None:
    table = Table(bytearray(table_bytes(1)))
    table.directory.assign("m", "1")
    [row] = table.models()
    document = model_statistics(row, BatchStatistics())
    assert document["inference_count"] == document["execution_count"] == document["last_inference"] == 0
    assert document["batch_stats"] == []
