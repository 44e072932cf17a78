"""Parts of the pages in docs/, for tests that hold them against the code."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def part_of(page: str, heading: str) -> str:
    """What stands below a heading of the second level, up to the next one."""
    text = (DOCS / page).read_text("utf-8")
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
