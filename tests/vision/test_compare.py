"""When two answers differ, against rules written again here."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Callable, Mapping
from itertools import permutations
from random import Random
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from carpool.types import Array
from carpool.vision import tasks
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.likeness import Difference
from carpool.vision.mask_regions import png_text, run_lengths
from carpool.vision.plans.compare import compare_answers, compare_tensors
from carpool.vision.tasks.task import VisionTask
from later import many

LIMITS = CompareSettings()
IMAGE = {"width": 64, "height": 48}
SCORES = st.sampled_from((0.1, 0.34, 0.36, 0.49, 0.5, 0.51, 0.9, math.nan))
CLASSES = st.sampled_from((("cat", 0), ("dog", 1)))


def differs(task: str, a: Mapping[str, Any], b: Mapping[str, Any], limits: CompareSettings = LIMITS) -> bool:
    """And what must hold of any two answers."""
    there, back = compare_answers(task, a, b, limits), compare_answers(task, b, a, limits)
    assert there.differs == back.differs
    assert there.how_much == pytest.approx(back.how_much, abs=1e-6)
    for one in (there, back):
        assert 0.0 <= one.how_much <= 1.0
        assert one.why
        assert not one.differs or one.how_much > 0.0
    for answer in (a, b):
        same = compare_answers(task, answer, copy.deepcopy(answer), limits)
        assert not same.differs, same
    return there.differs


# ---- boxes


@st.composite
def things(draw: st.DrawFn) -> list[dict[str, Any]]:
    """On a coarse grid, so that many overlap and some are equal; some without area, some without sense."""
    found = []
    for _ in range(draw(st.integers(0, 5))):
        x, y = draw(st.integers(0, 4)) * 8.0, draw(st.integers(0, 3)) * 8.0
        width, height = draw(st.integers(0, 3)) * 8.0, draw(st.integers(1, 3)) * 8.0
        label, number = draw(CLASSES)
        right = draw(st.sampled_from((x + width, x + width, x + width, math.nan)))
        found.append(
            {"label": label, "class_id": number, "score": draw(SCORES), "box": [x, y, right, y + height]}
        )
    return found


def overlap(one: list[float], other: list[float]) -> float:
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)):
        return 1.0
    if any(map(math.isnan, one + other)):
        return 0.0
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(width, 0.0) * max(height, 0.0)
    area = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - shared
    return shared / area if area else 0.0


Alike = Callable[[dict[str, Any], dict[str, Any]], float]


def slow_rule(a: list[dict[str, Any]], b: list[dict[str, Any]], alike: Alike, least: float = 0.5) -> bool:
    """Whether they differ: every way to pair them is tried."""

    def fits(one: dict[str, Any], other: dict[str, Any]) -> bool:
        scored = one["score"] >= 0.35 and other["score"] >= 0.35
        return scored and one["class_id"] == other["class_id"] and alike(one, other) >= least

    places: list[dict[str, Any] | None] = [*b, *[None] * len(a)]
    for order in permutations(range(len(places)), len(a)):
        pairs = [(one, places[number]) for one, number in zip(a, order, strict=True)]
        if any(other is not None and not fits(one, other) for one, other in pairs):
            continue
        lone = [one for one, other in pairs if other is None]
        lone += [other for number, other in enumerate(b) if number not in order]
        if not any(thing["score"] >= 0.5 for thing in lone):
            return False
    return True


@settings(max_examples=many(80), deadline=None)
@given(
    things().filter(lambda found: len(found) <= 4),
    things().filter(lambda found: len(found) <= 4),
    st.randoms(),
)
def test_boxes_against_every_way_to_pair_them(a: list[Any], b: list[Any], random: Any) -> None:
    expected = slow_rule(a, b, lambda one, other: overlap(one["box"], other["box"]))
    assert differs("detect", {"detections": a}, {"detections": b}) == expected
    mixed = b.copy()
    random.shuffle(mixed)
    assert differs("detect", {"detections": a}, {"detections": mixed}) == expected


def box(label: str, x: float, score: float = 0.9, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"label": label, "class_id": number, "score": score, "box": [x, 0.0, x + 10.0, 10.0], **more}


def test_what_differs_is_told() -> None:
    a = {"detections": [box("cat", 0), box("cat", 30), box("dog", 60, number=1)]}
    b = {
        "detections": [
            box("cat", 1, 0.7),
            box("dog", 30, 0.8, number=1),
            box("dog", 60, number=1),
            box("dog", 90, 0.3, 1),
        ]
    }
    found = compare_answers("detect", a, b, LIMITS)
    assert found.differs
    assert found.how_much == pytest.approx(2 / 6)
    assert found.why == "2 of 6 have no partner: cat (0.90) only here; dog (0.80) only there"
    assert found.details["another_class"] == 1
    assert found.details["classes"] == {"missing": {"cat": 1}, "extra": {"dog": 1}}
    assert found.details["score_shift"] == pytest.approx(0.1)


def test_no_box_takes_the_only_partner_of_another() -> None:
    """The first of `a` is closest to the second of `b`, which is all that the second of `a` has."""
    a = {"detections": [box("cat", 2.0), box("cat", 5.0)]}
    b = {"detections": [box("cat", 0.0), box("cat", 2.5)]}
    assert not differs("detect", a, b)


def test_all_close_to_all_takes_no_time_to_speak_of() -> None:
    many, few = ({"detections": [box("cat", 0.001 * n) for n in range(count)]} for count in (600, 300))
    found = compare_answers("detect", many, few, LIMITS)
    assert found.details["missing"] == 300
    assert found.details["extra"] == 0


# ---- poses and turned boxes


def pose(x: float, *points: tuple[float, ...], score: float = 0.9) -> dict[str, Any]:
    return box("person", x, score, keypoints=[list(point) for point in points])


def test_a_pose_is_its_box_and_its_points() -> None:
    first = pose(0, (2, 2, 0.9), (8, 8, 0.9), (5, 5, 0.1))
    moved_a_little = pose(0, (2.3, 2, 0.8), (8, 7.6, 0.9), (0, 0, 0.2))
    moved = pose(0, (9, 9, 0.9), (1, 1, 0.9), (5, 5, 0.1))
    unseen = pose(0, (2, 2, 0.1), (8, 8, 0.1), (5, 5, 0.1))
    without = pose(0, (2, 2), (8, 8))
    answers = [{"detections": [one]} for one in (first, moved_a_little, moved, unseen, without)]
    assert [differs("pose", answers[0], answer) for answer in answers] == [False, False, True, True, True]
    assert not differs("pose", answers[3], answers[3])
    swapped = {"detections": [pose(40, (42, 2, 0.9)), first]}
    assert not differs("pose", {"detections": [first, pose(40, (42, 2, 0.9))]}, swapped)
    broken = {"detections": [pose(0, (math.nan, 2, 0.9), (8, 8, 0.9), (5, 5, 0.1))]}
    assert not differs("pose", broken, answers[0])  # one of two points is alike
    assert differs("pose", broken, answers[0], CompareSettings(iou=0.6))


def turned(x: float, angle: float, width: float = 20.0, height: float = 8.0) -> dict[str, Any]:
    along = np.array([math.cos(angle), math.sin(angle)]) * width / 2
    across = np.array([-math.sin(angle), math.cos(angle)]) * height / 2
    corners = np.add([along + across, along - across, -along - across, -along + across], (x, 20.0))
    around = [*corners.min(axis=0).tolist(), *corners.max(axis=0).tolist()]
    return {
        "label": "ship",
        "class_id": 0,
        "score": 0.9,
        "box": around,
        "corners": corners.tolist(),
        "angle": angle,
    }


def share_by_pixels(one: dict[str, Any], other: dict[str, Any]) -> float:
    masks = []
    for thing in (one, other):
        mask = np.zeros((800, 1200), np.uint8)
        cv2.fillPoly(mask, [np.round(np.array(thing["corners"]) * 16).astype(np.int32)], 1)
        masks.append(mask > 0)
    return float((masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum())


@settings(max_examples=many(60), deadline=None)
@given(st.floats(20, 40), st.floats(20, 40), st.floats(-3.2, 3.2), st.floats(-3.2, 3.2))
def test_turned_boxes_against_their_pixels(x: float, y: float, one: float, other: float) -> None:
    a, b = turned(x, one), turned(y, other)
    alike = share_by_pixels(a, b)
    if abs(alike - 0.5) > 0.02:
        assert differs("obb", {"detections": [a]}, {"detections": [b]}) == (alike < 0.5)


# ---- classes


def classes(**scores: float) -> dict[str, Any]:
    return {
        "classes": [
            {"label": name, "class_id": ord(name[0]), "score": score} for name, score in scores.items()
        ]
    }


def test_the_best_classes_decide() -> None:
    a = classes(cat=0.5, dog=0.3, egg=0.1)
    assert not differs("classify", a, classes(dog=0.3, cat=0.6))
    assert differs("classify", a, classes(dog=0.5, cat=0.4))
    assert not differs("classify", a, classes(dog=0.5, cat=0.4), CompareSettings(top_k=2))
    assert differs("classify", a, classes(cat=0.5, egg=0.4), CompareSettings(top_k=2))
    assert differs("classify", a, {"classes": []})
    assert not differs("classify", {"classes": []}, {"classes": []})
    assert not differs("classify", classes(cat=math.nan), classes(cat=0.5))
    found = compare_answers("classify", a, classes(dog=0.5, cat=0.4), LIMITS)
    assert found.why == "what is the best: cat here; dog there"
    assert found.details["only_first"] == ["cat"]


def test_several_labels_are_each_for_itself() -> None:
    a = classes(cat=0.9, dog=0.8, egg=0.1)
    assert not differs("classify", a, classes(dog=0.95, cat=0.6, fox=0.4))
    assert not differs("classify", a, classes(cat=0.9, dog=0.4))
    assert differs("classify", a, classes(cat=0.9, dog=0.2))
    assert differs("classify", a, classes(cat=0.9, dog=0.8, egg=0.6))


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1)),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1)),
    st.randoms(),
)
@example({}, {"a": 5e-324}, Random(1))
def test_the_order_of_classes_does_not_matter(
    one: dict[str, float], other: dict[str, float], random: Any
) -> None:
    mixed = [*other.items()]
    random.shuffle(mixed)
    assert differs("classify", classes(**one), classes(**other)) == differs(
        "classify", classes(**one), classes(**dict(mixed))
    )


# ---- masks and distances


def mask(
    pixels: Array, label: str, number: int, form: str, score: float = 0.9, fraction: float = 0.0
) -> dict[str, Any]:
    """`fraction` beside whole numbers: the box of an object, not the edge of its pixels."""
    found = {"label": label, "class_id": number, "score": score}
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    edges = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1] if len(rows) else [0, 0, 0, 0]
    found["box"] = [float(edge) + fraction for edge in edges]
    if form == "rle":
        return {**found, "rle": {"size": [*pixels.shape], "counts": run_lengths(pixels)}}
    return {**found, "png": png_text(pixels)}


def patch(top: int, bottom: int, left: int, right: int) -> Array:
    pixels = np.zeros((48, 64), np.uint8)
    pixels[top:bottom, left:right] = 1
    return pixels


FORMS = pytest.mark.parametrize(("one", "other"), [("png", "png"), ("rle", "png"), ("rle", "rle")])


@FORMS
def test_maps_of_classes(one: str, other: str) -> None:
    whole = {"image": IMAGE, "masks": [mask(patch(0, 48, 0, 30), "road", 0, one)]}
    nearly = {
        "image": IMAGE,
        "masks": [mask(patch(0, 48, 0, 28), "road", 0, other), mask(patch(0, 4, 60, 64), "cat", 1, other)],
    }
    less = {"image": IMAGE, "masks": [mask(patch(0, 48, 0, 20), "road", 0, other)]}
    more = {"image": IMAGE, "masks": [*whole["masks"], mask(patch(0, 10, 54, 64), "cat", 1, other)]}
    assert not differs("segment", whole, nearly)  # sixteen pixels of cat come and go
    assert differs("segment", whole, less)
    assert differs("segment", whole, more)
    assert not differs("segment", whole, less, CompareSettings(mask_iou=0.6))
    assert differs("segment", whole, {"masks": []})
    assert compare_answers("segment", whole, less, LIMITS).details["iou"] == {"road": pytest.approx(20 / 30)}


@FORMS
def test_masks_of_objects_have_partners(one: str, other: str) -> None:
    cats = [patch(0, 20, 0, 20), patch(20, 44, 30, 50), patch(0, 3, 60, 63)]
    a = {"masks": [mask(pixels, "cat", 0, one, fraction=0.25) for pixels in cats]}
    b = {"masks": [mask(pixels, "cat", 0, other, fraction=0.31) for pixels in reversed(cats)]}
    assert not differs("segment", a, b)
    assert differs("segment", a, {"masks": b["masks"][1:]})  # however small it is
    shifted = mask(patch(0, 20, 6, 26), "cat", 0, other, fraction=0.5)
    assert differs("segment", a, {"masks": [shifted, *b["masks"][:2]]})
    alone = {"masks": [mask(cats[2], "cat", 0, one, fraction=0.25)]}
    assert differs("segment", alone, {"masks": []})
    empty = {"masks": [mask(patch(0, 0, 0, 0), "cat", 0, one, fraction=0.5)]}
    assert not differs("segment", empty, empty)
    other_size = {"masks": [mask(np.ones((4, 4), np.uint8), "cat", 0, other, fraction=0.1)]}
    assert differs("segment", other_size, {"masks": a["masks"][:1]})


@settings(max_examples=many(60), deadline=None)
@given(arrays.arrays(np.bool_, (9, 11)), arrays.arrays(np.bool_, (9, 11)))
def test_masks_against_sets_of_pixels(one: Array, other: Array) -> None:
    a, b = ({"masks": [mask(pixels, "x", 0, "rle")] if pixels.any() else []} for pixels in (one, other))
    shared = len({*np.argwhere(one)[:, 0].tolist()}) and int((one & other).sum())
    either = int((one | other).sum())
    expected = bool(either) and max(one.sum(), other.sum()) > 0.99 and shared / either < 0.8
    assert differs("segment", a, b) == expected


def distances(values: Array) -> dict[str, Any]:
    low, high = float(values.min()), float(values.max())
    steps = np.rint((values - low) * (65_535 / ((high - low) or 1.0))).astype(np.uint16)
    file = base64.b64encode(cv2.imencode(".png", steps)[1].tobytes()).decode()
    return {"image": IMAGE, "depth": {"low": low, "high": high, "png": file}}


def test_distances() -> None:
    near = np.tile(np.linspace(1, 10, 64, dtype=np.float32), (48, 1))
    assert not differs("depth", distances(near), distances(near + 0.5))
    assert differs("depth", distances(near), distances(near[:, ::-1]))
    assert differs("depth", distances(near), distances(near * 2))
    assert not differs("depth", distances(near * 0), distances(near * 0))
    assert differs("depth", distances(near), distances(near[:40]))
    spot = near.copy()
    spot[:4] = 10
    assert not differs("depth", distances(near), distances(spot))


# ---- numbers


@given(
    arrays.arrays(np.float64, 8, elements=st.floats(-10, 10)),
    arrays.arrays(np.float64, 8, elements=st.floats(-10, 10)),
)
def test_embeddings(one: Array, other: Array) -> None:
    lengths = math.hypot(*one), math.hypot(*other)
    same = np.array_equal(one, other)
    cosine = 1.0 if same else float(one @ other) / (lengths[0] * lengths[1]) if all(lengths) else 0.0
    if abs(cosine - 0.98) > 1e-9:
        assert differs("embed", {"embedding": one.tolist()}, {"embedding": other.tolist()}) == (cosine < 0.98)


def test_embeddings_of_other_lengths_and_without_sense() -> None:
    assert differs("embed", {"embedding": [1.0]}, {"embedding": [1.0, 0.0]})
    assert differs("embed", {"embedding": [math.nan, 1.0]}, {"embedding": [0.0, 1.0]})
    assert differs("embed", {"embedding": [0.0, 0.0]}, {"embedding": [0.0, 1.0]})
    longer = compare_answers("embed", {"embedding": [1.0, 0.0]}, {"embedding": [2.0, 0.0]}, LIMITS)
    assert longer.details["normalize_differs"]
    assert not longer.differs


NUMBERS = st.floats(-100, 100) | st.sampled_from((math.nan, math.inf, -math.inf))


@given(
    arrays.arrays(
        np.float32,
        (2, 3),
        elements=st.floats(-100, 100, width=32) | st.sampled_from((math.nan, math.inf, -math.inf)),
    ),
    st.floats(-2, 2),
)
def test_tensors(values: Array, shift: float) -> None:
    moved = values.copy()
    moved[1, 2] += np.float32(shift)
    a, b = float(values[1, 2]), float(moved[1, 2])
    alike = abs(a - b) <= 1e-3 + 1e-2 * max(abs(a), abs(b)) if math.isfinite(a) else True
    assert compare_tensors({"x": values}, {"x": moved}).differs != alike
    assert compare_tensors({"x": moved}, {"x": values}).differs != alike
    assert not compare_tensors({"x": values}, {"x": values.copy()}).differs


def test_tensors_of_all_kinds() -> None:
    ones = np.ones((2, 2), np.int64)
    assert not compare_tensors({"x": ones}, {"x": ones}).differs
    assert compare_tensors({"x": 100 * ones}, {"x": 100 * ones + 1}).differs
    assert compare_tensors({"x": ones}, {"y": ones}).differs
    assert compare_tensors({"x": ones}, {"x": ones[:1]}).differs
    assert compare_tensors(
        {"x": np.array([b"a", b"b"], object)}, {"x": np.array([b"a", b"c"], object)}
    ).differs
    assert not compare_tensors({"x": np.zeros((0, 4))}, {"x": np.zeros((0, 4))}).differs
    holes = np.array([math.nan, 1.0])
    found = compare_tensors({"x": holes}, {"x": np.array([0.0, 1.0])})
    assert found.differs
    assert found.how_much == 0.5
    assert found.details["outputs"]["x"]["nan"] == 1


def raw(datatype: str, data: list[Any]) -> dict[str, Any]:
    return {"outputs": [{"name": "y", "datatype": datatype, "shape": [len(data)], "data": data}]}


def test_raw_answers() -> None:
    assert not differs("raw", raw("FP32", [1.0, None]), raw("FP32", [1.001, None]))
    assert differs("raw", raw("FP32", [1.0, None]), raw("FP32", [1.0, 2.0]))
    assert differs("raw", raw("INT64", [100]), raw("INT64", [101]))
    assert differs("raw", raw("BYTES", ["a"]), raw("BYTES", ["b"]))
    assert differs("raw", raw("FP32", [1.0]), raw("FP32", [1.0, 2.0]))


# ---- every task


@pytest.mark.parametrize("task", sorted(tasks.kinds()))
def test_every_task_has_its_rule(task: str) -> None:
    """Its own example is the same as itself, and differs from one that says nothing or something else."""
    answer = tasks.kinds()[task].examples()
    if task == "depth":
        answer = {**answer, **distances(np.eye(4, dtype=np.float32))}
    assert not differs(task, answer, {**answer, "version": "2"})
    other: dict[str, dict[str, Any]] = {
        "classify": classes(dog=1.0),
        "depth": distances(1 - np.eye(4, dtype=np.float32)),
        "embed": {"embedding": [0.0, 0.0, 1.0]},
        "raw": raw("FP32", [0.5, -1.5]),
        "segment": {"masks": []},
        "text_regions": {"regions": []},
        "read": {"text": "Invoice 2042"},
        "caption": {"text": "a cat on a sofa"},
    }
    assert differs(task, answer, other.get(task, {"detections": []}))


def test_a_task_from_outside_is_compared_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {
        "model": "m",
        "version": "1",
        "image": IMAGE,
        "brightness": 0.5,
        "tags": ["a", {"n": 3}],
        "note": None,
    }
    assert not differs("brightness", answer, {**answer, "version": "2", "brightness": 0.504})
    assert differs("brightness", answer, {**answer, "brightness": 0.6})
    assert differs("brightness", answer, {**answer, "tags": ["a", {"n": 4}]})
    assert differs("brightness", answer, {**answer, "tags": ["a"]})
    assert differs("brightness", answer, {**answer, "tags": ["a", {"m": 3}]})
    assert not differs("brightness", {"x": math.nan}, {"x": math.nan})
    assert differs("brightness", {"x": math.nan}, {"x": 1.0})
    deep: Any = 1.5
    for _ in range(5000):
        deep = [deep]
    assert not compare_answers("brightness", {"x": deep}, {"x": deep}, LIMITS).differs

    class Own(VisionTask):
        name = "brightness"

        @staticmethod
        def compare(a: Mapping[str, Any], b: Mapping[str, Any], limits: CompareSettings) -> Difference:
            return Difference(abs(a["brightness"] - b["brightness"]) > limits.score, 0.5, "by its own rule")

    monkeypatch.setattr("carpool.vision.plans.compare.kinds", lambda: {"brightness": Own})
    assert not compare_answers("brightness", answer, {**answer, "brightness": 0.9}, LIMITS).differs
    assert (
        compare_answers("brightness", answer, {**answer, "brightness": 1.5}, LIMITS).why == "by its own rule"
    )
