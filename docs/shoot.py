"""The console's screenshots in docs/images, from a real server under real load.

    python docs/shoot.py
    python docs/shoot.py --rollout

starts `carpool serve` with the demo models, sends pictures at a share of what the detector carries, opens the
console in Chromium, asks it about the sample, and takes the whole page in dark and its lower half in light.
With --rollout it starts `carpool demo rollout` and takes the panel of the rollout in its second canary.
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
WIDTH = 1280
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


def opened(browser: Browser, base: str, scheme: Any, model: str) -> Page:
    page = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme).new_page()
    page.goto(base)
    page.get_by_role("radio", name=model).wait_for(state="attached")
    page.get_by_role("radio", name=model).check(force=True)
    return page


def ask_about_the_sample(page: Page) -> None:
    """A busy model may say no: then again."""
    page.locator("#sample").click()
    for _ in range(10):
        page.wait_for_timeout(1500)
        if page.locator("#answer-status[data-tone=good]").count():
            break
        page.locator("#again").click()
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(2, 2)
    page.wait_for_timeout(500)


def save(picture: bytes, file: Path, left: int = 0, top: int = 0) -> None:
    whole = Image.open(BytesIO(picture)).convert("RGB")
    part = whole.crop((left, top, whole.width, whole.height))
    part.quantize(200, dither=Image.Dither.NONE).save(file, optimize=True)
    tell(f"{file}: {part.width} × {part.height}, {file.stat().st_size:,} bytes")


def shoot(base: str, model: str, seconds: float) -> None:
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        pages = {scheme: opened(browser, base, scheme, model) for scheme in ("dark", "light")}
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # the charts fill
            pages["dark"].wait_for_timeout(500)
        for scheme, page in pages.items():
            ask_about_the_sample(page)
            box = page.locator(".curve").bounding_box()
            assert box is not None
            corner = (0, 0) if scheme == "dark" else (round(box["x"]) - 16, round(box["y"]) - 16)
            save(page.screenshot(full_page=True), DOCS / "images" / f"console-{scheme}.png", *corner)
        browser.close()


def shoot_rollout(base: str, scheme: Any) -> None:
    """The panel, as soon as half of the time of the last canary is over."""
    status = f"{base}/v2/models/classifier/rollout"
    while (found := get(status))["state"] != "canary" or found["step"] < 2 or found["elapsed_s"] < 12:
        if found["state"] in ("standby", "rolled-back", "failed"):
            raise SystemExit(f"too late: {found['state']}")
        time.sleep(0.5)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.goto(f"{base}/#classifier%2F2")
        page.locator(".rollout .guards li").first.wait_for()
        page.wait_for_timeout(4000)  # for p99 of both
        save(page.locator(".rollout").screenshot(), DOCS / "images" / "rollout-canary.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nanodet")
    parser.add_argument("--load", type=float, default=0.9, help="of the images per second that it carries")
    parser.add_argument("--seconds", type=float, default=100.0, help="of traffic before the pictures")
    parser.add_argument("--port", type=int, default=8640)
    parser.add_argument("--rollout", action="store_true", help="the panel of a rollout instead")
    asked = parser.parse_args()
    base = f"http://127.0.0.1:{asked.port}"
    logs = Path(tempfile.mkdtemp(prefix="carpool-shoot-"))
    if asked.rollout:
        with process("demo", "rollout", f"--port={asked.port}", "--seconds=25", log=logs / "demo.log"):
            wait_until_ready(base)
            shoot_rollout(base, "light")
        return
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
            shoot(base, asked.model, asked.seconds)
        profile = get(f"{base}/v2/models/{asked.model}/profile")
        tell(f"offered {rate:.1f}/s; {json.dumps(profile['recent'])} {json.dumps(profile['speed'])}")


if __name__ == "__main__":
    main()
