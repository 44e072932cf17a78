"""References, windows and cameras over days of virtual time."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from carpool.extensions.drift.model_drift import MOST_SOURCES, ModelDrift, SampledAnswer, read_reference
from carpool.extensions.drift.settings import DriftSettings
from carpool.extensions.drift.streams import LEAST, Camera

HOUR = 3600.0
SETTINGS = DriftSettings(reference="first-2h")


class Drifting:
    """A model that sees pictures of one number."""

    def __init__(self, settings: DriftSettings = SETTINGS) -> None:
        self.model = ModelDrift("m", settings)
        self.now = 277_778 * HOUR

    def hour(
        self, score: float, pictures: int = LEAST + 1, version: str = "1", labels: str = "a", **more: Any
    ) -> list[str]:
        begun = self.now
        for number in range(pictures):
            self.now = begun + HOUR * ((number + 1) / pictures)
            values = {"score": score + 0.01 * (number % 7), **more}
            self.model.take(version, labels, SampledAnswer("", values, "", False), self.now)
        return [event.name for event in self.model.look(self.now)]

    def says(self, version: str = "1") -> str:
        return str(self.model.document(version, self.now)["says"])

    def learn(self) -> None:
        self.hour(0.5)
        assert self.hour(0.5) == []
        assert "learning" in self.says()
        assert self.hour(0.5) == ["drift-reference-learned"]


def test_an_alarm_in_two_windows_in_a_row() -> None:
    drifting = Drifting()
    drifting.learn()
    drifting.hour(0.5)
    assert drifting.hour(0.9) == []
    assert drifting.hour(0.5) == []
    assert drifting.hour(0.9) == []
    assert drifting.hour(0.9) == ["drift"]
    assert drifting.says().startswith("best score changed: PSI ")
    assert drifting.hour(0.9) == []
    assert drifting.hour(0.5) == ["drift-over"]
    assert drifting.says() == "as in the reference"


def test_fewer_than_300_pictures_are_said_and_not_judged() -> None:
    drifting = Drifting()
    for _ in range(5):
        assert drifting.hour(0.5, pictures=50) == []
    assert "250 images of at least 300" in drifting.says()
    drifting = Drifting()
    drifting.learn()
    drifting.hour(0.5)
    for _ in range(5):
        assert drifting.hour(0.9, pictures=50) == []  # they wait for the others
    assert drifting.model.document("1", drifting.now)["window"]["pictures"] == 250
    reference = drifting.model.reference.written()
    reference["streams"][""]["pictures"] = 20
    reference["streams"][""]["measures"]["score"] = [1.0] * 20
    drifting.model.reference = read_reference(reference, fixed=True)
    for _ in range(4):
        assert drifting.hour(0.9) in ([], ["drift-over"])
    assert "20 images, fewer than 300" in drifting.says()


def test_a_reference_of_other_labels() -> None:
    drifting = Drifting()
    drifting.learn()
    for _ in range(4):
        assert drifting.hour(0.9, labels="b", version="2") == []
    assert "other labels" in drifting.says("2")
    assert drifting.model.document("2", drifting.now)["reference"]["other_labels"]
    drifting.model.learn(1.0, drifting.now)
    assert drifting.hour(0.9, labels="b", version="2") == ["drift-reference-learned"]
    assert drifting.hour(0.9, labels="b", version="2") == []
    assert drifting.hour(0.9, labels="b", version="2") == []
    assert drifting.says("2") in ("as in the reference", "first window: 0 images of at least 300")


def test_what_is_not_a_number() -> None:
    drifting = Drifting()
    for _ in range(2):
        drifting.hour(math.nan, brightness=None, area=[math.nan, None, "x"], classes=[None], unknown=3.0)
    document = drifting.model.document("1", drifting.now)
    assert {line["what"] for line in document["measures"]} >= {"score", "classes"}
    orjson.dumps(document)
    score = next(line for line in document["measures"] if line["what"] == "score")
    assert sum(score["now"]) == 0.0


def test_a_candidate_is_compared_and_not_learned_from() -> None:
    drifting = Drifting()
    for _ in range(3):
        drifting.hour(0.5, version="1")
        drifting.hour(0.9, version="2")
    assert drifting.model.reference.learner == "1"
    for _ in range(3):
        drifting.hour(0.9, version="2")
    assert drifting.model.versions["2"].streams[""].alarms == ("score",)
    assert drifting.model.versions["1"].streams[""].alarms == ()


def test_a_source_per_request() -> None:
    model, now = ModelDrift("m", SETTINGS), 1e9
    for number in range(5000):
        now += 1.0
        model.take("1", "a", SampledAnswer(f"source-{number}", {"score": 0.5}, f"{number}", False), now)
    assert len(model.versions["1"].streams) == MOST_SOURCES + 1
    model.look(now)
    assert len(model.reference.learning) <= MOST_SOURCES + 1
    now += 2 * HOUR
    model.take("1", "a", SampledAnswer("camera", {"score": 0.5}, "x", False), now)
    assert "camera" in model.versions["1"].streams
    assert len(orjson.dumps(model.written())) < 1_000_000


def test_it_goes_on_after_a_restart() -> None:
    drifting = Drifting()
    drifting.learn()
    drifting.hour(0.9)
    kept = orjson.loads(orjson.dumps(drifting.model.written()))
    drifting.model = ModelDrift("m", SETTINGS)
    drifting.model.restore(kept)
    assert drifting.hour(0.9) == ["drift"]
    kept = orjson.loads(orjson.dumps(drifting.model.written()))
    again = ModelDrift("m", SETTINGS)
    again.restore(kept)
    assert again.versions["1"].streams[""].alarms == ("score",)
    assert again.written() == kept


@pytest.mark.parametrize(
    "document",
    [{}, [], None, 3, {"reference": {}, "versions": {}}, {"reference": {"format": 2}, "versions": {}}],
)
def test_what_is_no_state_changes_nothing(document: Any) -> None:
    model = ModelDrift("m", SETTINGS)
    model.take("1", "a", SampledAnswer("", {"score": 0.5}, "", False), 1.0)
    with pytest.raises(ValueError, match=r"not |format"):
        model.restore(document)
    assert model.versions["1"].streams[""].window.pictures == 1


def test_a_clock_that_is_set_back() -> None:
    drifting = Drifting()
    drifting.learn()
    drifting.now -= 1000 * HOUR
    drifting.hour(0.9)
    drifting.hour(0.9)
    assert drifting.hour(0.9) == ["drift"]


def test_learn_and_reset() -> None:
    drifting = Drifting()
    drifting.learn()
    for _ in range(3):
        drifting.hour(0.9)
    drifting.model.learn(1.0, drifting.now)
    drifting.hour(0.9)
    assert drifting.model.versions["1"].streams[""].alarms == ()
    assert drifting.hour(0.9) == []
    drifting.model.reset()
    assert drifting.says() == "there is no reference yet"


def test_black_and_frozen_are_told_apart() -> None:
    camera = Camera()
    for second in range(0, 1200, 60):
        camera.seen("same", True, float(second))
    assert camera.state((), softer=False) == "black"
    camera.seen("same", False, 1200.0)
    assert camera.state((), softer=False) == "frozen"
    camera.seen("other", False, 1260.0)
    assert camera.state((), softer=False) == ""
    assert camera.state(("sharpness",), softer=True) == "blurred"
    assert camera.state(("sharpness",), softer=False) == "changed"


def test_a_camera_that_sends_nothing_is_not_frozen() -> None:
    camera = Camera()
    for second in range(20):
        camera.seen("same", False, float(second))
    assert camera.state((), softer=False) == ""
    camera = Camera()
    for hour in range(3):
        camera.seen("same", False, hour * HOUR)
    assert camera.state((), softer=False) == ""  # three pictures are no frames that come
