"""Exports as people have them: none is taken for what it is not."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import zoo


def test_nothing_is_silently_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["exports"]
    assert len(rows) >= 20
    results = {row["result"] for row in rows}
    assert results == {zoo.RIGHT, zoo.ASKS, zoo.TENSORS}
