"""README and docs use the field's words, in sentences that are read once, and stay as short as they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_ROOT = ("README", "ARCHITECTURE", "CONTRIBUTING", "DECISIONS", "SECURITY")
PAGES = [*(ROOT / f"{name}.md" for name in OF_ROOT), *sorted((ROOT / "docs").rglob("*.md"))]

AVOIDED = {
    r"doors?": "endpoint, protocol, front end",
    r"knobs?": "batching settings",
    r"carr(?:y|ies|ied|ying)": "sustain, contain, have",
    r"in time": "within the SLO",
    r"told|tells?": "reported, logged, answered with",
    r"whoever|nobody|somebody|everybody|anybody|who comes": "client, caller, request",
    r"one's own": "name whose it is",
    r"rides?|rode|riders?|riding": "is part of a batch",
    r"twins?": "identical concurrent requests",
    r"asks? again|asked again|tr(?:y|ies) again": "retry",
    r"the better Triton": "Triton, its faster setting",
    r"spare (?:work|turns?)": "background work",
    r"stands? by": "standby",
    r"(?:goes|go|went) back|(?:comes|come|came) back": "rolls back, restarts, recovers, returns",
    r"turn(?:s|ed) away": "rejected",
    r"sa(?:y|ys|id|ying) no|a no": "reject",
    r"seen": "measured, observed",
}
"""Patterns of words, and what to write instead."""

ALLOWED: dict[str, int] = {}
"""Pages, and how many avoided words each may have: quotations of what the program prints."""

LONGEST = 35  # words of a sentence
MOST_LONG = 0.01  # the share of sentences that may be longer
MOST_AVOIDED = 0.2  # in 1,000 words
MOST_WORDS = {"README.md": 900, "docs": 60_000}
MOST_PAGES = 32

_AVOIDED = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in AVOIDED), re.IGNORECASE)


def prose(text: str) -> Iterator[str]:
    """Paragraphs, items of lists, headings and cells of tables, without code, addresses and comments."""
    text = re.sub(r"<!-- generated: .*?<!-- end -->", "\n", text, flags=re.DOTALL)  # the code's own words
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]+`", "Code", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>|#]|\d+\.) ?)", text):
        cells = block.strip().strip("|").split(" | ") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            plain = " ".join(re.sub(r"^\s*(?:[-*>#]+|\d+\.)\s+|[*_|]", " ", cell).split())
            if re.search(r"\w", plain):
                yield plain


def sentences(text: str) -> Iterator[str]:
    for part in prose(text):
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9“\"(…])", part)


def avoided(page: Path) -> list[str]:
    return [found for part in prose(page.read_text("utf-8")) for found in _AVOIDED.findall(part)]


def long_sentences(page: Path) -> list[str]:
    return [said for said in sentences(page.read_text("utf-8")) if len(said.split()) > LONGEST]


def words_of(page: Path) -> int:
    """Code and tables included, without the strokes that draw them."""
    return len(re.findall(r"\S*\w\S*", page.read_text("utf-8")))


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_fields_words_are_used(page: Path) -> None:
    found = avoided(page)
    assert len(found) <= ALLOWED.get(named(page), 0), found


def test_few_words_are_allowed_to_stay() -> None:
    words = sum(map(words_of, PAGES))
    assert sum(ALLOWED.values()) <= MOST_AVOIDED * words / 1000
    assert {*ALLOWED} <= {named(page) for page in PAGES}


def test_sentences_are_short() -> None:
    every = sum(1 for page in PAGES for _ in sentences(page.read_text("utf-8")))
    long = {named(page): long_sentences(page) for page in PAGES}
    assert sum(map(len, long.values())) <= MOST_LONG * every, {
        page: said for page, said in long.items() if said
    }


def test_the_book_stays_short() -> None:
    pages = [*(ROOT / "docs").rglob("*.md")]
    assert len(pages) <= MOST_PAGES
    assert sum(map(words_of, pages)) <= MOST_WORDS["docs"]
    assert words_of(ROOT / "README.md") <= MOST_WORDS["README.md"]


if __name__ == "__main__":
    for page in PAGES:
        lines = [f"{named(page)}: {avoided(page)}", *(f"  long: {said}" for said in long_sentences(page))]
        sys.stdout.write("\n".join(lines) + "\n")
