"""The page's own arithmetic, run where it runs: in a real browser, one function at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from carpool.observe.columns import BATCH_BOUNDS, SECONDS_BOUNDS
from carpool.vision.draw import colour as drawn_in
from console.stage import KNOBS, PROFILE, stage

CALL = "async ([file, name, given]) => (await import(`/console/${file}.js`))[name](...given)"


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with stage() as running:
        context = browser.new_context()
        opened = context.new_page()
        opened.goto(f"{running.url}/console/icon.svg")  # any page of the same origin
        yield opened
        context.close()


def call(page: Page, function: str, *given: Any) -> Any:
    file, _, name = function.partition(".")
    return page.evaluate(CALL, [file, name, given])


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


BOUNDS = [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("buckets", "q", "found"),
    [
        ([0, 0, 0, 0], 0.5, None),
        ([10, 0, 0, 0], 0.5, {"value": near(0.5), "beyond": False}),
        ([0, 10, 0, 0], 0.5, {"value": near(1.5), "beyond": False}),
        ([5, 0, 5, 0], 0.5, {"value": near(1.0), "beyond": False}),
        ([5, 0, 5, 0], 0.9, {"value": near(3.6), "beyond": False}),
        ([1, 1, 1, 97], 0.99, {"value": near(4.0), "beyond": True}),
    ],
)
def test_percentiles_are_interpolated_inside_a_bucket(page: Page, buckets: Any, q: float, found: Any) -> None:
    assert call(page, "histogram.quantile", buckets, BOUNDS, q) == found


@pytest.mark.parametrize(
    ("buckets", "limit", "share"),
    [
        ([0, 0, 0, 0], 2, None),
        ([1, 1, 1, 1], 2, 0.5),  # a bound: exact
        ([0, 0, 4, 0], 3, 0.5),
        ([0, 0, 0, 4], 9, 0.0),  # nobody knows how far above
        ([4, 0, 0, 0], 0.25, 0.25),
    ],
)
def test_the_share_within_a_promise(page: Page, buckets: Any, limit: float, share: Any) -> None:
    assert call(page, "histogram.shareWithin", buckets, BOUNDS, limit) == share


def test_the_console_opens_the_model_that_is_most_worth_a_look(page: Page) -> None:
    def opened(*models: dict[str, Any]) -> Any:
        found = "async (models) => (await import('/console/health.js')).worthALook(models, (m) => m.tone)"
        best = page.evaluate(found, list(models))
        return best and best["name"]

    def model(name: str, tone: str = "quiet", **more: Any) -> dict[str, Any]:
        return {"name": name, "tone": tone, "state": "READY", "newest": True, "task": None, **more}

    calm, images = model("a"), model("b", task="detect")
    assert opened(calm, images) == "b"
    assert opened(calm, images, model("c", "warn")) == "c"
    assert opened(model("a", "warn"), images, model("c", "bad")) == "c"
    assert opened(images, model("c", "bad", newest=False), model("d", "bad", state="UNAVAILABLE")) == "b"
    assert opened(calm) == "a"
    assert opened(model("a", state="LOADING")) == "a"
    assert opened() is None


def test_buckets_of_batch_sizes_are_named(page: Page) -> None:
    named = ["1", "2", "3–4", "5–8", "9–16", "17–32", "33–64", "65–128", "129–256", "> 256"]
    assert call(page, "histogram.labels", list(map(int, BATCH_BOUNDS))) == named


def counts(ok: int = 0, **words: object) -> dict[str, object]:
    """What happened in a window, as `between` says it."""
    empty = [0] * (len(SECONDS_BOUNDS) + 1)
    return {
        "seconds": 10,
        "ok": ok,
        "failures": {},
        "sheds": {},
        "request": {"buckets": [ok, *empty[1:]], "sum": ok * 0.001},
        **words,
    }


def happened(ok: int = 0, **more: object) -> dict[str, object]:
    answered = {"latency": {"buckets": {"0": ok}, "sum": ok * 0.001}} if ok else {}
    return {**answered, **more}


HISTORY = """async ([samples, seconds, end]) => {
    const { History } = await import("/console/history.js");
    const history = new History({ seconds: [0.001, 0.01], batch: [1, 2] });
    for (const [clock, delta] of samples) history.add(clock, 1, delta);
    const window = history.window(seconds, end ?? Infinity);
    const series = history.series(120, 1, (found) => found.ok / found.seconds, end ?? Infinity);
    return { window, series, first: history.first };
}"""


def test_a_window_is_the_difference_of_its_ends(page: Page) -> None:
    samples = [(float(second), happened(10, pending=second)) for second in range(30)]
    found = page.evaluate(HISTORY, [samples, 10])
    assert found["window"]["seconds"] == 10
    assert found["window"]["ok"] == 100
    assert found["window"]["request"]["buckets"][0] == 100
    assert found["window"]["pending"] == 29
    assert {point["value"] for point in found["series"]} == {10}
    assert found["series"][-1]["age"] == 0


def test_a_window_may_end_before_now(page: Page) -> None:
    samples = [(float(second), happened(second)) for second in range(1, 30)]
    found = page.evaluate(HISTORY, [samples, 2, 10.5])
    assert (found["window"]["from"], found["window"]["to"]) == (8, 10)
    assert found["window"]["ok"] == 9 + 10
    assert found["series"][-1]["value"] == 10


def test_silence_is_counted_and_sheds_add_up(page: Page) -> None:
    samples = [
        (1.0, happened(rejected={"overload": 7})),
        (2.0, None),
        (3.0, happened(rejected={"overload": 1, "given-up": 2})),
    ]
    found = page.evaluate(HISTORY, [samples, 3])["window"]
    assert found["sheds"] == {"overload": 8, "given-up": 2}
    assert (found["seconds"], found["pending"]) == (3, 0)
    assert page.evaluate(HISTORY, [samples, 1])["window"]["sheds"] == {"overload": 1, "given-up": 2}


def test_history_is_bounded_and_ignores_a_point_seen_twice(page: Page) -> None:
    samples = [(float(number), happened(1)) for number in range(2000)]
    found = page.evaluate(HISTORY, [[*samples, samples[-1]], 3600])
    assert found["window"]["seconds"] <= 970
    assert len(found["series"]) == 121


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("number", 0, "0"),
        ("number", 0.44, "0.4"),
        ("number", 2.999, "3"),
        ("number", 12_345.6, "12,346"),
        ("number", None, "–"),
        ("milliseconds", 3.2, "3.2 ms"),
        ("milliseconds", 0.012, "0.01 ms"),
        ("milliseconds", 12_340, "12.3 s"),
        ("percent", 0.9999, "99.99 %"),
        ("percent", 0.999999, "99.99 %"),
        ("percent", 1, "100 %"),
        ("percent", 0.00001, "< 0.1 %"),
        ("percent", 0.123, "12.3 %"),
        ("bytes", 999, "999 B"),
        ("bytes", 1_540_000, "1.5 MB"),
        ("duration", 59.9, "59 s"),
        ("duration", 3_700, "1 h 1 min"),
        ("duration", 90_000, "1 d 1 h"),
    ],
)
def test_numbers_as_people_read_them(page: Page, function: str, value: Any, text: str) -> None:
    assert call(page, f"format.{function}", value) == text


PICTURE = {"width": 100, "height": 50}


def test_a_picture_is_shown_whole(page: Page) -> None:
    assert call(page, "geometry.scaleToFit", PICTURE, {"width": 200, "height": 50}) == 1
    assert call(page, "geometry.scaleToFit", PICTURE, {"width": 50, "height": 500}) == 0.5
    assert call(page, "geometry.scaleToFit", {"width": 0, "height": 0}, PICTURE) == 1


@pytest.mark.parametrize(
    ("box", "rect"),
    [
        ([10, 20, 30, 40], [10, 20, 20, 20]),
        ([30, 40, 10, 20], [10, 20, 20, 20]),  # its corners in the other order
        ([-5, -5, 500, 500], [0, 0, 100, 50]),
        ([1, 2, 3], None),
        (["1", 2, 3, 4], None),
        (None, None),
    ],
)
def test_boxes_stay_inside_the_picture(page: Page, box: Any, rect: Any) -> None:
    found = call(page, "geometry.boxInside", box, PICTURE)
    assert found == (rect and dict(zip(("x", "y", "width", "height"), rect, strict=True)))


@pytest.mark.parametrize("points", [None, [[1, "a"]], [1, 2], "text"])
def test_what_is_no_list_of_points_is_none(page: Page, points: Any) -> None:
    assert call(page, "geometry.pointsOf", points) == []


def test_keypoints_are_sure_or_not_and_those_of_people_are_joined(page: Page) -> None:
    points = call(page, "geometry.pointsOf", [[1, 2], [3, 4, 0.9], [5, 6, 0.1]])
    assert [point["sure"] for point in points] == [True, True, False]
    assert call(page, "geometry.limbs", points) == []
    person = [{"x": number, "y": 0, "sure": number != 16} for number in range(17)]
    joined = call(page, "geometry.limbs", person)
    assert [pair[0]["x"] for pair in joined[:2]] == [0, 0]
    assert len(joined) == 15  # one ankle is not sure


DRAWN = """async ([answer]) => {
  const { drawable, summary } = await import("/console/answers.js");
  const things = drawable(answer);
  return [things.length, summary(answer, things)];
}"""


def test_answers_of_every_task_are_summed_up(page: Page) -> None:
    one = {"label": "ship", "class_id": 1, "score": 0.9, "box": [0, 0, 9, 9], "corners": [[0, 0]] * 4}
    assert page.evaluate(DRAWN, [{"detections": [one]}]) == [1, "1 object: ship"]
    depth = {"low": 0.5, "high": 2, "png": ""}
    assert page.evaluate(DRAWN, [{"depth": depth}]) == [0, "Depth from 0.50 to 2.00, in the model's own unit"]


def test_a_class_has_the_colour_that_the_server_draws_it_in(page: Page) -> None:
    for number in (0, 1, 2, 17, 79, 999):
        assert tuple(call(page, "geometry.colourBytes", number)) == drawn_in(number)


def test_labels_stay_on_the_picture(page: Page) -> None:
    size = {"width": 30, "height": 10}

    def placed(x: float, y: float) -> Any:
        return call(page, "geometry.placeLabel", {"x": x, "y": y, "width": 20, "height": 20}, size, PICTURE)

    assert placed(10, 25) == {"x": 10, "y": 15}  # above
    assert placed(10, 5) == {"x": 10, "y": 5}  # no room above: inside
    assert placed(90, 25) == {"x": 70, "y": 15}  # not off the right edge


def test_runs_go_down_the_columns(page: Page) -> None:
    size = {"width": 3, "height": 2}
    script = "async ([runs, a, b]) => (await import('/console/geometry.js')).maskFromRuns(runs, a, b)"

    def mask(runs: list[Any], target: Any = size) -> Any:
        return page.evaluate(
            f"async (given) => {{ const m = await ({script})(given); return m && [...m]; }}",
            [runs, size, target],
        )

    assert mask([1, 2, 3]) == [0, 1, 0, 1, 0, 0]
    assert mask([0, 6]) == [1] * 6
    assert mask([3, 0, 0, 3]) == [0, 0, 1, 0, 1, 1]
    assert mask([1, 2]) is None  # too short
    assert mask([-1, 7]) is None
    assert mask([0, 6], {"width": 1, "height": 1}) == [1]


def test_server_timing_is_read_and_what_is_left_is_the_network(page: Page) -> None:
    header = 'decode;dur=1.5, queue;dur=3, infer;dur=8, post;dur=0.5, batch;desc="17"'
    timing = call(page, "timing.parseServerTiming", header)
    assert timing == {"decode": 1.5, "queue": 3, "infer": 8, "post": 0.5, "batch": 17}
    found = call(page, "timing.breakdown", 20, timing)
    assert found["server"] == 13
    assert [part["ms"] for part in found["parts"]] == [1.5, 3, 8, 0.5, 7]
    assert sum(part["share"] for part in found["parts"]) == near(1.0)


@pytest.mark.parametrize("header", [None, "", "junk", "infer;dur=x", "infer;dur=-1", ";;,,=", "total;dur"])
def test_bad_server_timing_is_nothing(page: Page, header: Any) -> None:
    assert call(page, "timing.parseServerTiming", header) == {}


def test_a_clock_that_disagrees_makes_no_negative_time(page: Page) -> None:
    parts = call(page, "timing.breakdown", 5, {"infer": 8})["parts"]
    assert [part["ms"] for part in parts] == [8, 0]


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("photo.jpg", "photo.jpg"),
        ("my photo.jpg", "'my photo.jpg'"),
        ("it's; rm -rf $HOME`x`.jpg", "'it'\\''s; rm -rf $HOME`x`.jpg'"),
        ("", "''"),
    ],
)
def test_the_curl_line_is_safe_to_paste(page: Page, name: str, quoted: str) -> None:
    assert call(page, "curl.shellQuoted", name) == quoted
    line = call(page, "curl.predictLine", "http://x:8000", "a/b c", name, "image/jpeg")
    assert line == (
        "curl -s http://x:8000/models/a%2Fb%20c/predict -H 'Content-Type: image/jpeg' "
        f"--data-binary @{quoted}"
    )


# ---- the batch curve

MEASURED = "measured at start-up"
CURVE = [[1, 8], [4, 14], [16, 38]]


def profile(**changes: Any) -> dict[str, Any]:
    return {**PROFILE, "believed": CURVE, **changes}


@pytest.mark.parametrize(
    ("points", "size", "ms"),
    [(CURVE, 1, 8), (CURVE, 2.5, 11), (CURVE, 10, 26), (CURVE, 20, 46), ([[4, 8]], 2, 8), ([[4, 8]], 8, 16)],
)
def test_the_time_of_a_batch_between_the_points(page: Page, points: Any, size: float, ms: float) -> None:
    assert call(page, "curve.timeAt", points, size) == near(ms)


def recent(*sizes: tuple[int, int, float]) -> dict[str, Any]:
    found = {"seconds": 10, "sizes": sizes, "batches": 0, "mean_batch": None, "mean_ms": None}
    if sizes:
        found |= {"batches": 1, "mean_batch": sizes[0][0], "mean_ms": sizes[0][2]}
    return found


@pytest.mark.parametrize(
    ("found", "slo", "size", "least", "most"),
    [
        (profile(), None, 16, 38, 45),
        (profile(), 50, 16, 50, 60),  # the promise is in the picture
        (profile(), 500, 16, 38, 45),  # too far above for a picture of the curve
        (profile(points=[]), 10, 4, 14, 20),  # no use for batches that take three promises
        (profile(points=[], recent=recent((12, 1, 31))), 10, 12, 30, 40),  # but they run
        (profile(believed=[[1, 8]], points=[]), 50, 2, 8, 20),  # one image at a time
        (profile(believed=[[1, 8], [512, 100]]), None, 512, 100, 120),
    ],
)
def test_how_much_of_the_curve_is_shown(
    page: Page, found: Any, slo: Any, size: int, least: float, most: float
) -> None:
    shown = call(page, "curve.extent", found, slo)
    assert shown["size"] == size
    assert least <= shown["ms"] <= most


@pytest.mark.parametrize("most", [2, 3, 7, 8, 16, 31, 64, 100, 333, 1024])
def test_ticks_are_few_and_end_near_the_end(page: Page, most: int) -> None:
    ticks = call(page, "curve.sizeTicks", most)
    assert ticks == sorted(set(ticks))
    assert ticks[0] == 1
    assert len(ticks) <= 11
    assert most * 0.8 <= ticks[-1] <= most


def speed(factor: float, relearned: bool = False) -> dict[str, Any]:
    return {"factor": factor, "told": 1.0, "relearned": relearned, "instances": [[1.0, 1.1]]}


@pytest.mark.parametrize(
    ("found", "text", "tone"),
    [
        (profile(), "As fast as measured at start-up.", "good"),
        (
            profile(speed=speed(1.02, True)),
            "As fast as measured at start-up; single sizes were re-learned.",
            "good",
        ),
        (profile(speed=speed(1.12, True)), "12 % slower than measured at start-up; re-learned.", "warn"),
        (
            profile(speed=speed(1.6)),
            "60 % slower than measured at start-up; batches are planned with that.",
            "warn",
        ),
        (
            profile(speed=speed(0.8)),
            "20 % faster than measured at start-up; batches are planned with that.",
            "good",
        ),
        (profile(points=[]), "As fast as it was set to be.", "good"),
    ],
)
def test_drift_is_said_plainly(page: Page, found: Any, text: str, tone: str) -> None:
    assert call(page, "curve_words.drift", found) == {"text": text, "tone": tone}


def test_settings_have_as_many_rows_before_they_are_known(page: Page) -> None:
    promising = {"slo_ms": 50, "state": "READY"}
    for model, found in ((promising, profile()), ({"mode": "knobs"}, profile(promise=None, knobs=KNOBS))):
        known, unknown = (
            call(page, "curve_words.settings", model, found),
            call(page, "curve_words.settings", model, None),
        )
        assert [name for name, _ in known] == [name for name, _ in unknown]
    assert ["Capacity", "375 images/s"] in call(page, "curve_words.settings", promising, profile())
    unsure = profile(promise={"largest_batch": 1, "promised_batch": 0, "capacity_rps": 0})
    assert ["Batch under load", "not known"] in call(page, "curve_words.settings", promising, unsure)


def test_a_line_is_broken_where_there_was_no_answer(page: Page) -> None:
    script = (
        """async (points) => (await import("/console/charts.js")).paths(points, (x) => 100 - x, (y) => y)"""
    )
    points = [{"age": age, "value": 1} for age in (9, 8, 2, 1)]
    assert page.evaluate(script, points).count("M") == 2
    assert page.evaluate(script, [{"age": 1, "value": None}]) == ""


@pytest.mark.parametrize(
    ("recent", "word"),
    [
        (None, "ready"),
        (counts(), "idle"),
        (counts(ok=10), "on time"),
        (counts(ok=10, failures={"BACKEND": 1}), "failing"),
        (counts(ok=10, sheds={"overload": 3}), "rejecting"),
        (counts(ok=10, request={"buckets": [0] * 17 + [10], "sum": 1}), "late"),
    ],
)
def test_one_word_for_health(page: Page, recent: Any, word: str) -> None:
    model = {"state": "READY", "slo_ms": 50}
    found = call(page, "health.health", model, recent, {"seconds": SECONDS_BOUNDS})
    assert found["word"] == word
    assert call(page, "health.health", {"state": "LOADING"}, recent, {})["word"] == "loading"


def test_two_histograms_as_outlines(page: Page) -> None:
    assert call(page, "drift.outline", [0.5, 1.0], 1.0) == "M0 55V29.0H80.0V3.0H160.0V55"
    assert call(page, "drift.outline", [], 1.0) == call(page, "drift.outline", [0, 0], 0) == ""
    assert call(page, "drift.extent", [0.0, 0.5, 1.0]) == "0 – 1"
    assert call(page, "drift.extent", [0.00001, 1.0]) == "0.00001 – 1"
    assert call(page, "drift.extent", ["cat", "dog", ""]) == "cat, dog"
    assert call(page, "drift.extent", ["a", "b", "c", "d", ""]) == "a, b, c …"
    assert call(page, "drift.extent", []) == ""


def test_a_promise_is_cut_into_its_steps(page: Page) -> None:
    def step(name: str, between: float, queue: float, infer: float) -> dict[str, Any]:
        phases = {"between": between, "queue": queue, "infer": infer}
        counted = {phase: {"count": 2 if sum_ else 0, "sum": sum_} for phase, sum_ in phases.items()}
        return {"step": name, **counted}

    steps = [step("find", 0.0, 0.004, 0.02), step("kind", 0.002, 0.006, 0.01)]
    parts = call(page, "pipeline.promiseParts", steps, 100)
    assert [(part["label"], part["ms"]) for part in parts] == [
        ("find: wait", near(2.0)),
        ("find: model", near(10.0)),
        ("kind: cut", near(1.0)),
        ("kind: wait", near(3.0)),
        ("kind: model", near(5.0)),
        ("Left", near(79.0)),
    ]
    assert sum(part["share"] for part in parts) == near(1.0)
    assert [part["label"] for part in call(page, "pipeline.promiseParts", [], None)] == []
