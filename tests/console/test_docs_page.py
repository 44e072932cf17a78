"""`/docs`: the picture routes to read and to try, written by the page from what the server describes."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from console.conftest import Watched
from console.stage import EVIL

PICTURE = Path(__file__).parents[2] / "src" / "carpool" / "demo" / "pictures" / "astronaut.jpg"


def test_every_route_is_described(console: Watched) -> None:
    page = console.page
    page.goto(f"{console.stage.url}/docs")
    for path in ("/detect", "/classify", "/segment", "/embed", "/models/{model}/predict"):
        expect(page.get_by_role("heading", name=f"POST {path}", exact=True)).to_be_visible()
    text = page.locator("main").inner_text()
    for word in ("detector", "top_k", "X-Carpool-Deadline-Ms", "429", "retry_after_s"):
        assert word in text


def test_names_are_never_markup(console: Watched) -> None:
    page = console.page

    def describe(route: object) -> None:
        response = route.fetch()  # type: ignore[attr-defined]
        document = response.json()
        document["x-carpool-models"] = [{"name": EVIL, "version": "<1>", "task": "detect"}]
        route.fulfill(response=response, json=document)  # type: ignore[attr-defined]

    page.route("**/openapi.json", describe)
    page.goto(f"{console.stage.url}/docs")
    expect(page.get_by_text(EVIL)).to_be_visible()
    assert page.title() == "Carpool: pictures"


def test_a_picture_can_be_sent(console: Watched) -> None:
    page = console.page
    page.goto(f"{console.stage.url}/docs")
    section = page.locator("section", has=page.get_by_role("heading", name="POST /detect"))
    section.locator("input[type=file]").set_input_files(PICTURE)
    section.get_by_role("button", name="Send").click()
    expect(section.locator("[aria-live] pre")).to_contain_text('"detections"')
    section.get_by_label("draw the answer").check()
    section.get_by_role("button", name="Send").click()
    expect(section.get_by_role("img")).to_be_visible()
