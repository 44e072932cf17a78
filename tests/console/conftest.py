"""A real Chromium, and a page in it that may not misbehave unseen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from console.stage import Stage, stage

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ELSEWHERE = "evil.example"
REBOUND = f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1"  # a name that was made to point here
PATIENCE_MS = 60_000  # a browser needs much of a machine, and others may have it
expect.set_options(timeout=PATIENCE_MS)
# The page asks for its numbers once a second, which most tests wait for, some of them ten times.
OFTENER = """{
  const wait = window.setTimeout;
  window.setTimeout = (what, ms, ...rest) => wait(what, ms > 500 && ms <= 1000 ? ms / 4 : ms, ...rest);
}"""


def find_chromium() -> str:
    """Never skipped unseen: a machine without a browser has to say that it does without."""
    named = os.environ.get("CARPOOL_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return found
    if os.environ.get("CARPOOL_NO_BROWSER") == "1":
        pytest.skip("CARPOOL_NO_BROWSER=1: the page is not tested")
    pytest.fail(
        "no Chromium found: install one (Debian: apt-get install chromium) or set CARPOOL_NO_BROWSER=1"
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One per module and no longer: it keeps an event loop in this thread, which other tests need."""
    chromium = find_chromium()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", REBOUND],
            timeout=2 * PATIENCE_MS,
        )
        yield running
        running.close()


@pytest.fixture
def staged() -> Iterator[Stage]:
    with stage() as running:
        yield running


@dataclass
class Watched:
    """A page, and everything it should not have done."""

    page: Page
    stage: Stage
    complaints: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # parts of complaints that the test provokes

    def watch(self) -> None:
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("response", self._answered)

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data") and f"{parts.scheme}://{parts.netloc}" != self.stage.url:
            self.complaints.append(f"another host: {url}")

    def _answered(self, response: Response) -> None:
        if response.status >= 500:
            self.complaints.append(f"status {response.status}: {response.url}")

    def unexpected(self) -> list[str]:
        return [text for text in self.complaints if not any(part in text for part in self.expected)]

    def open(self) -> Page:
        self.page.goto(f"{self.stage.url}/")
        self.page.get_by_role("radio", name="detector").wait_for(state="attached")
        return self.page

    def choose(self, model: str) -> None:
        self.page.get_by_role("radio", name=model).check(force=True)

    def close(self) -> None:
        """The page goes first: it asks every second, and what a test answers for the server would be asked
        of the server itself once the test no longer does."""
        self.page.goto("about:blank")
        self.page.unroute_all(behavior="ignoreErrors")  # one may be under way
        self.page.context.close()
        assert not self.unexpected()


def watched(browser: Browser, staged: Stage, **options: Any) -> Watched:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(OFTENER)
    found = Watched(context.new_page(), staged)
    found.watch()
    return found


@pytest.fixture
def console(browser: Browser, staged: Stage) -> Iterator[Watched]:
    found = watched(browser, staged)
    yield found
    found.close()
