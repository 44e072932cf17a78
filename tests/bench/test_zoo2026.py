"""Heads of the model files of 2026, made here: read as their own code reads them, without a setting."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("torch")

import zoo2026


@pytest.mark.conformance
def test_heads_are_right_or_say_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo2026.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    counts = Counter(row["verdict"] for row in rows)
    assert counts[zoo2026.RIGHT] >= 21
    assert counts[zoo2026.SILENT] == 0
    others = [row for row in rows if row["verdict"] != zoo2026.RIGHT]
    assert all(row["says"] for row in others)
    right = [row for row in rows if row["verdict"] == zoo2026.RIGHT]
    assert all(row["cosine"] is None or row["cosine"] >= 0.999 for row in right)
