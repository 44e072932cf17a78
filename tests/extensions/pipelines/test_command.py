"""`carpool pipeline check`: the drawing, and what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from carpool.demo import bundled_models
from cli_run import CliResult, run_cli

STREET = Path(__file__).parents[3] / "examples" / "street"


def check(folder: Path) -> CliResult:
    return run_cli(["pipeline", "check", str(folder), "--models", str(bundled_models())])


def promising(folder: Path, slo_ms: str) -> Path:
    """The street pipeline with another promise."""
    shutil.copytree(STREET, folder / "street")
    settings = folder / "street" / "pipeline.toml"
    settings.write_text(settings.read_text().replace("slo_ms = 2000", f"slo_ms = {slo_ms}"))
    return folder / "street"


@pytest.mark.conformance
def test_the_steps_are_drawn(tmp_path: Path) -> None:
    done = check(promising(tmp_path, "60000"))  # which a slow machine keeps, too
    assert done.exit_code == 0, done.stderr
    for words in (
        "street: one SLO of 60000 ms for all steps",
        "└─ find: nanodet, detect, sees 416 × 416, 80 labels",
        "keeps at most 8 things with a score of 0.4 or more",
        "└─ for each of find.boxes: cut out, 10% more on every side, at least 16 pixels",
        "└─ kind: efficientnet_lite0, classify, sees 224 × 224, 1000 labels",
        "detections[…].kind",
        "an image with a few crops takes about ",
    ):
        assert words in done.stdout


def test_a_promise_that_cannot_be_kept_is_reported(tmp_path: Path) -> None:
    done = check(promising(tmp_path, "0.01"))
    assert done.exit_code == 0, done.stderr
    assert "so slo_ms = 0.01 cannot be met; use at least " in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"nanodet"',
            '"nanodt"',
            'pipeline.toml:13: step find.model: there is no model "nanodt"; did you mean',
        ),
        ('"nanodet"', '"efficientnet_lite0"', "needs a step whose task is detect"),
        ("{ score", '{ labels = ["cars"], score', 'nanodet has no label "cars"; did you mean "car"?'),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    folder = tmp_path / "street"
    shutil.copytree(STREET, folder)
    settings = folder / "pipeline.toml"
    settings.write_text(settings.read_text().replace(old, new))
    done = check(folder)
    assert done.exit_code == 2
    assert words in done.stderr
    assert check(tmp_path).exit_code == 2
