"""Pictures inside ModelInfer: BYTES in place of the tensor, and `answer`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from frontend.grpc.front_end import FrontEnd, front_end
from frontend.http.harness import PATIENCE
from frontend.picture_models import BLUE, GREEN, RED, begin, models, picture
from waiting import until


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(*models()) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(served.url)
    yield made
    made.close()


def pictures(*data: bytes, shape: tuple[int, ...] | None = None, name: str = "image") -> triton.InferInput:
    array = np.array(data, object).reshape(shape or (len(data),))
    given = triton.InferInput(name, list(array.shape), "BYTES")
    given.set_data_from_numpy(array)
    return given


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_pictures_become_a_batch(
    served: FrontEnd, client: triton.InferenceServerClient, shape: tuple[int, ...]
) -> None:
    for _ in range(2):  # the second is known already
        given = pictures(picture(RED), picture(GREEN), shape=shape)
        outputs = [triton.InferRequestedOutput("answer"), triton.InferRequestedOutput("logits")]
        found = client.infer("namer", [given], outputs=outputs)
        answers = found.as_numpy("answer")
        assert answers.shape == shape
        assert [orjson.loads(one)["classes"][0]["label"] for one in answers.ravel()] == ["red", "green"]
        assert found.as_numpy("logits").shape == (2, 3)
    assert served.door.calls[-1].head.batch == 2


def test_without_outputs_the_models_own_come(client: triton.InferenceServerClient) -> None:
    found = client.infer("finder", [pictures(picture(BLUE), name="images")]).get_response()
    assert [output.name for output in found.outputs] == ["boxes", "scores"]


def test_a_bad_picture_fails_its_request_alone(
    served: FrontEnd, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match="image 1") as caught:
        client.infer("namer", [pictures(picture(), b"bad")])
    assert "INVALID_ARGUMENT" in str(caught.value.status())
    with pytest.raises(InferenceServerException, match="batch-size"):
        client.infer("namer", [pictures(*[picture()] * 9)])
    assert client.infer("namer", [pictures(picture())]).as_numpy("logits").shape == (1, 3)
    served.until_slots_are_back()


def test_a_call_that_is_cancelled_while_decoding_gives_its_slot_back(
    served: FrontEnd, client: triton.InferenceServerClient
) -> None:
    go = threading.Event()
    workers = served.server.service.with_pictures().workers
    all_busy = threading.Barrier(workers.threads + 1)

    def wait() -> None:
        all_busy.wait(PATIENCE)
        go.wait(PATIENCE)

    for _ in range(workers.threads):
        served.run(lambda: begin(workers, wait, lambda *_: None))
    all_busy.wait(PATIENCE)
    ended = threading.Event()
    call = client.async_infer("namer", [pictures(picture())], callback=lambda result, error: ended.set())
    until(lambda: workers.waiting == 1)
    call.cancel()
    until(lambda: served.server.service.running == 0)
    served.until_slots_are_back()
    go.set()
    assert [call.cancelled for call in served.door.calls] == [True]
    assert ended.wait(PATIENCE)
