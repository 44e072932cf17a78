"""The console's screenshots in docs/images, from a real server under real load.

    python docs/shoot.py
    python docs/shoot.py --only rollout --look /tmp/look

starts `carpool serve` with the demo models, sends images at a share of what the detector sustains, opens
the console in Chromium, sends the sample, and takes the upper part of the page in dark, and
the batch curve with the charts in light. Then it starts `carpool demo rollout` and takes the rollout's
panel in the second canary, in light. --look also takes both pages whole, on the screens of a desk and a
phone, in light and dark.
Do it on a quiet machine: what it shows is what was measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

DOCS = Path(__file__).parent
PICTURES = DOCS.parent / "src" / "carpool" / "demo" / "pictures"
CARPOOL = [str(Path(sys.executable).parent / "carpool")]
IMAGES = DOCS / "images"
SCREENS = {"desk": (1280, 900), "phone": (390, 844)}
SCHEMES = ("dark", "light")
ROOM = 16  # around a part of the page, in pixels
FOOT = 60  # of the page: its links
LEAST_RATE = 2.0
READY_S = 240.0


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@contextmanager
def process(*command: str, log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        running = subprocess.Popen([*CARPOOL, *command], stdout=file, stderr=file)
        try:
            yield
        finally:
            running.terminate()
            running.wait(60)


def wait_until_ready(base: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            get(f"{base}/health")
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    raise SystemExit("the server did not become ready")


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def page_of(running: Browser, url: str, scheme: Any, screen: str = "desk") -> Page:
    width, height = SCREENS[screen]
    page = running.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
    ).new_page()
    page.goto(url)
    return page


def ask_about_the_sample(page: Page) -> None:
    """A busy model may reject it: then it is sent again."""
    page.locator("#sample").click()
    for _ in range(10):
        page.wait_for_timeout(1500)
        if page.locator("#answer-status[data-tone=good]").count():
            break
        page.locator("#again").click()
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(2, 2)
    page.wait_for_timeout(500)


def save(picture: bytes, file: Path, box: tuple[int, int, int, int] | None = None) -> None:
    part = Image.open(BytesIO(picture)).convert("RGB").crop(box)
    part.quantize(200, dither=Image.Dither.NONE).save(file, optimize=True)
    tell(f"{file}: {part.width} × {part.height}, {file.stat().st_size:,} bytes")


def edges(page: Page, selector: str) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a part of the page, with a little room around it."""
    box = page.locator(selector).bounding_box()
    assert box is not None
    left, top = round(box["x"]), round(box["y"])
    return left - ROOM, top - ROOM, left + round(box["width"]) + ROOM, top + round(box["height"]) + ROOM


def shoot(base: str, model: str, seconds: float, look: Path | None) -> None:
    with browser() as running:
        pages = {scheme: page_of(running, base, scheme) for scheme in SCHEMES}
        for page in pages.values():
            page.get_by_role("radio", name=model).wait_for(state="attached")
            page.get_by_role("radio", name=model).check(force=True)
        pages["dark"].wait_for_timeout(seconds * 1000)  # the charts fill
        for scheme, page in pages.items():
            ask_about_the_sample(page)
            whole = page.screenshot(full_page=True)
            left, top, right, _ = edges(page, ".curve")
            if scheme == "dark":
                save(whole, IMAGES / "console-dark.png", (0, 0, SCREENS["desk"][0], top))
            else:
                height = Image.open(BytesIO(whole)).height
                save(whole, IMAGES / "console-curve.png", (left, top, right, height - FOOT))
        take_all(running, f"{base}/#{model}%2F1", "console", look)


def shoot_rollout(base: str, look: Path | None) -> None:
    """The panel, as soon as half of the time of the last canary is over."""
    status = f"{base}/v2/models/classifier/rollout"
    while (found := get(status))["state"] != "canary" or found["step"] < 2 or found["elapsed_s"] < 12:
        if found["state"] in ("standby", "rolled-back", "failed"):
            raise SystemExit(f"too late: {found['state']}")
        time.sleep(0.5)
    with browser() as running:
        url = f"{base}/#classifier%2F2"
        page = page_of(running, url, "light")
        page.locator(".rollout .guards li").first.wait_for()
        page.wait_for_timeout(4000)  # for p99 of both
        save(page.locator(".rollout").screenshot(), IMAGES / "rollout-canary.png")
        take_all(running, url, "rollout", look)


def take_all(running: Browser, url: str, name: str, look: Path | None) -> None:
    """The whole page on every screen in both schemes, to be looked at."""
    for screen in SCREENS if look else ():
        for scheme in SCHEMES:
            page = page_of(running, url, scheme, screen)
            page.wait_for_timeout(4000)
            assert look is not None
            look.mkdir(parents=True, exist_ok=True)
            save(page.screenshot(full_page=True), look / f"{name}-{screen}-{scheme}.png")
            page.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nanodet")
    parser.add_argument("--load", type=float, default=0.9, help="share of the images/s that it sustains")
    parser.add_argument("--seconds", type=float, default=100.0, help="of traffic before the pictures")
    parser.add_argument("--port", type=int, default=8640)
    parser.add_argument("--only", choices=("console", "rollout"), help="not the other")
    parser.add_argument("--look", type=Path, help="folder for the whole pages on all screens")
    asked = parser.parse_args()
    base = f"http://127.0.0.1:{asked.port}"
    logs = Path(tempfile.mkdtemp(prefix="carpool-shoot-"))
    if asked.only != "rollout":
        shoot_console(asked, base, logs)
    if asked.only != "console":
        with process(
            "demo", "rollout", f"--port={asked.port}", "--seconds=40", "--stay", log=logs / "demo.log"
        ):
            wait_until_ready(base)
            shoot_rollout(base, asked.look)


def shoot_console(asked: argparse.Namespace, base: str, logs: Path) -> None:
    ports = [f"--{name}-port={asked.port + more}" for more, name in enumerate(("http", "grpc", "metrics"))]
    with process("serve", "--host", "127.0.0.1", *ports, log=logs / "serve.log"):
        wait_until_ready(base)
        profile = get(f"{base}/v2/models/{asked.model}/profile")
        tell("measured " + ", ".join(f"{p['size']}: {p['ms']:.1f} ms" for p in profile["points"]))
        rate = max(LEAST_RATE, asked.load * profile["promise"]["capacity_rps"])
        pictures = [f"--image={PICTURES / name}.jpg" for name in ("astronaut", "chelsea", "coffee")]
        target = f"{base}/models/{asked.model}/predict"
        traffic = ("load", target, *pictures, f"--rate={rate:.1f}", f"--duration={asked.seconds + 60:.0f}")
        with process(*traffic, log=logs / "load.log"):
            shoot(base, asked.model, asked.seconds, asked.look)
        profile = get(f"{base}/v2/models/{asked.model}/profile")
        tell(f"offered {rate:.1f}/s; {json.dumps(profile['recent'])} {json.dumps(profile['speed'])}")


if __name__ == "__main__":
    main()
