from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from carpool.cli.shared_options import HasTraffic
from carpool.errors import InvalidInput
from carpool.sim.arrivals import Bursty, Cameras, Recording, poisson, trace


def test_poisson_has_its_rate() -> None:
    arrivals = poisson(1000, 20, Random(1))
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    assert all(a.at <= b.at for a, b in pairwise(arrivals))


def test_bursts_keep_the_mean_and_triple_the_rate() -> None:
    arrivals = list(Bursty(factor=3, length=0.5, period=2.5).arrivals(700, 50, Random(1)))
    assert len(arrivals) == pytest.approx(35_000, rel=0.03)
    inside = sum(1 for a in arrivals if a.at % 2.5 < 0.5) / (50 / 2.5 * 0.5)
    outside = sum(1 for a in arrivals if a.at % 2.5 >= 0.5) / (50 / 2.5 * 2.0)
    assert inside / outside == pytest.approx(3, rel=0.06)


def test_cameras_are_steady_and_may_be_aligned() -> None:
    spread = Cameras(10, 5, per_source=True).arrivals(50, 4, Random(1))
    assert len(spread) == 200
    assert len({a.at for a in spread}) == 200
    assert len({a.source for a in spread}) == 10
    assert len({a.at for a in Cameras(10, 5, aligned=True).arrivals(50, 4, Random(1))}) == 20


def test_a_trace_starts_at_zero_and_is_put_in_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"time": 12.5, "images": 3, "source": "a"}\n\n{"time": 12, "model": "x"}\n')
    assert [(a.at, a.images, a.source) for a in trace(file)] == [(0.0, 1, ""), (0.5, 3, "a")]


def test_a_last_line_that_is_cut_off_is_left_out_and_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    whole = '{"time": 1}\n{"time": 2}\n'
    file.write_text(whole + '{"time": 3, "mod')
    options = HasTraffic(arrivals=f"trace:{file}")
    found = options.traffic({}, Recording.read, per_source=False)
    assert isinstance(found, Recording)
    assert [a.at for a in found.recorded] == [0.0, 1.0]
    assert capsys.readouterr().err == f"carpool: {file}: its last line is cut off and was left out\n"
    for bad in ('{"time": 3, "mod\n', '{"time": 3, "mod\n{"time": 4}\n'):
        file.write_text(whole + bad)
        with pytest.raises(InvalidInput, match="line 3 is not JSON"):
            trace(file)
    file.write_text('{"time": 3, "mod')
    with pytest.raises(InvalidInput, match="line 1 is not JSON"):
        trace(file)
    file.write_text(whole + '{"time": 3}')  # whole, without its end of line
    options.traffic({}, Recording.read, per_source=False)
    assert capsys.readouterr().err == ""


def test_a_trace_of_several_models_is_asked_for_one_of_them(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    cats = '{"time": 3, "model": "cats"}\n{"time": 5, "model": "cats", "images": 2}\n'
    file.write_text(cats + '{"time": 1, "model": "dogs"}')
    assert [(a.at, a.images) for a in trace(file, "cats")] == [(0.0, 1), (2.0, 2)]
    with pytest.raises(InvalidInput, match="several models: say which with --model, of cats, dogs"):
        trace(file)
    with pytest.raises(InvalidInput, match="no arrivals for model 'owls', but for cats, dogs"):
        trace(file, "owls")
    file.write_text('{"time": 1, "model": "dogs"}')
    assert len(trace(file)) == len(trace(file, "dogs")) == 1
    file.write_text('{"time": 1}')
    assert len(trace(file, "dogs")) == 1  # whose it is nobody knows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("[1]", 'needs "time"'),
        ('{"time": "soon"}', 'needs "time"'),
        ('{"time": true}', 'needs "time"'),
        ('{"time": 1e999}', 'needs "time"'),
        ('{"time": 1' + "0" * 400 + "}", 'needs "time"'),
        ('{"time": 1, "images": 0}', 'has "images": 0'),
        ('{"time": 1, "images": 1.5}', 'has "images": 1.5'),
        ("", "holds no arrivals"),
    ],
)
def test_a_malformed_trace_names_its_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidInput, match=says):
        trace(file)
