"""No version passes by its rollout: random walks through the real code, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from extensions.rollout.walks import walk
from later import exhaustive, later

TOGETHER = 100


@pytest.mark.parametrize("first", [0, later(10), later(20), later(30)])
def test_no_version_answers_more_than_it_was_given(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 10):
        walk(tmp_path / str(seed), seed)


@pytest.mark.parametrize("first", [later(1000), later(1100), *map(exhaustive, range(1200, 3200, TOGETHER))])
def test_no_version_answers_more_than_it_was_given_in_many_walks(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + TOGETHER):
        walk(tmp_path / str(seed), seed)
