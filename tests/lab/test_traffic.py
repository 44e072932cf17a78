from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from carpool.errors import InvalidInput
from carpool.sim.arrivals import Bursty, Cameras, Poisson, Recording
from carpool.sim.simulation import Surge


def _written(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_every_kind_comes_at_the_rate_asked_for(tmp_path: Path) -> None:
    file = _written(tmp_path / "t.jsonl", *({"time": n / 10} for n in range(101)))
    kinds = [Poisson(), Bursty(), Cameras(1, 10.0), Recording.read(file)]
    for kind in kinds:
        found = list(kind.arrivals(200.0, 10.0, Random(1)))
        assert [a.at for a in found] == sorted(a.at for a in found)
        if not isinstance(kind, Recording):
            assert len(found) == pytest.approx(2000, rel=0.05)
            assert all(a.at < 10 for a in found)


def test_cameras_have_a_rate_and_are_one_source_unless_told_apart() -> None:
    assert Cameras(100, 10.0).own_rate == 1000
    together = Cameras(3, 10.0).arrivals(30.0, 1.0, Random(1))
    apart = Cameras(3, 10.0, per_source=True).arrivals(30.0, 1.0, Random(1))
    assert {a.source for a in together} == {""}
    assert {a.source for a in apart} == {"camera-0", "camera-1", "camera-2"}


def test_a_recording_knows_its_rate_and_can_be_played_faster(tmp_path: Path) -> None:
    file = _written(
        tmp_path / "t.jsonl", {"time": 5.0}, {"time": 6.0, "images": 2, "source": "a"}, {"time": 7.0}
    )
    recording = Recording.read(file)
    assert recording.own_rate == 2.0
    assert recording.span == 2.0
    assert [a.at for a in recording.arrivals(2.0, 60.0, Random(1))] == [0, 1, 2]
    assert [a.at for a in recording.arrivals(4.0, 60.0, Random(1))] == [0, 0.5, 1]
    assert [a.at for a in recording.arrivals(2.0, 1.5, Random(1))] == [0, 1]
    assert recording.recorded[1].source == ""
    assert Recording.read(file, per_source=True).recorded[1].source == "a"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["no json"], "line 1 is not JSON"),
        ([], "holds no arrivals"),
        ([{"time": 1.0}], "spans no time"),
        ([{"time": -1e308}, {"time": 1e308}], "line 1 needs .time."),
        ([{"time": 0}, {"time": 10**400}], "line 2 needs .time."),
    ],
)
def test_a_recording_that_cannot_be_played(tmp_path: Path, lines: list[object], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Recording.read(_written(tmp_path / "t.jsonl", *lines))


def test_a_recording_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot read"):
        Recording.read(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInput, match="cannot read"):
        Recording.read(tmp_path)


def test_a_surge_has_edges() -> None:
    surge = Surge(factor=5, length=2, calm=3)
    assert list(surge.windows(10)) == [(3, 5), (8, 10)]
    found = list(surge.arrivals(100.0, 10.0, Random(1)))
    inside = [a for a in found if 3 <= a.at < 5 or 8 <= a.at < 10]
    assert len(inside) == pytest.approx(2000, rel=0.1)
    assert len(found) - len(inside) == pytest.approx(900, rel=0.1)
    assert [a.at for a in found] == sorted(a.at for a in found)
