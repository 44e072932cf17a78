"""The table has every pair once, each with a test of its own that says the same; the page is made of it."""

from __future__ import annotations

from carpool.extensions import installed
from doc_pages import DOCS
from interactions import test_refused, test_together
from interactions.table import EXTENSIONS, FEATURES, NOTES, OWN, REFUSED, TABLE, WORKS, pairs, part, rejection

TESTED = {
    "test_together.py::test_together": (WORKS, test_together.GENERIC),
    "test_together.py::test_two_kinds": (WORKS, test_together.TWO_KINDS),
    "test_together.py::test_refused_with_the_request": (REFUSED, test_together.REFUSED_BY_REQUEST),
    "test_refused.py::test_refused": (REFUSED, test_refused.REFUSED),
}


def test_every_pair_is_there_once() -> None:
    assert len(FEATURES) == 15
    assert {frozenset(pair) for pair in pairs()} == {frozenset(pair) for pair in TABLE}
    assert len(TABLE) == len(pairs()) == 105


def test_what_manifests_reject_stands_only_there() -> None:
    assert [pair for pair in OWN if rejection(*pair)] == []
    assert [pair for pair in NOTES if not rejection(*pair)] == []
    assert {*EXTENSIONS.values()} <= {*installed()}


def test_every_cell_says_what_its_test_shows() -> None:
    tested = {frozenset(pair): (verdict, test) for test, (verdict, all_) in TESTED.items() for pair in all_}
    assert sum(len(all_) for _, all_ in TESTED.values()) == len(tested)
    for pair, cell in TABLE.items():
        assert tested[frozenset(pair)] == (cell.verdict, cell.test), pair
        assert cell.sentence.endswith(".")


def test_the_page_is_made_of_the_table() -> None:
    assert part() in (DOCS / "limits.md").read_text(), "write it anew: python tests/reference.py"
