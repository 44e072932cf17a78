"""Exports as people have them: none is taken for what it is not, nor sees other pixels without a word."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import zoo


@pytest.mark.conformance
def test_nothing_is_silently_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["exports"]
    assert len(rows) >= 20
    assert {row["result"] for row in rows} == {zoo.RIGHT, zoo.ASKS, zoo.TENSORS}
    served = [row for row in rows if row["task"]]
    assert {row["pixels"] for row in served} == {zoo.EQUAL, zoo.ASSUMED}
    assert all(row["cosine"] >= 0.999 for row in served if row["pixels"] == zoo.EQUAL)
