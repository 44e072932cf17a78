"""The page in a real browser: what a person sees, hears from a screen reader, and can do with a keyboard."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from carpool.link.catalog import IndexEntry
from console.conftest import Watched, watched
from console.stage import EVIL, Stage
from frontend.http.front_end import infer, infer_body
from later import later
from waiting import until

WIDTH, HEIGHT = 64, 40
TIMING = 'decode;dur=1.5, queue;dur=2, infer;dur=4, post;dur=0.5, batch;desc="3"'
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}
IMAGE = {"width": WIDTH, "height": HEIGHT}
BOXES = [
    {"label": "cat", "class_id": 15, "score": 0.91, "box": [8, 10, 40, 30]},
    {"label": EVIL, "class_id": 3, "score": 0.55, "box": [0, 0, 64, 40]},
]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encoded(rows: list[bytes], channels: int) -> bytes:
    """A PNG of these rows, 8 bits per channel."""
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def png() -> bytes:
    return encoded([bytes(v for x in range(WIDTH) for v in (x * 4, y * 6, 120)) for y in range(HEIGHT)], 3)


def mask_png() -> str:
    """The upper right quarter."""
    row = b"\0" * (WIDTH // 2) + b"\xff" * (WIDTH // 2)
    mask = encoded([row if y < HEIGHT // 2 else b"\0" * WIDTH for y in range(HEIGHT)], 1)
    return base64.b64encode(mask).decode()


ANSWERS: dict[str, dict[str, Any]] = {
    "detector": {"detections": BOXES},
    "classifier": {
        "classes": [{"label": f"class {n}", "class_id": n, "score": 0.5 / (n + 1)} for n in range(5)]
    },
    "segmenter": {
        "masks": [
            {
                "label": "dog",
                "score": 0.8,
                "box": [0, 0, 32, 40],
                "rle": {"size": [HEIGHT, WIDTH], "counts": [0, HEIGHT * WIDTH // 2, HEIGHT * WIDTH // 2]},
            },
            {"label": "sky", "class_id": 1, "score": 0.7, "box": [32, 0, 64, 20], "png": mask_png()},
        ]
    },
    "embedder": {"embedding": [0.1, -0.2, 0.3]},
}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a picture.png"
    file.write_bytes(png())
    return file


def answer(route: Route) -> None:
    model = route.request.url.split("/models/")[1].split("/")[0]
    assert route.request.post_data_buffer == png()
    assert route.request.headers["content-type"] == "image/png"
    document = {"model": model, "version": "1", "image": IMAGE, **ANSWERS[model]}
    fields = {"content-type": "application/json", "server-timing": TIMING}
    route.fulfill(status=200, headers=fields, body=json.dumps(document))


@pytest.fixture
def answering(console: Watched) -> Watched:
    console.page.route("**/models/*/predict", answer)
    return console


def refuse(page: Page, status: int, **body: Any) -> None:
    page.route("**/predict", lambda route: route.fulfill(status=status, json=body))


# ---- what it shows


def test_models_and_live_numbers(console: Watched) -> None:
    page = console.open()
    expect(page).to_have_title("Carpool")
    expect(page.locator("#server-state")).to_have_text("Ready")
    rows = page.locator("#model-list li")
    expect(rows).to_have_count(7)
    expect(rows.filter(has_text="sleeper")).to_contain_text("loading")
    console.choose("detector")
    page.get_by_role("radio", name="60 s").check(force=True)  # long enough to read all that is below
    expect(page.locator("h1")).to_contain_text("detector")
    expect(page.locator("#model-facts")).to_contain_text("SLO 50 ms")
    tiles = page.locator("#tiles li")
    expect(tiles.filter(has_text="Answered").locator("strong")).to_have_text("0 /s")
    console.stage.gauge("detector", 7, 0.4)
    for _ in range(10):  # once is enough, unless the machine stands still for the seconds that it is shown
        console.stage.count("detector", 400, 0.02, cannot_finish=40)
        with contextlib.suppress(AssertionError):
            expect(tiles.filter(has_text="Answered").locator("strong")).not_to_have_text("0 /s", timeout=6000)
            expect(rows.filter(has_text="detector")).to_contain_text("rejecting", timeout=6000)
            break
    else:
        pytest.fail("answers were counted and never shown")
    expect(tiles.filter(has_text="Waiting").locator("strong")).to_have_text("7")
    expect(tiles.filter(has_text="Saturation").locator("strong")).to_have_text("40.0 %")
    expect(tiles.filter(has_text="p99").locator("strong")).to_have_text("20 ms")
    expect(tiles.filter(has_text="Within SLO").locator("strong")).to_have_text("100 %")
    expect(tiles.filter(has_text="Rejected")).to_contain_text("cannot-finish")
    expect(page.locator(".reasons").first).to_contain_text("took too long for their deadline")
    expect(page.locator(".card", has_text="Batch sizes")).to_contain_text("mean 4 of at most 16")
    expect(page.get_by_role("img", name="Latency: p50")).to_be_visible()
    expect(page.locator("#cache")).to_contain_text("nothing was asked yet")
    page.get_by_role("link", name="cannot-finish").click()
    expect(page).to_have_title("Why requests are rejected · Carpool")
    expect(page.locator("section:target")).to_contain_text("429. After the running batch and the queue")


def test_the_link_of_a_rejection_stays_while_its_figures_change(console: Watched) -> None:
    """Between press and release, too: a click whose link has gone leads nowhere."""
    page = console.open()
    console.choose("detector")
    console.stage.count("detector", 400, 0.02, cannot_finish=40)
    line = page.locator(".reasons li", has_text="cannot-finish")
    share = line.locator(".hint.figure")
    expect(share).to_have_text("100 %")
    line.locator("a").evaluate("link => { link.seen = true }")
    console.stage.count("detector", 400, 0.02, cannot_finish=40, overload=40)
    expect(share).not_to_have_text("100 %")
    assert line.locator("a").evaluate("link => link.seen === true")


def test_the_batch_curve_the_promise_and_where_the_model_works(console: Watched) -> None:
    console.stage.run("detector", (2, 5, 10.0))
    page = console.open()
    console.choose("detector")
    panel = page.locator(".curve")
    expect(panel.locator("circle.measured")).to_have_count(5)
    expect(panel.locator("path.believed")).to_have_count(1)
    expect(panel.locator("path.fit")).to_have_count(1)
    expect(panel.get_by_text("SLO 50 ms")).to_be_visible()
    expect(panel.get_by_text("half of it, 25 ms")).to_be_visible()
    expect(panel.locator("rect.recent")).to_have_count(1)
    expect(panel.get_by_text("batches of 2 take 10 ms")).to_be_visible()
    expect(page.get_by_role("img", name="Time of a batch by its size. Measured 1: 8 ms")).to_be_visible()
    expect(panel.locator(".settings")).to_contain_text("Capacity375 images/s")
    # All at once: the panel is drawn anew with every look at the server.
    read = "(panel) => ['slo', 'half'].map(name => panel.querySelector(`path.limit.${name}`).getBBox().y)"
    promise, half = panel.evaluate(read)
    assert promise < half
    before = panel.locator(".now").bounding_box()
    console.stage.run("detector", (8, 3, 22.0), (16, 1, 60.0))
    console.stage.profiles["detector"] |= {
        "speed": {"factor": 1.3, "told": 1.3, "relearned": True, "instances": [[1.0, 1.1]]},
        "believed": [[1, 10.4], [16, 49.4]],
    }
    expect(panel.get_by_text("batches of 10 take 32 ms")).to_be_visible()
    expect(page.locator("#curve-drift")).to_have_text("30 % slower than measured at start-up; re-learned.")
    panel.locator(".now").evaluate("(node) => Promise.all(node.getAnimations().map((move) => move.finished))")
    after = panel.locator(".now").bounding_box()
    assert before is not None
    assert after is not None
    assert after["x"] > before["x"] + 50
    assert after["y"] < before["y"] - 20
    panel.get_by_text("The same in numbers").click()
    row = panel.locator("tbody tr").filter(has_text="3 × 22 ms")
    expect(row).to_contain_text("822 ms")


def test_the_curve_is_as_tall_as_the_words_beside_it_need(console: Watched) -> None:
    """Also after there were more of them: what was drawn then must not hold the panel open."""
    page = console.open()
    console.choose("detector")
    tall = "() => document.querySelector('.curve-chart').clientHeight"
    drawn = "() => document.querySelector('.curve-chart').viewBox.baseVal.height"
    before = page.evaluate(tall)
    page.evaluate("() => { document.querySelector('.curve-text').style.height = '900px'; }")
    until(lambda: page.evaluate(drawn) > before + 200)
    page.evaluate("() => { document.querySelector('.curve-text').style.height = ''; }")
    until(lambda: page.evaluate(tall) == before)


def test_a_model_without_a_promise_a_curve_or_batches(console: Watched) -> None:
    page = console.open()
    console.choose("tensors")
    panel = page.locator(".curve")
    expect(panel.locator(".settings")).to_contain_text("none: waiting requests run at once")
    expect(panel.locator("path.believed")).to_have_count(1)
    assert panel.locator("circle.measured, path.limit").count() == 0
    expect(panel.locator(".why")).to_contain_text("No SLO and no fixed settings")
    one = {"believed": [[1, 9.0]], "points": [], "max_batch": 1}
    console.stage.profiles["tensors"] |= one
    expect(page.get_by_role("img", name="Line: 6.00 + 2.00 ms × images. Nothing ran")).to_be_visible()
    console.choose("sleeper")
    expect(panel.get_by_text("It is being loaded and measured")).to_be_visible()
    assert panel.locator("path.believed").count() == 0
    console.choose(EVIL)
    expect(panel.get_by_text("It does not serve")).to_be_visible()
    front, long = console.stage.front, "long" * 2000
    index = [IndexEntry(long, "1", "READY"), *front.door.catalog.index]
    front.run(lambda: front.door.renew(index=index))
    console.choose("longlong")
    expect(panel.get_by_text("Asking the engine for the curve")).to_be_visible()
    expect(page.locator("#server-state")).to_have_text("Ready")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 1280


def test_the_address_names_the_model_that_is_looked_at(console: Watched) -> None:
    page = console.open()
    console.choose("segmenter")
    expect(page).to_have_url(re.compile("#segmenter%2F1$"))
    page.reload()
    expect(page.locator("#model-title")).to_have_text("segmenter")
    page.goto(f"{page.url.partition('#')[0]}#embedder%2F1")
    expect(page.locator("#model-title")).to_have_text("embedder")
    page.goto(f"{page.url.partition('#')[0]}#segmenter")  # its newest version
    expect(page.locator("#model-title")).to_have_text("segmenter")
    page.goto(f"{page.url.partition('#')[0]}#embedder")
    expect(page.locator("#model-title")).to_have_text("embedder")
    page.goto(f"{page.url.partition('#')[0]}#%")
    expect(page.locator("#model-title")).to_have_text("embedder")


def test_a_real_request_moves_the_numbers(console: Watched) -> None:
    page = console.open()
    console.choose("tensors")
    expect(page.locator("#model-facts")).to_contain_text("no SLO")
    with console.stage.front.connect() as client:
        for _ in range(12):
            assert infer(client, "tensors", infer_body([TENSOR])).status == 200
    expect(page.locator(".card", has_text="Latency")).to_contain_text(
        re.compile(r"12 answers in the [\d.]+ s to \d\d:\d\d:\d\d")
    )
    page.get_by_role("radio", name="60 s").check(force=True)
    expect(page.locator(".card", has_text="Latency")).to_contain_text("12 answers in the ")
    expect(page.locator("#model-list li", has_text="tensors")).to_contain_text("serving")


def test_a_model_that_cannot_serve_says_why_and_is_only_text(console: Watched) -> None:
    page = console.open()
    console.choose(EVIL)
    expect(page.locator("#model-trouble")).to_have_text(f"the file is no model: {EVIL}")
    expect(page.locator("h1")).to_contain_text(EVIL)
    assert page.locator("img:not(#picture)").count() == 0
    expect(page).to_have_title("Carpool")


def test_a_server_that_is_not_ready_or_gone_is_told(console: Watched) -> None:
    page = console.open()
    console.stage.front.door.serving = False
    expect(page.locator("#server-state")).to_contain_text("restarted")
    front = console.stage.front
    catalog = front.door.catalog
    front.run(lambda: front.door.renew(index=(), ready=False))
    expect(page.locator("h1")).to_contain_text("Starting")
    expect(page.locator("#models-empty")).to_have_text("None yet.")
    front.door.serving = True
    expect(page.locator("h1")).to_contain_text("No models")
    front.door.catalog = catalog
    expect(page.locator("#server-state")).to_have_text("Ready")
    console.expected = ["net::ERR_FAILED"]
    page.route("**/console/live*", lambda route: route.abort())
    expect(page.locator("#server-state")).to_contain_text("No answer")
    page.unroute("**/console/live*")
    expect(page.locator("#server-state")).to_have_text("Ready")


def test_a_page_that_is_opened_after_the_trouble_shows_it(console: Watched) -> None:
    """Rejections happened before anybody looked, and long enough ago that nothing else tells of them."""
    history = console.stage.front.door.table.history
    console.stage.count("detector", 400, 0.02, cannot_finish=349)
    told = lambda: [point for _, point in history.read() if b"cannot-finish" in point]  # noqa: E731
    until(lambda: len(told()) > 0)
    trouble = orjson.loads(told()[0])["time"]
    until(lambda: orjson.loads(history.read()[-1][1])["time"] > trouble + 5.0)
    page = console.open()
    console.choose("detector")
    rejected = page.locator(".card", has_text="Rejected")
    expect(rejected).to_contain_text("349 requests")
    expect(rejected).to_contain_text("cannot-finish")
    expect(rejected).not_to_contain_text("Nothing was rejected")
    expect(page.locator("#window-says")).to_contain_text("The server remembers")


def test_time_can_be_stopped_and_looked_at_closely(console: Watched) -> None:
    page = console.open()
    console.choose("detector")
    says = page.locator("#window-says")
    expect(says).to_contain_text(re.compile(r"Charts: \d\d:\d\d:\d\d to"))
    page.get_by_role("button", name="Pause").click()
    expect(says).to_contain_text("Paused.")
    stopped = says.inner_text()
    console.stage.count("detector", 400, 0.02, cannot_finish=40)
    before = len(console.stage.front.door.table.history.read())
    until(lambda: len(console.stage.front.door.table.history.read()) > before + 8)
    assert stopped.split("The server")[0] == says.inner_text().split("The server")[0]
    page.get_by_role("button", name="Earlier").click()
    page.get_by_role("button", name="Back to live").click()
    expect(page.locator(".card", has_text="Rejected")).to_contain_text("40 requests")
    page.get_by_role("radio", name="15 min").check(force=True)
    chart = page.get_by_role("img", name="Latency: p50")
    chart.click(position={"x": 300, "y": 60})
    expect(page.get_by_role("radio", name="1 min", exact=True)).to_be_checked()
    expect(says).to_contain_text("Paused.")


# ---- a picture


def test_boxes_are_drawn_where_they_are(answering: Watched, picture: Path) -> None:
    page = answering.open()
    answering.choose("detector")
    page.set_input_files("#file", picture)
    expect(page.locator("#answer-status")).to_contain_text("2 objects: cat")
    boxes = page.locator("#overlay .box")
    expect(boxes).to_have_count(2)
    stage = page.locator("#stage").bounding_box()
    assert stage is not None
    scale = min(stage["width"] / WIDTH, stage["height"] / HEIGHT)
    left = stage["x"] + (stage["width"] - WIDTH * scale) / 2
    top = stage["y"] + (stage["height"] - HEIGHT * scale) / 2
    drawn = page.locator("#overlay g[data-index='0'] .box").bounding_box()
    assert drawn is not None
    x1, y1, x2, y2 = BOXES[0]["box"]  # type: ignore[misc]
    wanted = [left + x1 * scale, top + y1 * scale, (x2 - x1) * scale, (y2 - y1) * scale]
    assert [drawn[name] for name in ("x", "y", "width", "height")] == pytest.approx(wanted, abs=2.5)
    expect(page.locator("#overlay text").last).to_have_text("cat 0.91")
    expect(page.locator(".things li").nth(1)).to_contain_text(EVIL)  # as text
    assert page.locator("img:not(#picture)").count() == 0
    expect(page.locator("#curl")).to_contain_text("--data-binary @'a picture.png'")
    legend = page.locator("#time-legend")
    for part in ("Decode1.5 ms", "Wait2 ms", "Model4 ms", "Answer0.5 ms", "Network"):
        expect(legend).to_contain_text(part)
    expect(page.locator("#time-note")).to_contain_text("batch of 3")


def test_every_kind_of_answer(answering: Watched, picture: Path) -> None:
    page = answering.open()
    answering.choose("classifier")
    page.set_input_files("#file", picture)
    expect(page.locator("#answer-status")).to_have_text("class 0, 50.0 %")
    expect(page.locator(".classes li")).to_have_count(5)
    answering.choose("segmenter")  # the picture is sent again
    expect(page.locator("#answer-status")).to_have_text("2 masks: dog, sky")
    expect(page.locator("#masks")).to_be_visible()
    read = "(canvas) => [...canvas.getContext('2d').getImageData(0, 10, 64, 20).data]"
    alphas = page.locator("#masks").evaluate(read)[3::4]
    assert alphas[:WIDTH] == [130] * WIDTH, "up here, both are tinted"
    assert alphas[-WIDTH:] == [130] * 32 + [0] * 32, "down here, only the left one"
    answering.choose("embedder")
    expect(page.locator("#answer-status")).to_have_text("An embedding of 3 numbers")
    expect(page.locator(".strip rect")).to_have_count(3)
    answering.choose("tensors")
    expect(page.locator("#answer-status")).to_contain_text("takes tensors")
    expect(page.locator("#masks")).to_be_hidden()


@pytest.mark.conformance
def test_a_pasted_and_a_dropped_picture(answering: Watched) -> None:
    page = answering.open()
    answering.choose("detector")
    script = """([kind, bytes]) => {
        const data = new DataTransfer();
        data.items.add(new File([Uint8Array.from(bytes)], `${kind}.png`, { type: "image/png" }));
        const given = { bubbles: true, cancelable: true };
        document.body.dispatchEvent(kind === "drop"
            ? new DragEvent("drop", { ...given, dataTransfer: data })
            : new ClipboardEvent("paste", { ...given, clipboardData: data }));
    }"""
    for kind in ("paste", "drop"):
        page.evaluate(script, [kind, list(png())])
        expect(page.locator("#curl")).to_contain_text(f"@{kind}.png")
        expect(page.locator("#overlay .box")).to_have_count(2)


REFUSALS: list[tuple[int, dict[str, Any], str, str]] = [
    (
        429,
        {"error": "no room", "reason": "cannot-finish", "predicted_ms": 93.5, "retry_after_s": 0.125},
        "Rejected, to meet the SLO",
        "about 94 ms",
    ),
    (400, {"error": f"{EVIL} is no picture", "reason": "invalid-input"}, "This image cannot be used", EVIL),
    (503, {"error": "loading", "reason": "model-not-ready"}, "Not now", "still loading"),
]


def test_a_refusal_is_told_kindly_and_what_is_no_picture_is_not_sent(
    console: Watched, picture: Path, tmp_path: Path
) -> None:
    page = console.open()
    console.choose("detector")
    for status, body, title, text in REFUSALS:
        console.expected += [f"status of {status}", f"status {status}"]
        refuse(page, status, **body)
        page.set_input_files("#file", picture)
        expect(page.locator("#answer-status")).to_have_text(title)
        expect(page.locator("#answer-body")).to_contain_text(text)
        expect(page.locator("#answer-body")).to_contain_text(str(body["reason"]))
        expect(page.get_by_role("button", name="Send again")).to_be_enabled()
        assert page.locator("#overlay .box").count() == 0
        page.unroute("**/predict")
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    page.set_input_files("#file", file)
    expect(page.locator("#answer-status")).to_have_text("That is not an image")


# ---- for everybody


def test_it_works_with_the_keyboard_alone(answering: Watched, picture: Path) -> None:
    page = answering.open()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the image")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="API")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Switch to the")).to_be_focused()
    page.keyboard.press("Tab")  # into the list of models, then along it
    expect(page.get_by_role("radio", name="classifier")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("h1")).to_contain_text("detector")
    page.keyboard.press("Tab")  # how much time is shown, and to stop it
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#file")).to_be_focused()
    ring = "() => getComputedStyle(document.querySelector('#file + label')).outlineStyle"
    assert page.evaluate(ring) == "solid", "the focus can be seen"
    # The dialog itself needs a user's key within seconds, which a busy machine cannot promise.
    opened = "(event) => { event.preventDefault(); event.target.dataset.opened = 'yes'; }"
    page.locator("#file").evaluate(f"(node) => node.addEventListener('click', {opened})")
    page.keyboard.press("Enter")
    expect(page.locator("#file")).to_have_attribute("data-opened", "yes")
    page.set_input_files("#file", picture)
    expect(page.locator("#overlay .box")).to_have_count(2)


CONTROLS = "button, a[href], input, select, textarea, [role=img], [role=textbox]"
NAMELESS = """(controls) => [...document.querySelectorAll(controls)]
    .filter((node) => !node.closest("[hidden]"))
    .filter((node) => {
        const labels = [...(node.labels ?? [])].map((label) => label.textContent).join("");
        return !(node.getAttribute("aria-label") || labels || node.textContent).trim();
    }).map((node) => node.outerHTML)"""
CONTRAST = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const channels = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
            const found = channels(getComputedStyle(at).backgroundColor);
            if (found[3] > 250) return found;
        }
        return [255, 255, 255, 255];
    };
    const seen = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
        && !node.closest(".unseen, .skip, svg")
        && [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim()));
    return seen.map((node) => {
        const ink = channels(getComputedStyle(node).color);
        const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), node.className || node.tagName, node.textContent.slice(0, 30)];
    }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", later("dark")])
def test_names_headings_contrast_and_themes(browser: Browser, staged: Stage, scheme: Any) -> None:
    console = watched(browser, staged, color_scheme=scheme)
    page = console.open()
    console.choose("detector")
    expect(page.locator("#server-uptime")).not_to_have_text("–")
    assert page.evaluate(NAMELESS, CONTROLS) == []
    assert page.evaluate(CONTRAST) == []
    levels = page.locator("h1, h2, h3").evaluate_all("nodes => nodes.map((node) => Number(node.tagName[1]))")
    assert levels.count(1) == 1
    assert page.locator("[role=status]").count() >= 2, "what changes is told to screen readers"
    assert page.evaluate("() => new Set([...document.querySelectorAll('[id]')].map((n) => n.id)).size") == (
        page.locator("[id]").count()
    )
    other = "light" if scheme == "dark" else "dark"
    ground = "() => getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    page.get_by_role("button", name=f"Switch to the {other} theme").click()
    assert page.evaluate(ground) != before
    page.reload()
    expect(page.get_by_role("button", name=f"Switch to the {scheme} theme")).to_be_visible()
    assert page.evaluate(ground) != before, "the choice is kept"
    console.close()


# What has moved is told of after the frame that moved it.
SETTLED = """() => new Promise((done) => {
    requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50)));
})"""


@pytest.mark.conformance
def test_a_phone_scrolls_only_downwards_and_nothing_jumps(
    browser: Browser, staged: Stage, picture: Path
) -> None:
    size = {"width": 360, "height": 740}
    console = watched(browser, staged, viewport=size, reduced_motion="reduce", has_touch=True)
    page = console.page
    page.route("**/models/*/predict", answer)
    page.add_init_script(
        """globalThis.shift = 0;
        new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) if (!entry.hadRecentInput) globalThis.shift += entry.value;
        }).observe({ type: "layout-shift", buffered: true });"""
    )
    console.open()
    console.choose("detector")
    page.set_input_files("#file", picture)
    expect(page.locator("#overlay .box")).to_have_count(2)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    for name in ("Choose an image", "Send again"):
        box = page.get_by_text(name, exact=True).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    page.evaluate(SETTLED)
    before = page.evaluate("() => globalThis.shift")
    console.stage.count("detector", 4000, 0.2, overload=40)
    expect(page.locator(".reasons").first).to_contain_text("overload")
    expect(page.locator("#model-trouble")).to_contain_text("It rejects")
    page.evaluate(SETTLED)
    assert page.evaluate("() => globalThis.shift") - before < 0.02
    console.close()


# ---- drift


def test_what_changed_and_which_camera(console: Watched) -> None:
    page = console.page

    def with_drift(route: Route) -> None:
        response = route.fetch()
        document = response.json()
        for model in document["models"]:
            model["drift"] = model["name"] == "detector"
        route.fulfill(response=response, json=document)

    line = {"psi": 1.234, "alarm": True, "bins": [0.0, 0.5, 1.0], "reference": [0.2, 0.8], "now": [0.9, 0.1]}
    camera = {"source": EVIL, "state": "blurred", "alarms": ["sharpness"], "pictures": 7}
    document = {
        "says": "brightness changed",
        "alarms": ["brightness"],
        "measures": [
            {**line, "what": "brightness", "words": "brightness"},
            {
                **line,
                "what": "size",
                "words": "width × height",
                "psi": None,
                "alarm": False,
                "bins": [EVIL, ""],
            },
        ],
        "sources": [camera, {**camera, "source": "door", "state": "", "alarms": []}],
    }
    page.route(re.compile(r"/console/live(\?|$)"), with_drift)
    page.route("**/drift", lambda route: route.fulfill(json=document))
    console.open()
    console.choose("detector")
    panel = page.locator(".drift-panel")
    expect(panel).to_contain_text("Brightness changed; 1 camera not well")
    expect(panel.locator(".measures li")).to_have_count(2)
    expect(panel.locator(".measures li").first).to_contain_text("PSI 1.23")
    expect(panel.locator(".measures li").last).to_contain_text("not judged yet")
    expect(panel.locator(".cameras li").first).to_contain_text("blurred: sharpness")
    expect(panel.locator(".cameras li").last).to_contain_text("well")
    expect(page).to_have_title("Carpool")
    console.choose("classifier")
    expect(panel).to_be_hidden()
