"""The report of `carpool sweep` in a real browser: charts, SLO line and table, by day and by night."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from carpool.lab.sweep.sweep_report import write_report
from lab.sweep.samples import results
from later import first

EVIL = '<img src=x onerror="document.title=1">'
CHARTS = ("operating-curve", "goodput", "latency", "batches")
Scheme = Literal["light", "dark"]


@pytest.fixture(scope="module", name="report")
def a_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(results(model=EVIL), tmp_path_factory.mktemp("report"))


@pytest.mark.conformance
@pytest.mark.parametrize(("scheme", "width"), first(1, [("light", 1280), ("dark", 1280), ("light", 390)]))
def test_the_report_opens_by_itself(browser: Browser, report: Path, scheme: Scheme, width: int) -> None:
    with browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, offline=True
    ) as tab:
        page = tab.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: complaints.append(request.url) if request.url != report.as_uri() else None,
        )
        page.goto(report.as_uri())
        assert set(report.parent.iterdir()) >= {report.parent / f"{chart}.png" for chart in CHARTS}
        assert page.title() == f"{EVIL}: carpool sweep"
        for chart in CHARTS:
            drawing = page.locator(f"#{chart} svg")
            expect(drawing).to_be_visible()
            box = drawing.bounding_box()
            assert box is not None
            assert box["width"] > 300
            assert box["height"] > 100
        expect(page.locator("#operating-curve-slo")).to_be_attached()
        expect(page.locator("#chosen-point")).to_be_attached()
        expect(page.locator("#prediction-1")).to_be_attached()
        expect(page.locator("#operating-curve svg")).to_contain_text("SLO 50 ms")
        expect(page.locator("#points tbody tr")).to_have_count(6)
        expect(page.locator("#points tr.best")).to_have_count(2)
        assert page.locator("body > main").evaluate("e => e.scrollWidth <= innerWidth"), (
            "no sideways scrolling"
        )
        paper, ink = (
            _shades(page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")),
            _shades(page.locator("#operating-curve text").first.evaluate("e => getComputedStyle(e).fill")),
        )
        assert (paper > ink) == (scheme == "light")
        assert abs(paper - ink) > 300, "letters in charts can be read"
        assert complaints == []


def _shades(colour: str) -> int:
    """The sum of red, green and blue of `rgb(1, 2, 3)`."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
