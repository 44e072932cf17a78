"""docs/metrics.md names every metric and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from absent import in_whole_server
from carpool.observe import columns
from carpool.observe.prometheus import chosen

TEXT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
FAMILIES = chosen({"counter_latencies": True, "histogram_latencies": True})
NAMES = {family.name for family in FAMILIES}


@in_whole_server
def test_every_metric_has_a_row_with_its_kind() -> None:
    rows = dict(re.findall(r"^\| `(\w+)(?:\{\w+\})?` \| (\w+) \|", TEXT, re.MULTILINE))
    assert rows == {family.name: family.kind for family in FAMILIES}


@in_whole_server
def test_nothing_is_mentioned_that_does_not_exist() -> None:
    mentioned = set(re.findall(r"\b(?:nv|carpool)_[a-z0-9_]+", TEXT))
    series = {f"{name}_{suffix}" for name in NAMES for suffix in ("bucket", "sum", "count")}
    assert mentioned - NAMES - series == set()


def test_every_label_value_and_bound() -> None:
    for word in (*columns.FAILURE_WORDS, *columns.SHED_WORDS, *columns.PROCESS_WORDS):
        assert f"`{word}`" in TEXT, word
    shown = ", ".join(f"{bound * 1000:g}" for bound in columns.SECONDS_BOUNDS)
    assert f"{shown} ms" in TEXT
    assert ", ".join(f"{bound:g}" for bound in columns.BATCH_BOUNDS) in TEXT
