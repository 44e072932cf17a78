"""What `carpool profile` finds, on a model that takes what its settings say, and what it doubts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from carpool.config.model import ModelConfig
from carpool.engine.profile import measuring
from carpool.engine.profile.hardware import CpuWatch
from carpool.engine.profile.measuring import Measuring, Point
from carpool.errors import ConfigError, InvalidInput
from carpool.lab import batch_profile as lab
from carpool.lab.batch_profile import ProfileQuestion, ProfileReport, profile
from carpool.lab.plots import batch_profile
from engine import repositories
from engine.timed import Clock, Timed


@pytest.fixture(name="timed")
def a_timed_model(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """4 ms and 1 ms an image, on a clock of its own and a machine of which others take nothing."""
    clock = Clock()
    backend = Timed(clock, lambda images, _: 0.004 + 0.001 * images)

    def load(_config: ModelConfig, _version: object, *_: object) -> Timed:
        backend.closed, backend.alive = False, True
        return backend

    monkeypatch.setattr("carpool.backends.load", load)
    monkeypatch.setattr(lab, "Measuring", lambda *args: Measuring(*args, now=clock))
    monkeypatch.setattr(lab, "CpuWatch", lambda: CpuWatch(Path("/nonexistent")))
    return backend


def question(tmp_path: Path, **more: object) -> ProfileQuestion:
    return replace(ProfileQuestion(repositories.fake(tmp_path)), **more)  # type: ignore[arg-type]


def test_the_curve_its_line_and_what_promises_allow(tmp_path: Path, timed: Timed) -> None:
    told: list[str] = []
    found = profile(question(tmp_path, slos=(0.008, 0.0105, 0.020, 0.050), repeats=8), told.append)
    assert [row.batch for row in found.rows] == [1, 2, 4, 8]
    assert [row.ms for row in found.rows] == pytest.approx([5, 6, 8, 12])
    assert all(row.runs >= 8 and row.spread < 1e-6 for row in found.rows)
    assert (found.fixed_ms, found.per_image_ms) == pytest.approx((4, 1))
    assert (found.line_from, found.line_until, found.knee) == (1, 8, 8)
    assert found.curve == "1:5,2:6,4:8,8:12"
    assert [(budget.batch, budget.largest) for budget in found.budgets] == [(0, 4), (0, 6), (5, 8), (8, 8)]
    assert "SLO of 11 ms" in found.budgets[0].why
    assert "2 × 9 ms" in found.budgets[2].why
    assert "t(B) = 4 ms + B × 1 ms, and every point within 0% of it." in found.notes
    assert any(note.startswith("Batches of 8 process 3.33 ×") for note in found.notes)
    assert timed.closed
    assert "measuring batches of 4" in told


def test_a_promise_below_a_single_image(tmp_path: Path, timed: Timed) -> None:
    (budget,) = profile(question(tmp_path, slos=(0.004,))).budgets
    assert (budget.batch, budget.largest, budget.images_per_s) == (0, 0, 0.0)
    assert budget.why == "one image alone takes 5 ms"


def test_sizes_instances_and_threads_as_asked(tmp_path: Path, timed: Timed) -> None:
    found = profile(question(tmp_path, sizes=(3, 5), instances=1, threads=2))
    assert [row.batch for row in found.rows] == [3, 5]
    assert (found.instances, found.threads) == (1, 2)
    assert set(timed.sizes) == {3, 5}


def test_where_batching_brings_little(tmp_path: Path, timed: Timed) -> None:
    timed.takes = lambda images, _: 0.010 * images
    found = profile(question(tmp_path))
    assert any("Batching gains little here: 100 images/s one by one" in note for note in found.notes)
    assert found.knee == 1


def test_a_repository_needs_a_name(tmp_path: Path, timed: Timed) -> None:
    repositories.fake(tmp_path, name="one")
    repositories.fake(tmp_path, name="two")
    with pytest.raises(InvalidInput, match=r"--name: one, two"):
        profile(ProfileQuestion(tmp_path))
    assert profile(ProfileQuestion(tmp_path, name="two", sizes=(1,))).model == "two"
    with pytest.raises(ConfigError, match="there is no model"):
        profile(ProfileQuestion(tmp_path, name="three"))
    assert timed.closed


def points(spread: float = 0.01) -> list[Point]:
    return [Point(size, 0.004 + 0.001 * size, spread, 10) for size in (1, 2, 4)]


def test_it_says_when_the_machine_is_too_noisy_to_tell() -> None:
    quiet, first = points(), points()[0]
    assert lab.doubts(quiet, first, 0.0) == []
    assert "is 50%" in lab.doubts(points(0.5), first, 0.0)[0]
    assert "20% of the processor" in lab.doubts(quiet, first, 0.2)[0]
    slower = Point(1, 0.009, 0.0, 10)
    assert "took 5 ms at first, 9 ms at the end" in lab.doubts(quiet, slower, 0.0)[0]


def test_what_was_too_slow_to_measure_is_said(tmp_path: Path, timed: Timed) -> None:
    timed.takes = lambda images, _: 8.0 * images
    found = profile(question(tmp_path))
    assert [row.batch for row in found.rows][-1] < 8
    assert "were not measured: the 120 s for measuring were over" in found.notes[-1]


def test_the_picture(tmp_path: Path, timed: Timed) -> None:
    pytest.importorskip("matplotlib")
    found: ProfileReport = profile(question(tmp_path))
    batch_profile(tmp_path / "p.png", found)
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_the_same_code_measures_at_loading() -> None:
    assert lab.Measuring is measuring.Measuring
