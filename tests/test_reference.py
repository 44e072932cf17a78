"""Lists on the pages of the documentation are those that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference import DOCS, MARK, written

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if MARK.search(page.read_text("utf-8"))]


def test_lists_are_generated_on_four_pages() -> None:
    assert [page.name for page in PAGES] == ["cli.md", "configuration.md", "limits.md", "metrics.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_generated_list_is_that_of_the_code(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == written(text), "write it anew: python tests/reference.py"
