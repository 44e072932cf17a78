"""Pictures inside v2 requests: BYTES in place of the tensor, the model's outputs, and `answer`."""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from carpool.errors import ModelError
from frontend.http.front_end import FrontEnd, error_of, front_end, infer, infer_body, outputs_of
from frontend.http.test_app_images import holding
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, models, picture
from waiting import until


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(*models(), classifier("single", max_batch=0)) as found:
        yield found


def framed(*pictures: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(data)) + data for data in pictures)


def body_of(
    *pictures: bytes, shape: list[int] | None = None, name: str = "images", **rest: Any
) -> tuple[bytes, bytes]:
    tail = framed(*pictures)
    tensor = {
        "name": name,
        "datatype": "BYTES",
        "shape": shape or [len(pictures)],
        "parameters": {"binary_data_size": len(tail)},
    }
    return infer_body([tensor], tail, **rest)


ANSWER = [{"name": "answer"}]


@pytest.mark.parametrize("name", ["images", "image"])
@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_pictures_become_a_batch_and_the_models_outputs_come_back(
    served: FrontEnd, name: str, shape: list[int]
) -> None:
    with served.connect() as client:
        response = infer(client, "namer", body_of(picture(RED), picture(GREEN), shape=shape, name=name))
    [logits] = outputs_of(response).values()
    assert np.array(logits).reshape(2, 3).argmax(axis=1).tolist() == [0, 1]
    assert served.door.calls[-1].head.batch == 2


def test_answers_may_be_asked_for(served: FrontEnd) -> None:
    with served.connect() as client:
        sent = body_of(picture(RED, size=(64, 32)), picture(BLUE), outputs=ANSWER, parameters={"top_k": 1})
        answers = outputs_of(infer(client, "namer", sent))["answer"]
        alone = client.post("/classify?top_k=1", picture(RED, size=(64, 32)))
    first, second = map(orjson.loads, answers)
    assert first == orjson.loads(alone.body)
    assert second["classes"][0]["label"] == "blue"


def test_an_answer_comes_beside_outputs_that_are_asked_for(served: FrontEnd) -> None:
    with served.connect() as client:
        sent = body_of(picture(), outputs=[{"name": "answer"}, {"name": "scores"}])
        found = outputs_of(infer(client, "finder", sent))
    assert set(found) == {"answer", "scores"}
    assert orjson.loads(found["answer"][0])["detections"][0]["label"] == "red"


def test_tritonclient_can_send_pictures(served: FrontEnd) -> None:
    client = triton.InferenceServerClient(served.url)
    given = triton.InferInput("image", [2, 1], "BYTES")
    given.set_data_from_numpy(np.array([[picture(RED)], [picture(BLUE)]], object))
    answers = client.infer("namer", [given], outputs=[triton.InferRequestedOutput("answer")]).as_numpy(
        "answer"
    )
    assert answers.shape == (2, 1)
    assert [orjson.loads(one)["classes"][0]["label"] for one in answers[:, 0]] == ["red", "blue"]
    given.set_data_from_numpy(np.array([[picture(RED)], [picture(BLUE)[:200]]], object))
    with pytest.raises(InferenceServerException, match="image 1"):
        client.infer("namer", [given])
    client.close()


def test_json_carries_pictures_as_base64(served: FrontEnd) -> None:
    text = base64.b64encode(picture(GREEN)).decode()
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [text]}
    with served.connect() as client:
        answers = outputs_of(infer(client, "namer", infer_body([tensor], outputs=ANSWER)))["answer"]
        big = base64.b64encode(picture(GREEN, "BMP", size=(200, 200))).decode()
        tensor["data"] = [big]
        again = outputs_of(infer(client, "namer", infer_body([tensor], outputs=ANSWER)))["answer"]
    assert orjson.loads(answers[0])["classes"][0]["label"] == "green"
    assert orjson.loads(again[0])["classes"][0]["label"] == "green"


def test_a_model_without_batches_takes_one_picture(served: FrontEnd) -> None:
    with served.connect() as client:
        answers = outputs_of(infer(client, "single", body_of(picture(), outputs=ANSWER)))["answer"]
        assert orjson.loads(answers[0])["classes"][0]["label"] == "red"
        assert infer(client, "single", body_of(picture(), picture())).status == 400


def test_tensors_still_go_as_they_did(served: FrontEnd) -> None:
    data = np.zeros((1, 3, 16, 16), np.float32).tobytes()
    tensor: dict[str, Any] = {"name": "images", "datatype": "FP32", "shape": [1, 3, 16, 16]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    with served.connect() as client:
        assert infer(client, "namer", infer_body([tensor], data)).status == 200
        assert infer(client, "namer", infer_body([tensor], data, id='"BYTES"')).status == 200
        assert infer(client, "namer", infer_body([tensor], data, outputs=ANSWER)).status == 400
        flat = {"name": "images", "datatype": "FP32", "shape": [1, 3, 16, 16], "data": [0.5] * 768}
        assert infer(client, "namer", infer_body([flat], id='"BYTES"')).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        body_of(picture(), b"bad"),
        body_of(picture(), name="nonsense"),
        body_of(*[picture()] * 9),
        body_of(picture(), shape=[1, 2]),
        body_of(picture(), shape=[1, 1, 1]),
        body_of(picture(), outputs=[{"name": "nonsense"}]),
        body_of(picture(), outputs=[{"name": "answer", "parameters": {"classification": 2}}]),
        body_of(picture(), parameters={"top_k": 0}),
        infer_body([{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["!"]}]),
        infer_body([{"name": "image", "datatype": "BYTES", "shape": [0], "data": []}]),
    ],
)
def test_what_is_wrong_fails_its_request_alone(served: FrontEnd, sent: tuple[bytes, bytes]) -> None:
    with served.connect() as client:
        response = infer(client, "namer", sent)
        assert response.status == 400, response.body
        error_of(response)
        assert infer(client, "namer", body_of(picture())).status == 200
    served.until_slots_are_back()


def test_an_error_of_the_model_and_a_bug_in_the_answer_are_500(
    served: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.door.held = True
    with served.connect() as client:
        body, field = body_of(picture(), outputs=ANSWER)
        client.send(
            b"POST /v2/models/namer/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b"
            % (len(body), field, body)
        )
        call = served.wait_for_call()
        served.run(lambda: call.finish(ModelError("no")))
        assert client.response().status == 500
        served.door.held = False

        def broken(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr("carpool.frontend.pictures.sent_pictures.PictureModel.of_one", broken)
        assert infer(client, "namer", body_of(picture(), outputs=ANSWER)).status == 500
    served.until_slots_are_back()


def test_who_leaves_at_any_stage_holds_nothing() -> None:
    with front_end(detector()) as served:
        body, field = body_of(picture(), outputs=ANSWER)
        request = b"POST /v2/models/finder/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b" % (
            len(body),
            field,
            body,
        )
        served.door.held = True
        with holding(served) as go:  # before decoding
            client = served.connect()
            client.send(request)
            until(lambda: served.app._service.with_pictures().workers.waiting == 1)
            client.reset()
            served.until_slots_are_back()
            go.set()
        assert [call.cancelled for call in served.door.calls] == [True]
        served.door.calls.clear()
        client = served.connect()  # while the model runs
        client.send(request)
        until(lambda: served.door.calls and served.door.calls[0].is_ready)
        call = served.door.calls[0]
        client.reset()
        until(lambda: call.cancelled)
        client = served.connect()  # while the answer is made
        client.send(request)
        until(lambda: len(served.door.calls) == 2 and served.door.calls[-1].is_ready)
        call = served.door.calls[-1]
        with holding(served) as go:
            served.run(call.finish)
            client.reset()
            threading.Event().wait(0.01)  # nobody is told that this client left
            go.set()
            until(lambda: call.released)
        served.until_slots_are_back()
