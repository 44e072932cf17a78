from __future__ import annotations

import sys
from pathlib import Path

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.objectives import FixedBatching, Promise
from carpool.errors import InvalidInput
from carpool.lab.plots import operating_curve
from carpool.sim.simulation import Scenario, contenders, sweep

SCENARIO = Scenario(BatchCurve.parse("4+1"), 0.05, Promise(0.05, 64), rate=1.0, seconds=1.0)


def test_one_contender_and_several_are_drawn(tmp_path: Path) -> None:
    sweeps = {
        name: sweep(entry, (0.2, 1.5)) for name, entry in contenders(SCENARIO, FixedBatching(64)).items()
    }
    operating_curve(tmp_path / "all.png", sweeps, slo_ms=50, title="4+1")
    operating_curve(tmp_path / "one.png", {"promise": sweeps["promise"]}, slo_ms=50, title="4+1")
    for name in ("all.png", "one.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    sweeps = {"promise": sweep(SCENARIO, (0.5, 1.0))}
    with pytest.raises(InvalidInput, match="cannot write"):
        operating_curve(tmp_path / "no" / "x.png", sweeps, slo_ms=50, title="4+1")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidInput, match=r"pip install 'carpool\[plot\]'"):
        operating_curve(tmp_path / "x.png", {}, slo_ms=50, title="")
