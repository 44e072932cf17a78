"""A JPEG in, an answer out, with nothing but a plan and the model itself."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from carpool.demo import pictures
from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.decode import decode
from carpool.vision.geometry import Geometry
from carpool.vision.picture_answers import Options
from carpool.vision.plans.picture_plan import PicturePlan
from vision import models
from vision.test_real_detector import session, settings

PHOTOS = {path.stem: path.read_bytes() for path in pictures()}


def asked(plan: PicturePlan, data: bytes) -> tuple[dict[str, Array], Geometry]:
    memory = bytearray(plan.bytes)
    geometry = plan.prepare(data, memory)
    images = np.frombuffer(memory, plan.transform.dtype).reshape(1, *plan.transform.shape)
    boxes, scores = session().run(["boxes", "scores"], {"images": images})
    return {"boxes": boxes[0], "scores": scores[0]}, geometry


def test_a_jpeg_is_answered_and_drawn() -> None:
    plan = PicturePlan(settings(), "nanodet")
    outputs, geometry = asked(plan, PHOTOS["astronaut"])
    answer = plan.answer(outputs, geometry)
    assert answer["image"] == {"width": 512, "height": 512}
    assert [one["label"] for one in answer["detections"]] == ["person"]
    assert plan.answer(outputs, geometry, Options(score=0.99))["detections"] == []
    drawn = decode(plan.drawn(PHOTOS["astronaut"], outputs, geometry, format="png")).pixels
    assert drawn.shape == (512, 512, 3)
    assert not np.array_equal(drawn, decode(PHOTOS["astronaut"]).pixels)


def test_what_it_needs_is_known_beforehand() -> None:
    plan = PicturePlan(settings(), "nanodet")
    assert plan.bytes == 4 * math.prod((3, 416, 416))
    assert plan.task == "detect"
    assert not plan.quick  # 3,549 anchors take a thread
    assert PicturePlan(models.settings({"probabilities": (10,)}, 'task = "classify"'), "m").quick
    assert not PicturePlan(models.settings({"probabilities": (-1,)}, 'task = "classify"'), "m").quick


def test_a_bad_picture_raises() -> None:
    plan = PicturePlan(settings(), "nanodet")
    with pytest.raises(InvalidInput):
        plan.prepare(PHOTOS["coffee"][:5000], bytearray(plan.bytes))


def test_a_file_goes_to_the_device_as_it_is_where_that_decodes() -> None:
    plan = PicturePlan(settings(), "nanodet")
    assert plan.seen_as_file(PHOTOS["coffee"]) is None
    there = PicturePlan(replace(settings(), encoded=True), "nanodet")
    seen = there.seen_as_file(PHOTOS["coffee"])
    assert seen == there.transform.geometry(600, 400)
    assert there.seen_as_file(PHOTOS["coffee"]) is seen
    assert there.seen_as_file(b"no picture") is None
