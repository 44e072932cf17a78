"""Who gets how much memory for a body, and when: not for what it says, and not for as long as it likes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import orjson
import pytest

from carpool.frontend.http.infer_route import LargestBody
from carpool.types import Datatype, TensorSpec
from frontend.fake_door import FakeModel, echo
from frontend.http.front_end import (
    IMAGE,
    FrontEnd,
    error_of,
    front_end,
    image_body,
    infer,
    infer_body,
    models,
)
from frontend.http.harness import Client
from frontend.picture_models import classifier, device_classifier, picture
from waiting import until

BIG = 700_000
RAW = b"Inference-Header-Content-Length: 0\r\n"

FIRST = 16 * 1024  # bytes that a body gets when memory is short


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(*models(), device_classifier(), classifier()) as found:
        yield found


def announce(client: Client, model: str, length: int, extra: bytes = RAW) -> Client:
    line = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"
    return client.send(line % (model.encode(), length, extra))


def body_of(data: bytes) -> tuple[bytes, bytes]:
    parameters = {"binary_data_size": len(data)}
    given = {"name": "x", "datatype": "UINT8", "shape": [1, len(data)], "parameters": parameters}
    return infer_body([given], data)


def test_a_body_that_no_request_can_have_is_refused_at_its_head(served: FrontEnd) -> None:
    for extra in (RAW, b"Inference-Header-Content-Length: 100\r\n"):
        with served.connect() as client:
            refused = announce(client, "image", 1_000_000, extra).response()
            assert refused.status == 413
            sentence = error_of(refused)["error"]
            assert sentence.startswith("the body has 1000000 bytes, but a request for model 'image' takes at")
            assert "batch-size must be <= 8" in sentence
    served.until_slots_are_back()


def test_what_is_a_little_too_long_is_told_exactly(served: FrontEnd) -> None:
    with served.connect() as client:
        refused = client.post("/v2/models/image/infer", bytes(7), RAW)
        assert (refused.status, error_of(refused)["field"]) == (400, "body")


def test_a_refused_body_is_read_past_and_its_sender_sees_why(served: FrontEnd) -> None:
    with served.connect() as client:
        refused = client.post("/v2/models/image/infer", bytes(30 << 20), RAW)
        assert refused.status == 413
        assert infer(client, "image", image_body()).status == 200


def test_json_may_take_more_than_the_numbers_it_holds(served: FrontEnd) -> None:
    values = IMAGE.reshape(-1).tolist()
    given = {"name": "image", "datatype": "UINT8", "shape": [1, 2, 3], "data": values}
    body = orjson.dumps({"inputs": [given], "parameters": {"why": "x" * 500_000}})
    with served.connect() as client:
        assert client.post("/v2/models/image/infer", body).status == 200
        assert client.post("/v2/models/image/infer", body + b" " * (1 << 20)).status == 413


def largest(*inputs: TensorSpec, max_batch: int = 8) -> LargestBody:
    model = FakeModel("m", inputs, [], lambda _inputs: {}, max_batch=max_batch)
    return LargestBody(model.entry(1), 64 << 20)


def test_how_long_a_body_can_be() -> None:
    image = TensorSpec("x", Datatype.FP32, (3, 100, 100))
    assert largest(image).in_place(500) == 500 + 8 * 120_000
    assert largest(image, image).in_place(500) == 500 + 2 * 8 * 120_000
    assert largest(image, max_batch=0).in_place(500) == 500 + 120_000
    assert largest(image).gathered() == 32 * 8 * 30_000 + (1 << 20)
    for unbounded in (TensorSpec("x", Datatype.FP32, (3, -1)), TensorSpec("x", Datatype.BYTES, (1,))):
        assert largest(image, unbounded).in_place(500) == largest(unbounded).gathered() == 64 << 20
    assert LargestBody(classifier().entry(1), 64 << 20).in_place(0) == 64 << 20  # pictures may come, too


@pytest.mark.parametrize("left", [1.0, 0.0])
def test_a_body_is_the_same_however_its_memory_grew(served: FrontEnd, left: float) -> None:
    served.door.left = left
    data = random.Random(3).randbytes(BIG)
    wanted = b'"data":[%b]' % b",".join(b"%d" % value for value in data)
    with served.connect() as client:
        for _ in range(2):  # the next request of the connection loses nothing
            assert wanted in infer(client, "echo-UINT8", body_of(data)).body


def test_without_plenty_an_announced_body_takes_little(served: FrontEnd) -> None:
    served.door.left = 0.5
    with served.connect() as client:
        announce(client, "echo-UINT8", BIG)
        until(lambda: bool(served.door.slots_in_use))
        assert len(served.door.slots_in_use[0].view) < 100_000
    served.until_slots_are_back()


@contextlib.contextmanager
def only_small_slots(served: FrontEnd) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        given = served.door._allocate
        patch.setattr(served.door, "_allocate", lambda size: given(size) if size <= FIRST else None)
        yield


def test_a_body_that_finds_no_more_memory_on_its_way_is_refused(served: FrontEnd) -> None:
    served.door.left = 0.0
    with served.connect() as client:
        with only_small_slots(served):
            refused = infer(client, "echo-UINT8", body_of(bytes(BIG)))
        assert (refused.status, error_of(refused)["reason"]) == (503, "no-slots")
        assert infer(client, "image", image_body()).status == 200


def test_a_body_may_use_its_own_part_again(served: FrontEnd) -> None:
    """What it has is the first that it gives back when there is no room for more beside it."""
    served.door.left, served.door.slots = 0.0, 1
    with served.connect() as client:
        assert infer(client, "echo-UINT8", body_of(bytes(BIG))).status == 200


def test_pictures_for_a_device_take_memory_as_they_come(served: FrontEnd) -> None:
    served.door.left = 0.0
    data = picture(kind="JPEG", size=(64, 48))
    data = data[:2] + b"\xff\xfe\xff\xff" + bytes(0xFFFD) + b"\xff\xfe\xff\xff" + bytes(0xFFFD) + data[2:]
    with served.connect() as client:
        answer = client.post("/models/chip/predict", data)
        assert (answer.status, orjson.loads(answer.body)["model"]) == (200, "chip")
        with only_small_slots(served):
            refused = client.post("/models/chip/predict", data)
        assert (refused.status, error_of(refused)["reason"]) == (503, "no-slots")


@contextlib.contextmanager
def short_of_memory(slots: int, look_at_pace_s: float) -> Iterator[FrontEnd]:
    given = echo("echo-UINT8", Datatype.UINT8)
    with front_end(given, slots=slots, look_at_pace_s=look_at_pace_s, slow_body_s=1e-6) as found:
        yield found


def test_the_slowest_body_makes_room_when_memory_is_short() -> None:
    with short_of_memory(2, 0.0) as served, served.connect() as slow, served.connect() as slower:
        announce(slow, "echo-UINT8", BIG).send(bytes(1000))
        until(lambda: len(served.door.slots_in_use) == 1)
        announce(slower, "echo-UINT8", BIG).send(b"0")
        until(lambda: len(served.door.slots_in_use) == 2)
        with served.connect() as client:
            assert infer(client, "echo-UINT8", body_of(b"12")).status == 200
        cut = slower.response()
        assert (cut.status, error_of(cut)["reason"]) == (408, "timeout")
        until(lambda: len(served.door.slots_in_use) == 1)


def test_who_has_only_just_begun_stays() -> None:
    with short_of_memory(1, 600.0) as served, served.connect() as other, served.connect() as client:
        announce(other, "echo-UINT8", BIG)
        until(lambda: bool(served.door.slots_in_use))
        refused = infer(client, "echo-UINT8", body_of(b"12"))
        assert (refused.status, error_of(refused)["reason"]) == (503, "no-slots")
        other.send(bytes(BIG))
        assert other.response().status == 200
