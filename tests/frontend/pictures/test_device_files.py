"""Pictures for a model whose device decodes: which go there as files, and that the answers are the same."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from carpool.errors import InvalidInput, Refused
from frontend.fake_door import FakeCall
from frontend.http.front_end import FrontEnd, error_of, front_end, infer, infer_body
from frontend.http.harness import Response, chunked
from frontend.http.test_app_images import FORM, answer_of, ask, holding
from frontend.http.test_multipart import file_part, form
from frontend.picture_models import BLUE, GREEN, RED, classifier, device_classifier, picture
from waiting import until


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(device_classifier(), classifier()) as found:
        yield found


def turned(number: int) -> bytes:
    exif = Image.Exif()
    exif[274] = number
    return picture(GREEN, exif=exif)


def label_of(response: Response) -> str:
    answer = answer_of(response)
    assert answer["image"] in ({"width": 32, "height": 24}, {"width": 24, "height": 32})
    label: str = answer["classes"][0]["label"]
    return label


def last(found: FrontEnd) -> FakeCall:
    return found.door.calls[-1]


def test_an_ordinary_jpeg_goes_as_it_is(served: FrontEnd) -> None:
    assert label_of(ask(served, "/models/chip/predict", picture(GREEN))) == "green"
    assert last(served).head.encoded
    assert served.count("chip", "nv_inference_request_success") == 1


def test_other_models_get_tensors(served: FrontEnd) -> None:
    assert label_of(ask(served, "/models/namer/predict", picture(GREEN))) == "green"
    assert not last(served).head.encoded


@pytest.mark.parametrize(
    "data",
    [
        picture(GREEN, "PNG"),
        picture(GREEN, "WEBP"),
        picture(GREEN, progressive=True),
        turned(6),
        turned(3),
        picture(GREEN, comment=b"c" * 60_000) + b"\0",
    ],
)
def test_what_the_device_may_read_differently_is_decoded_here(served: FrontEnd, data: bytes) -> None:
    assert label_of(ask(served, "/models/chip/predict", data)) == "green"
    assert not last(served).head.encoded
    assert last(served).head.inputs[0].shape == (1, 3, 16, 16)
    assert served.count("chip", "carpool_decode_duration_seconds_count") == 1


def test_broken_pictures_are_told_from_good_ones_as_ever(served: FrontEnd) -> None:
    for data in (b"no picture", picture()[:100], picture()[:-2], b"\xff\xd8\xff\xd9"):
        response = ask(served, "/models/chip/predict", data)
        assert response.status == 400
        error_of(response)
    assert all(call.cancelled and not call.is_ready for call in served.door.calls)


def test_what_the_device_finds_wrong_reaches_the_client(served: FrontEnd) -> None:
    served.door.held = True
    with served.connect() as client:
        client.send(
            b"POST /models/chip/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % len(picture())
        )
        client.send(picture())
        call = served.wait_for_call()
        served.run(lambda: call.finish(InvalidInput("the JPEG image cannot be decoded", field="image")))
        response = client.response()
    assert response.status == 400
    assert error_of(response)["error"] == "the JPEG image cannot be decoded"


def test_every_way_of_sending_gives_the_same_answer(served: FrontEnd) -> None:
    data = picture(BLUE)
    ways: list[tuple[bytes, bytes]] = [
        (data, b""),
        (form(file_part(data)), FORM),
        (gzip.compress(data), b"Content-Encoding: gzip\r\n"),
    ]
    for body, fields in ways:
        assert label_of(ask(served, "/models/chip/predict", body, fields)) == "blue"
        assert last(served).head.encoded
    with served.connect() as client:
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        assert label_of(client.send(chunked("/models/chip/predict", chunks)).response()) == "blue"
    assert last(served).head is served.door.calls[0].head  # by that the link knows them again


def test_files_and_tensors_may_come_in_one_form(served: FrontEnd) -> None:
    sent = [picture(RED), picture(GREEN, "PNG"), b"nothing", picture(BLUE)]
    answer = answer_of(ask(served, "/models/chip/predict", form(*map(file_part, sent)), FORM))
    first, second, third, fourth = answer["results"]
    assert [one["classes"][0]["label"] for one in (first, second, fourth)] == ["red", "green", "blue"]
    assert third["status"] == 400
    assert sorted(call.head.encoded for call in served.door.calls) == [False, True, True]


def test_a_drawn_answer_is_drawn_on_the_picture(served: FrontEnd) -> None:
    response = ask(served, "/models/chip/predict?overlay=1", picture(GREEN))
    assert response.status == 200
    assert Image.open(io.BytesIO(response.body)).size[0] >= 32


def test_a_busy_decoder_does_not_keep_files_waiting(served: FrontEnd) -> None:
    with holding(served):
        assert label_of(ask(served, "/models/chip/predict", picture(GREEN))) == "green"


def test_whoever_leaves_gives_the_slot_back(served: FrontEnd) -> None:
    served.door.held = True
    data = picture()
    head = b"POST /models/chip/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
    for sent in (head + data[:50], head + data):
        calls = len(served.door.calls)
        client = served.connect()
        client.send(sent)
        until(lambda: bool(served.door.slots_in_use))
        if sent.endswith(data):
            until(lambda seen=calls: len(served.door.calls) > seen)  # type: ignore[misc]
        client.reset()
        served.until_slots_are_back()


def test_a_gate_that_closed_while_the_body_came_is_told(served: FrontEnd) -> None:
    served.door.refusal = Refused("too much", reason="overload")
    assert ask(served, "/models/chip/predict", picture()).status == 429
    served.until_slots_are_back()


def bytes_tensor(*pictures: bytes) -> bytes:
    return b"".join(len(data).to_bytes(4, "little") + data for data in pictures)


def v2(found: FrontEnd, *pictures: bytes) -> dict[str, Any]:
    tail = bytes_tensor(*pictures)
    tensor = {
        "name": "image",
        "datatype": "BYTES",
        "shape": [len(pictures)],
        "parameters": {"binary_data_size": len(tail)},
    }
    sent = infer_body([tensor], tail, outputs=[{"name": "answer"}])
    with found.connect() as client:
        response = infer(client, "chip", sent)
    assert response.status == 200, response.body
    document: dict[str, Any] = orjson.loads(response.body)
    return document


def test_one_picture_in_a_v2_request_goes_as_it_is_and_several_are_decoded_here(served: FrontEnd) -> None:
    [answer] = v2(served, picture(GREEN))["outputs"][0]["data"]
    assert orjson.loads(answer)["classes"][0]["label"] == "green"
    assert last(served).head.encoded
    answers = v2(served, picture(GREEN), picture(RED))["outputs"][0]["data"]
    assert [orjson.loads(answer)["classes"][0]["label"] for answer in answers] == ["green", "red"]
    assert not last(served).head.encoded


def test_pixels_still_come_as_a_tensor(served: FrontEnd) -> None:
    pixels = np.zeros((1, 3, 16, 16), np.uint8)
    pixels[:, 2] = 255
    tensor = {
        "name": "images",
        "datatype": "UINT8",
        "shape": [1, 3, 16, 16],
        "parameters": {"binary_data_size": pixels.nbytes},
    }
    with served.connect() as client:
        response = infer(client, "chip", infer_body([tensor], pixels.tobytes()))
    assert response.status == 200
    assert np.argmax(orjson.loads(response.body)["outputs"][0]["data"]) == 2
