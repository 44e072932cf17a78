"""`/docs`: the picture routes to read and to try, written by the page from what the server describes."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from console.conftest import Watched, watched
from console.stage import EVIL, Stage

PICTURE = Path(__file__).parents[2] / "src" / "carpool" / "demo" / "pictures" / "astronaut.jpg"


def test_every_route_is_described_and_contents_unfold_those_without_a_model(console: Watched) -> None:
    page = console.page
    page.goto(f"{console.stage.url}/docs")
    for path in ("/detect", "/classify", "/segment", "/embed", "/models/{model}/predict"):
        expect(page.get_by_role("heading", name=f"POST {path}", exact=True)).to_be_visible()
    expect(page.get_by_role("heading", name="GET /v2/history", exact=True)).to_be_visible()
    text = page.locator("main").text_content() or ""
    for word in ("detector", "top_k", "X-Carpool-Deadline-Ms", "429", "retry_after_s"):
        assert word in text
    contents = page.get_by_role("navigation", name="Contents")
    expect(contents.get_by_role("link", name="POST /detect", exact=True)).to_be_visible()
    expect(contents.get_by_role("link", name="POST /pose", exact=True)).to_have_count(0)
    expect(page.get_by_role("heading", name="POST /pose", exact=True)).not_to_be_visible()
    contents.get_by_role("link", name="routes of tasks that no model here has").click()
    expect(page.get_by_role("heading", name="POST /pose", exact=True)).to_be_visible()


def test_a_phone_does_not_scroll_sideways(browser: Browser, staged: Stage) -> None:
    found = watched(browser, staged, viewport={"width": 390, "height": 800})
    page = found.page
    page.goto(f"{staged.url}/docs")
    expect(page.get_by_role("heading", name="Errors")).to_be_visible()
    for fold in page.locator("details").all():
        fold.evaluate("node => { node.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    found.close()


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
    assert page.title() == "Carpool: images"


def test_a_picture_can_be_sent_with_options_in_the_query(console: Watched) -> None:
    page = console.page
    page.goto(f"{console.stage.url}/docs")
    section = page.locator("section", has=page.get_by_role("heading", name="POST /detect"))
    section.locator("input[type=file]").set_input_files(PICTURE)
    section.get_by_role("button", name="Send").click()
    expect(section.locator("[aria-live] pre")).to_contain_text('"detections"')
    section.get_by_label("draw the answer").check()
    section.get_by_role("button", name="Send").click()
    expect(section.get_by_role("img")).to_be_visible()
    section = page.locator("section", has=page.get_by_role("heading", name="POST /classify"))
    section.locator("input[type=file]").set_input_files(PICTURE)
    section.get_by_label("top_k").fill("2")
    with page.expect_request("**/classify?*") as asked:
        section.get_by_role("button", name="Send").click()
    assert "top_k=2" in asked.value.url
    expect(section.locator("[aria-live] pre")).to_contain_text('"classes"')
