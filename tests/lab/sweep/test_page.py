from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from carpool.lab.sweep.sweep_report import page, shown_rates, themed
from lab.sweep.samples import DELAYED, results, run, runs

EVIL = '<img src=x onerror="document.title=1">$a_b$&'


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= set(attrs)


@pytest.fixture(name="text")
def a_page_full_of_names() -> str:
    void = run(DELAYED.name, 90.0, 1, void=(EVIL,), refused={EVIL: 3})
    names = ("model", "command", "machine", "target", "curve", "requests")
    evil: dict[str, Any] = dict.fromkeys(names, EVIL) | {"versions": {EVIL: EVIL}}
    return page(results(**evil, runs=(*runs(), void)), {})


def test_no_name_becomes_markup(text: str) -> None:
    tags = Tags(text)
    assert "img" not in tags.found
    assert "script" not in tags.found
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "&lt;img" in text


def test_nothing_is_fetched_from_anywhere(text: str) -> None:
    assert not [name for name, _ in Tags(text).attributes if name in ("href", "src")]
    assert "default-src 'none'" in text
    assert "@import" not in text


def test_colours_follow_the_reader() -> None:
    drawing = themed(
        '<?xml?><!DOCTYPE svg><svg width="1"><metadata>x</metadata><p style="fill: #ffffff"/></svg>', "T"
    )
    assert drawing == '<svg role="img" aria-label="T" width="1"><p style="fill: none"/></svg>'


def test_a_page_without_charts_still_has_its_numbers() -> None:
    text = page(results(), {})
    assert text.count("<tr") == 7
    assert 'class="best"' in text
    assert "1 of 2 void" in text


def test_few_rates_are_shown_where_there_is_little_room() -> None:
    assert shown_rates(results()) == [30.0, 90.0, 150.0]
    many = results(runs=tuple(run(DELAYED.name, rate) for rate in (10.0, 30.0, 80.0, 100.0, 120.0, 200.0)))
    assert shown_rates(many) == [10.0, 80.0, 200.0]
