"""A rollout whose labelled pictures are asked first: by `carpool evaluate` in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.extensions.rollout.labelled_check import read_evaluation
from extensions.rollout.staged import staged
from extensions.rollout.test_picture_rollouts import repository, status, until_state
from frontend.picture_models import BLUE, GREEN, RED, picture
from frontend.whole_server import whole_server

PLAN = 'shadow = 0\ncanary = [0.5]\ncanary_h = 24\nevaluate = "labelled"\n'


def labelled(models: Path) -> None:
    for name, colour in {"red": RED, "green": GREEN, "blue": BLUE}.items():
        folder = models / "namer" / "labelled" / name
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(picture(colour, "PNG"))


@pytest.mark.parametrize(
    ("factor", "state", "why"),
    [(2.0, "canary", "top1 on 3 labelled"), (-1.0, "failed", "worse than the 0.005")],
)
def test_it_decides(tmp_path: Path, factor: float, state: str, why: str) -> None:
    models = repository(tmp_path, PLAN, (8, 1.0), (8, factor))
    labelled(models)
    with whole_server(models, state_dir=tmp_path / "state", cache_dir=tmp_path / "cache") as server:
        found = until_state(server, state)
        [line] = [line for line in found["history"] if line["from"] == "checked"]
        assert why in line["why"]
        assert (found["stable"], found["candidate"]) == ("1", "2")


def test_without_an_answer_it_waits_for_a_hand(tmp_path: Path) -> None:
    models = repository(tmp_path, PLAN, (8, 1.0), (8, 1.0))
    with whole_server(models, state_dir=tmp_path / "state", cache_dir=tmp_path / "cache") as server:
        until_state(server, "checked")
        while "is being evaluated" in (found := status(server))["why"]:
            pass
        assert found["state"] == "checked"
        assert "gave no result" in found["why"]
        assert str(tmp_path) not in found["why"]


def test_versions_that_are_no_files_wait_for_a_hand(tmp_path: Path) -> None:
    """Loaded by their folder, both would be the newest."""
    with staged(tmp_path, PLAN) as one:
        one.until("checked")
        while "is being evaluated" in (found := one.status())["why"]:
            pass
        assert (found["state"], "not files" in found["why"]) == ("checked", True)
        assert one.act("promote")[1]["state"] == "canary"


def test_one_that_is_under_way_ends_with_its_server(tmp_path: Path) -> None:
    models = repository(tmp_path, PLAN, (8, 1.0), (8, 1.0))
    labelled(models)
    with whole_server(models, state_dir=tmp_path / "state", cache_dir=tmp_path / "cache") as server:
        assert "is being evaluated" in until_state(server, "checked")["why"]


GAP = {"figure": "mAP", "difference": -0.1, "low": -0.2, "high": 0.0, "tolerate": 0.01, "worse": True}


@pytest.mark.parametrize(
    ("said", "complained", "worse", "sentence"),
    [
        (
            json.dumps({"pictures": 9, "gap": GAP, "failed": {}}),
            "",
            True,
            "mAP on 9 labelled images: -0.1000 (-0.2000 to +0.0000), worse than the 0.01 that are",
        ),
        (
            json.dumps({"pictures": 9, "gap": GAP, "failed": {"a": "b"}}),
            "",
            None,
            "1 of its images were not",
        ),
        (json.dumps({"pictures": 9, "gap": None, "failed": {}}), "a\nb", None, "b"),
        (
            json.dumps({"pictures": 9, "gap": GAP | {"low": float("nan")}, "failed": {}}),
            "",
            None,
            "without an",
        ),
        ("", "Error: no faster-coco-eval", None, "no faster-coco-eval"),
        ("[]", "", None, "ended without an answer"),
    ],
)
def test_what_it_says(said: str, complained: str, worse: bool | None, sentence: str) -> None:
    found = read_evaluation(said.encode(), complained.encode())
    assert found.worse is worse
    assert sentence in found.sentence
