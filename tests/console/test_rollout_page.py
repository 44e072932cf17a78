"""The panel of a rollout: what it says, what it draws, and that nothing is done before somebody is sure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from console.conftest import Watched, watched
from console.stage import EVIL, Stage
from console.test_page import BOXES, CONTRAST, CONTROLS, IMAGE, NAMELESS, png
from console.test_scripts import call
from later import later

SIDE = {"answers": 900, "errors": 0, "late": 3, "complaints": 0}
PLAN: dict[str, Any] = {"shadow": 0.05, "shadow_h": 24, "canary": [0.1, 0.5], "keep": {"folder": "/data"}}
FOUND: dict[str, Any] = {
    "model": "detector",
    "state": "canary",
    "step": 1,
    "steps": 2,
    "stable": "1",
    "candidate": "2",
    "share": 0.1,
    "shadow": 0.0,
    "paused_in": None,
    "why": f"3 min 10 s of 48 h; errors: not proven yet {EVIL}",
    "elapsed_s": 190.0,
    "counts": {"stable": SIDE, "candidate": SIDE, "compared": 212, "differ": 4, "seen": 9},
    "capacity": {"enough": True, "sentence": "version 2 carries 610/s within 50 ms"},
    "curves": {
        "1": {"points": [[1, 8.0], [16, 38.0]], "capacity_rps": 375.0},
        "2": {"points": [[1, 9.0], [16, 44.0]], "capacity_rps": 310.0},
    },
    "guards": {
        name: {
            "name": name,
            "limit": limit,
            "low": low,
            "high": high,
            "verdict": verdict,
            "sentence": said,
            "rare": 0.06,
        }
        for name, limit, low, high, verdict, said in (
            ("disagreement", 0.05, 0.003, 0.068, "waits", "4 of 212 differ (0.3–6.8 %, limit 5 %)"),
            ("late", 2.0, 0.1, 1.2, "proven", "late: 3 of 900"),
            ("errors", 2.0, 0.0, None, "waits", "errors: 0 of 90"),
            ("feedback", None, 0.0, None, "off", "switched off"),
        )
    },
    "actions": ["promote", "pause", "abort"],
    "plan": PLAN,
    "history": [{"time": 1_763_000_000.0, "from": "", "to": "loading", "step": 0, "why": EVIL}],
    "trouble": "",
}


class Acted:
    """A server whose rollout does as it is told, or as the test says."""

    def __init__(self, page: Page) -> None:
        self.found = dict(FOUND)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.refusal: tuple[int, str] | None = None
        page.route(re.compile(r"/rollout$"), self._answer)

    def _answer(self, route: Route) -> None:
        if route.request.method == "POST":
            self.asked.append(route.request.post_data_json)
            self.keys.append(route.request.headers.get("authorization"))
            if self.refusal:
                status, error = self.refusal
                route.fulfill(status=status, json={"error": error})
                return
            self.found |= {"state": "rolled-back", "share": 0.0, "why": "by hand: false alarms"}
            self.found["actions"] = ["start", "abort"]
        route.fulfill(json=self.found)


def in_rollout(console: Watched, state: str = "canary") -> Acted:
    front = console.stage.front
    front.run(lambda: front.door.renew(extra={"rollout": {"states": {"detector": state}}}))
    return Acted(console.page)


@pytest.fixture
def rolling(console: Watched) -> Acted:
    acted = in_rollout(console)
    console.open()
    console.choose("detector")
    return acted


def test_how_it_stands(console: Watched, rolling: Acted) -> None:
    page = console.page
    panel = page.locator(".rollout")
    expect(panel.locator(".status").first).to_have_text("canary, step 1 of 2, for 3 min")
    expect(panel.locator(".says")).to_contain_text("It waits: 3 min 10 s of 48 h; errors: not proven yet")
    expect(panel.locator("[aria-current=step]")).to_have_text("canary 10 %")
    expect(panel.locator(".states .past")).to_have_text(["loading", "checked", "shadow"])
    shares = "version 1 answers 90.0 %, version 2 answers 10.0 %"
    expect(panel.get_by_role("img", name=shares)).to_be_visible()
    expect(panel.locator(".guards li")).to_have_count(4)
    expect(panel.locator(".guards .range")).to_have_count(3)  # none for one that is switched off
    expect(panel.locator("[data-verdict=proven]")).to_contain_text("limit 2 ×")
    seldom = panel.locator(".guards li", has_text="errors: 0 of 90")
    expect(seldom).to_contain_text("proven at 2.0 % of its responses")
    expect(panel.locator(".two-curves path.candidate")).to_have_count(1)
    expect(panel).to_contain_text("Version 2 carries 610/s within 50 ms.")
    panel.get_by_text("History").click()
    expect(panel.locator("ol.story li")).to_contain_text(EVIL)  # as text
    expect(page).to_have_title("Carpool")
    rolling.found |= {"state": "shadow", "step": 0, "share": 0.0, "shadow": 0.05}
    expect(panel.locator(".legend")).to_contain_text("version 2 is shown 5.0 %")
    console.choose("classifier")
    expect(panel).to_be_hidden()


def test_nothing_is_done_before_somebody_is_sure(console: Watched, rolling: Acted) -> None:
    panel = console.page.locator(".rollout")
    expect(panel.locator("header button")).to_have_text(["Promote", "Pause", "Abort"])
    panel.get_by_role("button", name="Abort").click()
    expect(panel.locator(".sure")).to_contain_text("Every request goes to the stable version again")
    panel.get_by_role("button", name="Cancel").click()
    expect(panel.locator(".sure")).to_be_hidden()
    assert rolling.asked == []
    panel.get_by_role("button", name="Abort").click()
    panel.get_by_label("Why, for the history").fill("false alarms")
    panel.get_by_role("button", name="Yes, abort").click()
    expect(panel.locator(".status").first).to_contain_text("rolled-back")
    expect(panel.locator(".says")).to_contain_text("By hand: false alarms")
    expect(panel.locator("header button")).to_have_count(0)
    assert rolling.asked == [{"action": "abort", "reason": "false alarms"}]


def test_it_asks_for_the_admins_key(console: Watched, rolling: Acted) -> None:
    console.expected = ["401"]
    page = console.page
    rolling.refusal = 401, "this takes an admin key"
    page.get_by_role("button", name="Promote").click()
    expect(page.locator(".sure")).to_contain_text("Promote ignores the guards")
    page.get_by_role("button", name="Yes, promote").click()
    expect(page.locator(".sure .said")).to_have_text("this takes an admin key")
    expect(page.get_by_label("This takes an admin key")).to_be_focused()
    page.locator("#key").fill("secret")
    page.get_by_role("button", name="Use this key").click()
    expect(page.locator("#key-form")).to_be_hidden()
    rolling.refusal = None
    page.get_by_role("button", name="Yes, promote").click()
    expect(page.locator(".sure")).to_be_hidden()
    assert rolling.keys == [None, "Bearer secret"]


def test_pictures_that_differ_side_by_side(console: Watched, rolling: Acted) -> None:
    page = console.page
    answer = {"image": IMAGE, "detections": BOXES}
    line = {"versions": ["1", "2"], "source": EVIL, "why": "cat is missing", "how_much": 0.9, "file": "1.png"}
    lines = [
        {**line, "number": 7, "stable": answer, "candidate": {**answer, "detections": []}},
        {**line, "number": 3, "how_much": 0.2, "file": "", "stable": None, "candidate": None},
    ]
    document = {"kept": True, "disagreements": lines}
    page.route("**/rollout/disagreements?limit=8", lambda route: route.fulfill(json=document))
    page.route("**/rollout/disagreements/7", lambda route: route.fulfill(body=png()))
    panel = page.locator(".differences")
    panel.get_by_text("Images that differ: 4 images of 212 comparisons").click()
    pairs = panel.locator("li:has(.pair)")
    expect(pairs).to_have_count(2)
    expect(pairs.first).to_contain_text("90.0 % cat is missing")
    figures = pairs.first.locator("figure")
    expect(figures.first.locator(".box")).to_have_count(2)
    expect(figures.last).to_contain_text("Version 2 Nothing found in this image.")
    expect(figures.last.locator(".box")).to_have_count(0)
    expect(pairs.last).to_contain_text("Its tensors are not kept.")
    expect(page).to_have_title("Carpool")
    decoded = "(node) => node.decode().then(() => node.naturalWidth)"
    assert figures.first.locator("img").evaluate(decoded) == 64


@pytest.mark.parametrize("scheme", ["light", later("dark")])
def test_on_a_phone(browser: Browser, staged: Stage, scheme: Any) -> None:
    console = watched(browser, staged, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    in_rollout(console)
    page = console.open()
    console.choose("detector")
    page.get_by_role("button", name="Abort").click()
    expect(page.locator(".sure")).to_be_visible()
    page.get_by_text("History").click()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    assert page.evaluate(NAMELESS, CONTROLS) == []
    assert page.evaluate(CONTRAST) == []
    console.close()


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    from console.stage import stage

    with stage() as running:
        opened = browser.new_context().new_page()
        opened.goto(f"{running.url}/console/icon.svg")  # any page of the same origin
        yield opened
        opened.context.close()


def test_in_words(page: Page) -> None:
    def track(**more: Any) -> list[Any]:
        return [each["when"] for each in call(page, "rollout_words.track", {**FOUND, **more})]

    assert track() == ["past"] * 3 + ["now"] + ["later"] * 4
    assert track(state="paused", paused_in="shadow", step=0) == ["past"] * 2 + ["now"] + ["later"] * 5
    assert track(state="failed") == ["never"] * 8
    assert track(state="loading", step=0, plan={**PLAN, "shadow": 0, "canary": []}) == ["now"] + ["later"] * 4
    assert call(page, "rollout_words.standing", {**FOUND, "state": "paused", "paused_in": "full"}) == (
        "paused in full"
    )
    assert call(page, "rollout_words.sentence", {"why": "", "trouble": "no disk"}) == "No disk."
    waiting = {"state": "shadow", "why": "5 min of 1 h", "needs": ["no request has come"], "trouble": ""}
    assert call(page, "rollout_words.sentence", waiting) == "It waits: 5 min of 1 h. no request has come."


@pytest.mark.parametrize(
    ("low", "high", "limit", "found"),
    [
        (0.0, None, 2.0, {"from": 0, "wide": 100}),  # nothing is known
        (2.0, 6.0, 2.0, {"from": 50, "wide": 25}),  # the limit is in the middle
        (0.0, 0.0, 2.0, {"from": 0, "wide": 1}),  # never nothing
        (0.0, 1.0, None, None),
    ],
)
def test_where_an_interval_lies(page: Page, low: Any, high: Any, limit: Any, found: Any) -> None:
    assert call(page, "rollout_words.span", {"low": low, "high": high, "limit": limit}) == found
