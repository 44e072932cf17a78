"""docs/limits.md says what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "limits.md").read_text("utf-8")
ROWS = re.findall(r"^\| [^|]+ \| (\d+) \| `([\w.]+):([\w.]+)` \|", PAGE, re.MULTILINE)


def test_there_are_rows() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize(("number", "module", "name"), ROWS)
def test_a_limit_is_that_of_the_code(number: str, module: str, name: str) -> None:
    owner: object = importlib.import_module(f"carpool.{module}")
    kind, _, attribute = name.rpartition(".")
    if kind:
        owner = getattr(owner, kind)()
    assert getattr(owner, attribute) == int(number)
