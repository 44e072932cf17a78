"""What goes from step to step of a pipeline over pictures: places, kept things, and the one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import ConfigError
from carpool.extensions.pipelines.picture_graph import (
    Item,
    PictureGraph,
    Place,
    StepFacts,
    chunks,
    moved,
    placed,
    width_for,
)
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import CropSettings, pipeline_settings

PLATES = """
[[step]]
name = "read"
model = "reader"
each = "plate.boxes"
[[step]]
name = "plate"
model = "plates"
each = "find.boxes"
[[step]]
name = "find"
model = "detector"
keep = { labels = ["car"], score = 0.5, most = 2 }
[[step]]
name = "scene"
model = "scenes"
"""


def graph(text: str = PLATES) -> PictureGraph:
    settings = pipeline_settings(pipeline_config(text, Path("p/pipeline.toml"), "p"))
    assert settings is not None
    return PictureGraph(settings)


def found(*boxes: tuple[str, float, list[float]]) -> dict[str, Any]:
    listed = [{"label": label, "score": score, "box": box} for label, score, box in boxes]
    return {"image": {"width": 100, "height": 80}, "detections": listed}


def test_steps_come_after_what_they_wait_for() -> None:
    made = graph()
    assert [made.steps[number].name for number in made.order] == ["find", "plate", "read", "scene"]
    assert made.steps[made.base].name == "find"


def test_only_what_is_kept_is_answered() -> None:
    boxes = [("car", 0.9, [0, 0, 1, 1]), ("dog", 0.8, [0, 0, 1, 1]), ("car", 0.4, [0, 0, 1, 1])]
    answer = graph().kept(2, found(*boxes, ("car", 0.7, [0, 0, 2, 2]), ("car", 0.6, [0, 0, 3, 3])))
    assert [one["score"] for one in answer["detections"]] == [0.9, 0.7]


def test_a_whole_journey_in_one_document() -> None:
    made = graph()
    cars = made.kept(2, found(("car", 0.9, [10, 10, 50, 40]), ("car", 0.8, [60, 10, 90, 40])))
    items = made.items(1, [cars], (100, 80))
    assert [(item.owner, item.part, item.place) for item in items] == [
        (0, 0, Place(10, 10, 50, 40)),
        (0, 1, Place(60, 10, 90, 40)),
    ]
    plates = [
        moved(found(("plate", 0.7, [5, 20, 15, 25])), items[0].place or Place(0, 0, 0, 0), (1.0, 1.0)),
        found(),
    ]
    assert plates[0]["detections"][0]["box"] == [15, 30, 25, 35]
    lines = made.items(0, plates, (100, 80))
    assert lines == [Item(Place(15, 30, 25, 35), 0, 0)]
    answer = made.answer(
        {2: [Item()], 1: items, 0: lines, 3: [Item()]},
        {
            2: [cars],
            1: plates,
            0: [{"image": {}, "text": "B-CD 1", "score": 1.0}],
            3: [{"image": {}, "classes": ["street"]}],
        },
    )
    first, second = answer["detections"]
    assert first["plate"]["detections"][0]["read"] == {"text": "B-CD 1", "score": 1.0}
    assert second["plate"] == {"detections": []}
    assert answer["scene"] == {"classes": ["street"]}


def test_steps_that_were_late_are_left_out() -> None:
    made = graph()
    answer = made.answer({2: [Item()]}, {2: [found(("car", 0.9, [0, 0, 9, 9]))]})
    assert answer["detections"] == [{"label": "car", "score": 0.9, "box": [0, 0, 9, 9]}]


@pytest.mark.parametrize(
    ("box", "crop", "place"),
    [
        ([10.5, 10.5, 19.5, 19.5], CropSettings(), (10, 10, 20, 20)),
        ([10, 10, 20, 30], CropSettings(pad=0.1), (9, 8, 21, 32)),
        ([10, 10, 20, 30], CropSettings(square=True), (5, 10, 25, 30)),
        ([50, 40, 51, 41], CropSettings(least=16), (42, 32, 59, 49)),
        ([90, 70, 130, 90], CropSettings(), (90, 70, 100, 80)),
        ([-5, -5, 3, 3], CropSettings(), (0, 0, 3, 3)),
        ([100, 80, 100, 80], CropSettings(), (99, 79, 100, 80)),
    ],
)
def test_what_is_cut_out(box: list[float], crop: CropSettings, place: tuple[int, ...]) -> None:
    assert placed({"box": box}, crop, (100, 80))[:4] == place


numbers = st.floats(-1e4, 1e4)


@given(
    st.tuples(numbers, numbers, numbers, numbers),
    st.builds(CropSettings, st.floats(0, 2), st.booleans(), st.integers(1, 1024)),
    st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
)
def test_every_crop_is_a_part_of_the_picture(
    box: tuple[float, float, float, float], crop: CropSettings, size: tuple[int, int]
) -> None:
    left, top, right, bottom, _ = placed({"box": list(box)}, crop, size)
    assert 0 <= left < right <= size[0]
    assert 0 <= top < bottom <= size[1]


def test_lines_go_where_they_fit() -> None:
    crop = CropSettings(rectify=True, height=48, widths=(160, 320))

    def width(across: float, down: float) -> int:
        corners = ((0.0, 0.0), (across, 0.0), (across, down), (0.0, down))
        return width_for(Place(0, 0, 0, 0, corners), crop)

    assert (width(100, 40), width(240, 40), width(900, 40)) == (160, 320, 320)
    assert width(40, 240) == 320  # it runs downwards


def test_equal_kinds_share_requests() -> None:
    items = [Item(width=width) for width in (160, 320, 160, 160, 320)]
    assert list(chunks(items, 2)) == [[0, 2], [3], [1, 4]]
    assert list(chunks([], 8)) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({2: StepFacts(None)}, "12: step find.model: detector takes tensors, not images"),
        ({1: StepFacts("pose", runs_nothing=True)}, "plates has steps itself"),
        ({2: StepFacts("classify")}, 'each = "find.boxes" needs a step whose task is detect or pose or obb'),
        ({2: StepFacts("detect", labels=("cat", "care"))}, 'has no label "car"; did you mean "care"?'),
    ],
)
def test_models_that_do_not_fit(wrong: dict[int, StepFacts], words: str) -> None:
    facts = [StepFacts("classify"), StepFacts("detect"), StepFacts("detect"), StepFacts("classify")]
    graph().check(facts)
    with pytest.raises(ConfigError) as raised:
        graph().check([wrong.get(number, known) for number, known in enumerate(facts)])
    assert words in str(raised.value)


def test_widths_have_to_fit_the_model() -> None:
    lines = """
    [[step]]
    name = "find"
    model = "finder"
    [[step]]
    name = "read"
    model = "reader"
    each = "find.regions"
    crop = { rectify = true, height = 48, widths = [160, 320] }
    """
    made, finds = graph(lines), StepFacts("text_regions")
    made.check([finds, StepFacts("read", (48, -1))])
    with pytest.raises(ConfigError, match="takes 32 rows"):
        made.check([finds, StepFacts("read", (32, -1))])
    with pytest.raises(ConfigError, match="takes 320 columns"):
        made.check([finds, StepFacts("read", (48, 320))])
