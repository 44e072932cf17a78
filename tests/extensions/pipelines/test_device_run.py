"""Pipelines whose device keeps the picture, at a door without an engine: what is asked of it, and that it
keeps nothing of a request that is over, whatever happened when."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import orjson
import torch
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.job import INFINITY
from carpool.errors import ModelError, Unavailable
from carpool.extensions.pipelines.pipeline_pictures import PipelineModel
from carpool.extensions.pipelines.pipeline_run import PipelineClient
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import pipeline_settings
from carpool.extensions.torch.picture_slots import PictureSlots
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.sent_pictures import PictureModel, RoutePicture
from carpool.link.engine_client import Ask, Handling
from carpool.link.senders import Sender
from carpool.memory.layout import FILE_AT, find_file, write_file
from carpool.memory.picture_leases import KEPT, KEPT_FILE, NO_ROOM, LeaseSeen, crops_in, read_cuts
from carpool.observe import columns
from carpool.observe.counters import Table, table_bytes
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision import crops
from carpool.vision.decode import Decoded, decode
from carpool.vision.picture_answers import DEFAULT
from carpool.wire.v2 import RequestHead
from extensions.pipelines.test_pipeline_run import STREET, CarriedRun, LaterWorkers, finds, late
from frontend.fake_door import FakeCall, FakeDoor, FakeModel
from frontend.picture_models import SIDE, detector, device_classifier, picture
from heard import Heard

ARENA, PLENTY = 1, 1 << 20
WIDTH, HEIGHT = 64, 48
IMAGES = TensorSpec("images", Datatype.UINT8, (3, SIDE, SIDE))


class Device:
    """What the runner does with such requests, with its own book of kept pictures."""

    def __init__(self, budget: int) -> None:
        self.slots = PictureSlots(lambda _: budget)
        self.slots.open(ARENA)

    def __call__(self, model: PictureModel, head: RequestHead, view: memoryview) -> Array:
        size = head.inputs[0].size
        if size in (FILE_AT, KEPT_FILE):
            start, end = find_file(view, 0)
            seen = [decode(view[start:end])]
            if size == KEPT_FILE:
                lease = LeaseSeen(view, end)  # type: ignore[arg-type]
                pixels = torch.from_numpy(seen[0].pixels).permute(2, 0, 1)
                lease.say(KEPT if self.slots.keep(ARENA, lease, pixels) else NO_ROOM)
        else:
            token, boxes = read_cuts(view, 0, crops_in(size))
            pixels = self.slots.find(ARENA, token)
            if pixels is None:
                raise Unavailable("it is not here", reason="restarting")
            whole = Decoded(pixels.permute(1, 2, 0).numpy(), pixels.shape[2], pixels.shape[1])
            seen = [crops.crop(whole, *box) for box in boxes]
        into = np.empty((len(seen), *model.transform.shape), np.uint8)
        for one, row in zip(seen, into, strict=True):
            model.transform.prepare(one, row)
        return into


class DeviceRun(CarriedRun):
    """A `CarriedRun` whose file is in a slot already: nothing has to be decoded for it."""

    def __init__(
        self,
        found: int,
        *,
        most_together: int = 8,
        if_late: str = "refuse",
        budget: int = PLENTY,
        toml: str = STREET,
        hosted: bool = True,
    ) -> None:
        finder = detector(images=IMAGES, encoded=True, hosted=hosted)
        finder.function = finds(found)
        text = toml.format(most=20, if_late=if_late)
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
        namer = device_classifier("namer", max_batch=most_together, hosted=hosted)
        self.door = FakeDoor(finder, namer, device_classifier("other", hosted=hosted), street)
        self.door.held, self.door.admits = True, False
        self.door.device = self.device = Device(budget)
        self.row = Table(bytearray(table_bytes(1))).block(0).server
        self.service = PictureService(self.door, 1, lambda _: self.row)
        self.workers = LaterWorkers()
        self.service.workers = self.workers  # type: ignore[assignment]
        self.service.renew(self.door.catalog, [self._model_of])
        entry = self.door.catalog.newest["street"]
        model = self.service.model(entry)
        assert isinstance(model, PipelineModel)
        self.model = model
        self.heard = Heard()
        self.answers = self.heard.answers
        file = picture(size=(WIDTH, HEIGHT))
        self.pictures = RoutePicture(model, file, DEFAULT, None)
        if not self.pictures.is_file:
            return
        self.slot = self.door.slot(self.pictures.size)
        write_file(self.slot.view, file)
        self.over, self.decoded = False, True
        times = 0.0, INFINITY, Sender("camera")
        handling = Handling(content=self.pictures)
        ask = Ask(entry, self.pictures.head, self.slot, 0, *times, handling)
        self.call = PipelineClient().infer(ask, self.heard)

    def counted(self, where: str) -> float:
        return float(self.row._cells[columns.by_word("pipelines", "crops")[where]])

    def check_nothing_is_left(self) -> None:
        super().check_nothing_is_left()
        self.device.slots.look()
        assert (len(self.device.slots), self.device.slots.bytes_used) == (0, 0)


def asked_of(run: DeviceRun) -> dict[str, int]:
    return {call.entry.name: call.head.batch for call in run.door.calls}


def test_the_device_is_told_what_to_cut() -> None:
    run = DeviceRun(3)
    run.run_to_the_end()
    document = run.document
    assert [one["kind"]["classes"][0]["label"] for one in document["detections"]] == ["red"] * 3
    assert document["scene"]["classes"][0]["label"] == "red"
    assert document["image"] == {"width": WIDTH, "height": HEIGHT}
    assert asked_of(run) == {"finder": 1, "namer": 3, "other": 1}
    assert all(call.head.encoded for call in run.door.calls)
    assert sorted(run.door.trips[0].reached) == [(1, 3), (2, 1)]
    assert (run.counted("device"), run.counted("cpu")) == (1, 0)
    run.check_nothing_is_left()


def test_what_it_answers_is_what_the_front_end_would_have_cut_for() -> None:
    on_device, here = DeviceRun(4), DeviceRun(4, budget=0)
    for run in (on_device, here):
        run.run_to_the_end()
    assert on_device.document == here.document
    assert (here.counted("device"), here.counted("cpu")) == (0, 1)
    assert [call.head.encoded for call in here.door.calls] == [True, False, False]
    here.check_nothing_is_left()


def test_more_than_a_batch_are_several_requests() -> None:
    run = DeviceRun(4, most_together=3)
    run.run_to_the_end()
    assert [call.head.batch for call in run.door.calls if call.entry.name == "namer"] == [3, 1]
    run.check_nothing_is_left()


def test_nothing_found_needs_no_picture() -> None:
    only = STREET.partition('[[step]]\nname = "scene"')[0] + '[answer]\nif_late = "{if_late}"\n'
    for budget in (0, PLENTY):
        run = DeviceRun(0, budget=budget, toml=only)
        run.run_to_the_end()
        assert run.document["detections"] == []
        assert (run.counted("device"), run.counted("cpu")) == (0, 0)
        run.check_nothing_is_left()


def test_pipelines_whose_pictures_are_needed_here() -> None:
    assert not DeviceRun(1, hosted=False).model.encoded  # the engine's process has the models
    upright = 'each = "find.regions"\ncrop = {{ rectify = true, height = 16, widths = [16] }}'
    assert not DeviceRun(1, toml=STREET.replace('each = "find.boxes"', upright)).model.encoded
    assert DeviceRun(1).model.encoded


def test_a_picture_that_the_device_lost_is_told_in_words() -> None:
    run = DeviceRun(2)
    while not any(call.entry.name == "namer" for call in run.door.calls):
        if run.workers.jobs:
            run.workers.do_one()
        else:
            run.running[0].finish()
    run.device.slots.forget(ARENA)  # as with a new runner
    run.device.slots.open(ARENA)
    run.run_to_the_end()
    (answer,) = run.answers
    assert isinstance(answer.error, Unavailable)
    run.check_nothing_is_left()


ACTIONS = ("work", "answer", "fail", "refuse", "leave", "answer last", "begin", "forget")


@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.sampled_from(("refuse", "without")),
    st.sampled_from((0, PLENTY)),
    st.lists(st.sampled_from(ACTIONS), max_size=20),
)
def test_whatever_happens_the_device_keeps_nothing(
    found: int, together: int, if_late: str, budget: int, actions: list[str]
) -> None:
    run = DeviceRun(found, most_together=together, if_late=if_late, budget=budget)
    for action in actions:
        running: list[FakeCall] = run.running
        if action == "work" and run.workers.jobs:
            run.workers.do_one()
        elif action == "leave":
            run.leave()
        elif action == "forget":
            run.device.slots.forget(ARENA)
        elif running and action == "answer":
            running[0].finish()
        elif running and action == "answer last":
            running[-1].finish()
        elif running and action == "begin":  # it runs, and has not answered yet
            try:
                running[0].inputs()
            except Unavailable:
                assert "forget" in actions
        elif running and action in ("fail", "refuse"):
            running[-1].finish(late() if action == "refuse" else ModelError("it broke"))
    run.run_to_the_end()
    assert len(run.answers) == (0 if run.over else 1)
    run.check_nothing_is_left()
