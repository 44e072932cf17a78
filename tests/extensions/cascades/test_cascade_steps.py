"""Cascades at a door without an engine: who is asked, who answers, and what is said of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, ModelError, Refused, Unavailable
from carpool.extensions.cascades import cascade_steps
from carpool.extensions.cascades.cascade_run import CascadeModel, CascadeRun
from carpool.extensions.pipelines.pipeline_run import PipelineClient
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import pipeline_settings
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.sent_pictures import RoutePicture
from carpool.frontend.pictures.workers import Workers
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Ask, Handling
from carpool.link.senders import Sender
from carpool.observe import columns
from carpool.observe.counters import Table, table_bytes
from carpool.types import Array, Datatype, TensorSpec, Timing
from frontend.fake_door import FakeCall, FakeDoor, FakeModel
from frontend.picture_models import classifier, detector, picture
from heard import Heard

ANIMALS = """
[[step]]
name = "quick"
model = "small"
[[step]]
name = "sure"
model = "large"
escalate = {{ from = "quick", by = "{by}", below = {below} }}
[answer]
under_load = "{under_load}"
"""


class LaterWorkers(Workers):
    """In the place of threads: what is to be done waits until the test does it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.jobs: deque[tuple[Callable[[], Any], Callable[..., None]]] = deque()
        self.busy = False

    def finish(self, work: Callable[[], Any], then: Callable[..., None]) -> None:
        self.jobs.append((work, then))

    def idle(self, work: Callable[[], Any], then: Callable[..., None]) -> bool:
        if not self.busy:
            self.jobs.append((work, then))
        return not self.busy

    @property
    def takes_idle(self) -> bool:
        return not self.busy

    def do_one(self) -> None:
        work, then = self.jobs.popleft()
        try:
            result = work()
        except BaseException as error:
            then(None, error)
        else:
            then(result, None)


def says(*logits: float) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    return lambda inputs: {"logits": np.tile(logits, (len(inputs["images"]), 1))}


class Counted:
    """The counters of the cascade."""

    def __init__(self) -> None:
        self._table = Table(bytearray(table_bytes(1)))
        self.row = self._table.block(0).row(self._table.directory.assign("animals", "1"))

    def read(self, column: int) -> float:
        return float(self._table.models()[0].cells[column])


class Cascade:
    """One request to a cascade; `answers` has what its client was told."""

    def __init__(
        self,
        margin: float = 0.2,
        *,
        by: str = "margin",
        below: float = 0.5,
        under_load: str = "quick",
        row: Counted | None = None,
        models: tuple[FakeModel, FakeModel] | None = None,
        **options: str,
    ) -> None:
        """The cheap model says red, with that margin; the big one says green."""
        other = (1 - margin) / 2
        small, large = models or (classifier("small"), classifier("large"))
        if models is None:
            small.function = says(float(np.log(other + margin)), float(np.log(other)), -40.0)
            large.function = says(0.0, 9.0, 0.0)
        text = ANIMALS.format(by=by, below=below, under_load=under_load)
        settings = pipeline_settings(pipeline_config(text, Path("animals/pipeline.toml"), "animals"))
        assert settings is not None
        assert small.vision is not None
        vision = {"task": small.vision["task"], "input": {"name": "image"}, "encoded": False}
        animals = FakeModel(
            "animals",
            [TensorSpec("image", Datatype.BYTES, (1,))],
            [TensorSpec("answer", Datatype.BYTES, (1,))],
            lambda _: {},
            max_batch=0,
            vision=vision,
            extra={"pipelines": orjson.loads(orjson.dumps(asdict(settings))), "cascades": {}},
        )
        self.door = FakeDoor(small, large, animals)
        self.door.held, self.door.admits = True, False
        self.counted = row or Counted()
        self.service = PictureService(self.door, 1, lambda _: self.counted.row)
        self.workers = LaterWorkers()
        self.service.workers = self.workers
        self.service.renew(self.door.catalog, [self._model_of])
        entry = self.door.catalog.newest["animals"]
        model = self.service.model(entry)
        assert isinstance(model, CascadeModel)
        self.cascade = model.cascade
        self.heard = Heard()
        self.answers = self.heard.answers
        self.pictures = RoutePicture(model, picture(size=(64, 48)), model.read_options(options), None)
        slot = self.door.slot(self.pictures.size)
        times = 0.0, INFINITY, Sender("camera")
        handling = Handling(0.01, content=self.pictures)
        ask = Ask(entry, self.pictures.head, slot, 0, *times, handling)
        self.call = PipelineClient(CascadeRun).infer(ask, self.heard)
        self.pictures.prepare(slot.view)
        self.call.ready(slot)

    def _model_of(self, entry: ModelEntry) -> CascadeModel | None:
        return CascadeModel.found(entry, self.service) if "cascades" in entry.extra else None

    def asked(self, name: str, *, background: bool = False) -> list[FakeCall]:
        return [
            call
            for call in self.door.calls
            if call.entry.name == name and call.handling.background is background
        ]

    def go_on(self, big_fails: CarpoolError | None = None, cheap_fails: CarpoolError | None = None) -> None:
        """To the end; background work, too."""
        fails = {"small": cheap_fails, "large": big_fails}
        while True:
            if self.workers.jobs:
                self.workers.do_one()
                continue
            running = [call for call in self.door.calls if not (call.cancelled or call.answered)]
            if not running:
                break
            running[0].finish(None if running[0].handling.background else fails[running[0].entry.name])
        assert self.door.slots_in_use == []
        assert self.service._kept == 0
        (trip,) = self.door.trips
        assert len(trip.ended) == 1

    @property
    def document(self) -> Any:
        (answer,) = self.answers
        assert answer.error is None, answer.error
        return orjson.loads(answer.outputs[0].data[0])

    def count(self, word: str) -> float:
        return self.counted.read(columns.by_word("cascades", "answered")[word])


@pytest.fixture(autouse=True)
def no_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade_steps, "random", lambda: 1.0)


MARKS = ("answered_by", "escalated", "degraded")


def marks(document: Any) -> tuple[Any, ...]:
    return tuple(document[name] for name in MARKS)


def test_what_the_cheap_model_is_sure_of_it_answers() -> None:
    one = Cascade(margin=0.8)
    one.go_on()
    assert marks(one.document) == ("quick", False, False)
    assert one.document["classes"][0]["label"] == "red"
    assert not one.asked("large")
    assert one.door.trips[0].reached == [(1, 0)]
    assert one.count("cheap") == 1


def test_the_big_model_answers_the_rest() -> None:
    one = Cascade(margin=0.2)
    one.go_on()
    assert marks(one.document) == ("sure", True, False)
    assert one.document["classes"][0]["label"] == "green"
    assert "late" not in one.document
    assert one.answers[0].degraded == ""
    assert one.count("big") == 1


TOO_LATE = Refused("no", reason="cannot-finish")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (TOO_LATE, "overload"),
        (DeadlineExceeded("late"), "overload"),
        (Unavailable("gone", reason="not-ready"), "unavailable"),
    ],
)
def test_under_load_the_cheap_answer_is_given_and_marked(error: CarpoolError, why: str) -> None:
    one = Cascade(margin=0.2)
    one.go_on(big_fails=error)
    assert marks(one.document) == ("quick", False, True)
    assert one.document["classes"][0]["label"] == "red"
    assert one.answers[0].degraded == why
    assert one.count("degraded") == 1


def test_who_refuses_under_load_or_fails_gives_no_cheap_answer() -> None:
    for one, error in (
        (Cascade(under_load="refuse"), TOO_LATE),
        (Cascade(step="sure"), TOO_LATE),
        (Cascade(), ModelError("broken")),
    ):
        one.go_on(big_fails=error)
        (answer,) = one.answers
        assert answer.error is not None
        assert "in step 'sure'" in answer.error.message


def test_a_client_may_insist() -> None:
    sure = Cascade(margin=0.99, step="sure")
    sure.go_on()
    assert marks(sure.document) == ("sure", True, False)
    quick = Cascade(margin=0.0, step="quick")
    quick.go_on()
    assert marks(quick.document) == ("quick", False, False)
    with pytest.raises(InvalidInput, match="step must be quick or sure"):
        Cascade(step="slow")


def test_what_a_client_sees_is_what_it_asked_for() -> None:
    one = Cascade(margin=0.8, by="entropy", below=0.1, top_k="1")
    one.go_on()
    assert len(one.document["classes"]) == 1
    assert marks(one.document) == ("quick", False, False)
    scored = Cascade(margin=0.2, by="margin", score="0.9")
    scored.go_on(big_fails=TOO_LATE)
    assert scored.document["classes"] == []  # the margin is told from what is not shown
    assert scored.document["degraded"]


@given(
    st.floats(0.0, 0.95),
    st.sampled_from(["quick", "refuse"]),
    st.sampled_from([None, TOO_LATE, DeadlineExceeded("late"), ModelError("broken")]),
    st.sampled_from([None, TOO_LATE]),
    st.sampled_from(["", "quick", "sure"]),
)
def test_an_answer_is_marked_exactly_when_the_big_model_did_not_answer(
    margin: float,
    under_load: str,
    big_fails: CarpoolError | None,
    cheap_fails: CarpoolError | None,
    insists: str,
) -> None:
    one = Cascade(margin, under_load=under_load, **({"step": insists} if insists else {}))
    one.go_on(big_fails, cheap_fails)
    (answer,) = one.answers
    if answer.error is not None:
        assert cheap_fails is not None or big_fails is not None
        return
    asked = one.asked("large")
    by_big = bool(asked) and big_fails is None
    assert one.document["degraded"] == bool(answer.degraded) == (bool(asked) and not by_big)
    assert one.document["answered_by"] == ("sure" if by_big else "quick")
    assert one.document["escalated"] == by_big
    assert not (one.document["degraded"] and insists)


def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    one = Cascade(margin=0.2)
    one.door.calls[0].finish()
    assert one.asked("large")
    one.call.cancel()
    one.go_on()
    assert one.answers == []


# ---- detectors


def boxes(score: float) -> FakeModel:
    found = detector("small")
    found.function = lambda inputs: {
        "boxes": np.tile((0.0, 0.0, 8.0, 8.0), (len(inputs["images"]), 4, 1)),
        "scores": np.tile((score, 0.0, 0.0), (len(inputs["images"]), 4, 1)),
    }
    return found


@pytest.mark.parametrize(("score", "asks"), [(0.98, False), (0.6, True), (0.4, True), (0.02, False)])
def test_a_detector_hands_on_what_lies_near_the_score_that_counts(score: float, asks: bool) -> None:
    one = Cascade(by="confidence", below=0.5, models=(boxes(score), detector("large")), score="0.5")
    one.go_on()
    assert bool(one.asked("large")) is asks
    assert "detections" in one.document


# ---- what it is worth


def test_what_was_kept_is_audited_as_spare_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade_steps, "random", lambda: 0.0)
    row = Counted()
    for margin, big_fails in ((0.8, None), (0.2, None), (0.2, TOO_LATE)):
        one = Cascade(margin, row=row)
        one.go_on(big_fails)
        assert len(one.asked("large", background=True)) == (margin == 0.8)
    audits = {word: row.read(column) for word, column in columns.by_word("cascades", "audits").items()}
    assert audits == {"same": 0, "differs": 1, "skipped": 0}  # degraded answers are no agreement
    agrees = Cascade(0.8, row=row)
    agrees.door.models["large", "1"].function = says(9.0, 0.0, 0.0)
    agrees.go_on()
    assert row.read(columns.by_word("cascades", "audits")["same"]) == 1
    busy = Cascade(0.8, row=row)
    busy.workers.busy = True
    busy.go_on()
    assert row.read(columns.by_word("cascades", "audits")["skipped"]) == 1


def test_what_is_spared_is_counted_once_it_is_more_than_the_cheap_model_took() -> None:
    row = Counted()
    one = Cascade(0.8, row=row)
    cascade = one.cascade
    one.go_on()
    assert row.read(columns.single("cascades", "saved")) == 0.0  # nothing is known of the big model
    cheap, big = Timing(infer=0.002, batch=2), Timing(infer=0.080, batch=4)
    cascade.answered(cheap, big, degraded=False, asked=None)
    cascade.answered(cheap, None, degraded=False, asked=None)
    saved = row.read(columns.single("cascades", "saved"))
    assert 0.015 < saved < 0.02
    cascade.answered(cheap, None, degraded=True, asked=None)
    assert row.read(columns.single("cascades", "saved")) == pytest.approx(saved + 0.019)


def test_a_share_that_moves_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []

    class Log:
        def warning(self, event: str, *, what: str, **_: object) -> None:
            told.append((event, what))

    monkeypatch.setattr(cascade_steps, "log", Log())
    cascade, took = Cascade(0.8).cascade, Timing(infer=0.001, batch=1)
    for number in range(5000):
        kept = number % 10 != 0 if number < 2000 else number % 2 == 0
        cascade.answered(took, None if kept else took, degraded=False, asked=None)
    for number in range(500):
        cascade.audited(number < 200 or number % 2 == 0)
    assert told == [("cascade-drift", "kept"), ("cascade-drift", "agreement")]
