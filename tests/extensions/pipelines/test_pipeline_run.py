"""The way of one picture through a pipeline, at a door without an engine: whatever happens when, it is
answered at most once, and nothing is left behind."""

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
from carpool.errors import CarpoolError, InvalidInput, ModelError, Refused
from carpool.extensions.pipelines.picture_graph import Item, Place
from carpool.extensions.pipelines.pipeline_pictures import PipelineModel
from carpool.extensions.pipelines.pipeline_run import PipelineClient
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import pipeline_settings
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.sent_pictures import RoutePicture
from carpool.frontend.pictures.workers import Workers
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Ask, Handling
from carpool.link.senders import Sender
from carpool.observe.counters import Table, table_bytes
from carpool.types import Array, Datatype, PartTiming, StepTiming, TensorSpec
from carpool.vision.decode import Decoded
from carpool.vision.picture_answers import DEFAULT
from frontend.fake_door import FakeCall, FakeDoor, FakeModel
from frontend.picture_models import SIDE, classifier, detector, picture
from heard import Heard

STREET = """
[[step]]
name = "find"
model = "finder"
keep = {{ most = {most} }}
[[step]]
name = "kind"
model = "namer"
each = "find.boxes"
[[step]]
name = "scene"
model = "other"
[answer]
if_late = "{if_late}"
"""


def finds(count: int, best: float = 0.9) -> Callable[[Mapping[str, Array]], dict[str, Any]]:
    """So many boxes, side by side, the first with the best score."""

    def function(inputs: Mapping[str, Array]) -> dict[str, Any]:
        boxes, scores = np.zeros((len(inputs["images"]), 4, 4)), np.zeros((len(inputs["images"]), 4, 3))
        for number in range(count):
            boxes[:, number] = (number * SIDE / 4, 0, (number + 1) * SIDE / 4, SIDE)
            scores[:, number, 0] = best - number / 100
        return {"boxes": boxes, "scores": scores}

    return function


class LaterWorkers(Workers):
    """In the place of threads: what is to be done waits until the test does it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.jobs: deque[tuple[Callable[[], Any], Callable[..., None]]] = deque()

    def finish(self, work: Callable[[], Any], then: Callable[..., None]) -> None:
        self.jobs.append((work, then))

    def do_one(self) -> None:
        work, then = self.jobs.popleft()
        try:
            result = work()
        except BaseException as error:
            then(None, error)
        else:
            then(result, None)


class CarriedRun:
    """One request; `answers` has what its client was told."""

    def __init__(
        self,
        found: int,
        *,
        most: int | str = 20,
        best: float = 0.9,
        most_together: int = 8,
        if_late: str = "refuse",
        aside: bool = True,
    ) -> None:
        """With `aside`, also small crops are cut in a thread."""
        finder = detector()
        finder.function = finds(found, best)
        text = STREET.format(most=most, if_late=if_late)
        settings = pipeline_settings(pipeline_config(text, Path("street/pipeline.toml"), "street"))
        assert settings is not None
        vision = {"task": "detect", "input": {"name": "image"}, "encoded": False}
        street = FakeModel(
            "street",
            [TensorSpec("image", Datatype.BYTES, (1,))],
            [TensorSpec("answer", Datatype.BYTES, (1,))],
            lambda _: {},
            max_batch=0,
            vision=vision,
            extra={"pipelines": orjson.loads(orjson.dumps(asdict(settings)))},
        )
        namer = classifier("namer", max_batch=most_together)
        self.door = FakeDoor(finder, namer, classifier("other"), street)
        self.door.held, self.door.admits = True, False
        row = Table(bytearray(table_bytes(1))).block(0).server
        self.service = PictureService(self.door, 1, lambda _: row)
        self.workers = LaterWorkers()
        self.service.workers = self.workers
        self.service.renew(self.door.catalog, [self._model_of])
        entry = self.door.catalog.newest["street"]
        model = self.service.model(entry)
        assert isinstance(model, PipelineModel)
        if aside:
            for at in model.steps:
                at.is_quick = lambda *_: False  # type: ignore[method-assign]
        self.heard = Heard()
        self.answers = self.heard.answers
        self.pictures = RoutePicture(model, picture(size=(64, 48)), DEFAULT, None)
        self.slot = self.door.slot(self.pictures.size)
        self.over = self.decoded = False
        times = 0.0, INFINITY, Sender("camera")
        handling = Handling(0.01, content=self.pictures)
        ask = Ask(entry, self.pictures.head, self.slot, 0, *times, handling)
        self.call = PipelineClient().infer(ask, self.heard)

    def _model_of(self, entry: ModelEntry) -> PipelineModel | None:
        return PipelineModel.found(entry, self.service) if "pipelines" in entry.extra else None

    def decode(self) -> None:
        """As a `Request` does when its tensor is there, if it still waits."""
        self.decoded = True
        if self.over or self.answers:
            self.slot.release()
            return
        self.pictures.prepare(self.slot.view)
        self.call.ready(self.slot)

    def leave(self) -> None:
        if not self.over and not self.answers:
            self.over = True
            self.call.cancel()

    @property
    def open(self) -> list[FakeCall]:
        return [call for call in self.door.calls if not (call.cancelled or call.answered)]

    @property
    def running(self) -> list[FakeCall]:
        return [call for call in self.open if call.is_ready]

    def run_to_the_end(self) -> None:
        if not self.decoded:
            self.decode()
        while self.workers.jobs or self.running:
            if self.workers.jobs:
                self.workers.do_one()
            else:
                self.running[0].finish()

    @property
    def document(self) -> Any:
        (answer,) = self.answers
        assert answer.error is None, answer.error
        return orjson.loads(answer.outputs[0].data[0])

    def check_nothing_is_left(self) -> None:
        assert self.door.slots_in_use == []
        assert self.open == []
        assert self.service._kept == 0
        assert self.pictures.whole == []
        (trip,) = self.door.trips
        assert len(trip.ended) == 1


@pytest.mark.parametrize("aside", [False, True])
def test_crops_of_one_picture_are_one_request(aside: bool) -> None:
    run = CarriedRun(3, aside=aside)
    run.run_to_the_end()
    document = run.document
    assert [one["kind"]["classes"][0]["label"] for one in document["detections"]] == ["red"] * 3
    assert document["scene"]["classes"][0]["label"] == "red"
    assert (document["model"], document["image"]) == ("street", {"width": 64, "height": 48})
    asked = {call.entry.name: call.head.batch for call in run.door.calls}
    assert asked == {"finder": 1, "other": 1, "namer": 3}
    (trip,) = run.door.trips
    assert sorted(trip.reached) == [(1, 3), (2, 1)]
    assert trip.ended == [True]
    timing = run.answers[0].timing
    assert isinstance(timing, StepTiming)
    images = {name: each.images for name, each in timing.steps if isinstance(each, PartTiming)}
    assert images == {"find": 1, "kind": 3, "scene": 1, "merge": 0}
    run.check_nothing_is_left()


def test_few_small_crops_are_cut_at_once() -> None:
    """A thread would take longer to wake up; crops of many pixels, and many crops, are for a thread."""
    run = CarriedRun(2, aside=False)
    run.decode()
    run.running[0].finish()
    assert {call.entry.name: call.head.batch for call in run.running} == {"other": 1, "namer": 2}
    assert not run.workers.jobs
    namer = run.call._model.steps[1]  # type: ignore[attr-defined]
    small, large = (Item(Place(0, 0, side, side), 0, 0, 0) for side in (20, 150))
    straight = Item(Place(0, 0, 0, 0, ((0.0, 0.0), (9.0, 0.0), (9.0, 9.0), (0.0, 9.0))), 0, 0, 0)
    picture = Decoded(np.zeros((480, 640, 3), np.uint8), 640, 480)
    quick = [namer.is_quick(picture, items) for items in ([small], [small] * 3, [large], [straight])]
    assert quick == [True, False, False, False]
    run.run_to_the_end()
    run.check_nothing_is_left()


@pytest.mark.parametrize("aside", [False, True])
def test_crops_that_cannot_be_cut_are_an_answer(aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise InvalidInput("no such pixels", field="image")

    run = CarriedRun(3, aside=aside)
    monkeypatch.setattr(run.call._model.steps[1], "prepare", broken)  # type: ignore[attr-defined]
    run.run_to_the_end()
    (answer,) = run.answers
    assert isinstance(answer.error, InvalidInput)
    run.check_nothing_is_left()


def test_more_than_a_batch_are_several_requests() -> None:
    run = CarriedRun(4, most_together=3)
    run.run_to_the_end()
    assert [call.head.batch for call in run.door.calls if call.entry.name == "namer"] == [3, 1]
    assert len(run.document["detections"]) == 4
    run.check_nothing_is_left()


def test_only_so_many_are_kept() -> None:
    run = CarriedRun(4, most=2)
    run.run_to_the_end()
    assert len(run.document["detections"]) == 2
    assert (1, 2) in run.door.trips[0].reached


def test_the_score_that_a_step_keeps_is_that_of_its_model_too() -> None:
    """It was without effect below the score of the model, which is 0.25 unless its settings have another."""
    for best, kept in ((0.2, 2), (0.11, 1), (0.05, 0)):
        run = CarriedRun(2, most="8, score = 0.105", best=best)
        run.run_to_the_end()
        assert len(run.document["detections"]) == kept, best
    assert CarriedRun(2, best=0.2).pictures.options.score is None
    run = CarriedRun(2, best=0.2)
    run.run_to_the_end()
    assert run.document["detections"] == []


def test_nothing_found_is_answered_at_once() -> None:
    run = CarriedRun(0)
    run.run_to_the_end()
    assert run.document["detections"] == []
    assert "namer" not in [call.entry.name for call in run.door.calls]
    assert (1, 0) in run.door.trips[0].reached
    run.check_nothing_is_left()


def late() -> Refused:
    return Refused("too late", reason="cannot-finish", predicted_ms=5.0)


def until_asked(run: CarriedRun, model: str) -> FakeCall:
    run.decode()
    while True:
        found = [call for call in run.running if call.entry.name == model]
        if found:
            return found[0]
        if run.workers.jobs:
            run.workers.do_one()
        else:
            next(call for call in run.running if call.entry.name != model).finish()


def test_without_a_step_that_is_late() -> None:
    run = CarriedRun(2, if_late="without")
    until_asked(run, "namer").finish(late())
    run.run_to_the_end()
    assert run.document["late"] == ["kind"]
    assert ["kind" in one for one in run.document["detections"]] == [False, False]
    run.check_nothing_is_left()


@pytest.mark.parametrize(
    ("if_late", "error"),
    [("refuse", late()), ("without", ModelError("it broke")), ("refuse", ModelError("!"))],
)
def test_a_step_that_fails_ends_the_whole(if_late: str, error: CarpoolError) -> None:
    run = CarriedRun(4, if_late=if_late, most_together=2)
    until_asked(run, "namer").finish(error)
    (answer,) = run.answers
    assert type(answer.error) is type(error)
    assert answer.error is not None
    assert answer.error.message == f"in step 'kind', {error.message}"
    run.run_to_the_end()
    assert len(run.answers) == 1
    run.check_nothing_is_left()


def test_no_room_for_crops() -> None:
    run = CarriedRun(2)
    run.decode()
    run.door._allocate = lambda _size: None
    run.run_to_the_end()
    assert run.answers[0].error is not None
    assert run.answers[0].error.reason == "no-slots"
    run.check_nothing_is_left()


ACTIONS = ("decode", "work", "answer", "fail", "refuse", "leave", "answer last")


@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from(("refuse", "without")),
    st.booleans(),
    st.lists(st.sampled_from(ACTIONS), max_size=20),
)
def test_whatever_happens_it_ends_once(
    found: int, together: int, if_late: str, aside: bool, actions: list[str]
) -> None:
    run = CarriedRun(found, most_together=together, if_late=if_late, aside=aside)
    for action in actions:
        running = run.running
        if action == "decode" and not run.decoded:
            run.decode()
        elif action == "work" and run.workers.jobs:
            run.workers.do_one()
        elif action == "leave":
            run.leave()
        elif running and action == "answer":
            running[0].finish()
        elif running and action == "answer last":
            running[-1].finish()
        elif run.open and action in ("fail", "refuse"):
            run.open[-1].finish(late() if action == "refuse" else ModelError("it broke"))
    run.run_to_the_end()
    assert len(run.answers) == (0 if run.over else 1)
    run.check_nothing_is_left()


@pytest.mark.parametrize("broken", ["following", "items", "answer", "kept"])
def test_an_error_that_nobody_expected_is_an_answer(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise KeyError(broken)

    run = CarriedRun(3)
    monkeypatch.setattr(run.call._graph, broken, bug)  # type: ignore[attr-defined]
    run.run_to_the_end()
    (answer,) = run.answers
    assert answer.error is not None
    assert "KeyError" in answer.error.message
    run.check_nothing_is_left()


def test_a_thread_that_cannot_be_had_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CarriedRun(3)

    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(run.workers, "finish", none_left)
    run.run_to_the_end()
    (answer,) = run.answers
    assert answer.error is not None
    run.check_nothing_is_left()
