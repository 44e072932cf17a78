"""A real server with a PyTorch detector that decodes and chooses boxes on its device, here the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from typing import Any

import numpy as np
import orjson
import pytest
import torch
import tritonclient.grpc as triton_grpc

from frontend.http.harness import Response
from frontend.http.test_app_images import FORM
from frontend.http.test_multipart import file_part, form
from frontend.picture_models import BLUE, GREEN, RED, picture
from live.server import Live, error_of, outputs_of, serving

COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}
NETWORK = """
    import torch


    class Colours(torch.nn.Module):
        '''Two boxes over the left half, of which one hides the other, that score the mean colour.'''

        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            means = x.mean((2, 3)) * self.gain
            boxes = torch.tensor([[4.0, 4.5], [8.0, 8.0], [8.0, 7.0], [16.0, 16.0]]).expand(len(x), 4, 2)
            return torch.cat((boxes, torch.stack((means, 0.9 * means), 2)), 1)


    def build():
        return Colours()
"""
SETTINGS = """
    task = "detect"
    max_batch = 4
    labels = "labels.txt"
    [pytorch]
    device = "cpu"
    module = "model.py:build"
    weights = "model.pt"
    [image]
    decode = "device"
    resize = "stretch"
    scale = 0.00392156862745098
    [detect]
    format = "yolov8"
    score = 0.5
    nms = "device"
    max_detections = 5
    [[input]]
    name = "x"
    datatype = "UINT8"
    shape = [3, 16, 16]
    [[output]]
    name = "raw"
    datatype = "FP32"
    shape = [7, 2]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("device")
    model = folder / "models" / "finder"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(dedent(NETWORK))
    torch.save({"gain": torch.ones(1)}, model / "1" / "model.pt")
    (model / "model.toml").write_text(dedent(SETTINGS))
    (model / "labels.txt").write_text("\n".join(COLOURS))
    with serving(folder / "models", frontends=1, grpc=1, folder=folder) as running:
        yield running


def detect(server: Live, body: bytes, query: str = "", extra: bytes = b"") -> Response:
    with server.connect() as client:
        return client.post(f"/detect{query}", body, extra)


def found_in(answer: dict[str, Any]) -> list[tuple[str, list[float]]]:
    return [(found["label"], found["box"]) for found in answer["detections"]]


@pytest.mark.conformance
def test_every_kind_of_picture_gets_its_own_answer_from_shared_batches(server: Live) -> None:
    """Files, which the device decodes, and others, which the front end does, all at the same time."""
    sent = [(name, kind) for kind in ("JPEG", "PNG") for name in COLOURS for _ in range(8)]

    def ask(one: tuple[str, str]) -> dict[str, Any]:
        response = detect(server, picture(COLOURS[one[0]], one[1], size=(64, 48)))
        assert response.status == 200, response.body
        answer: dict[str, Any] = orjson.loads(response.body)
        return answer

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, sent))
    for (name, _), answer in zip(sent, answers, strict=True):
        assert answer["image"] == {"width": 64, "height": 48}
        assert found_in(answer) == [(name, [0.0, 0.0, 32.0, 48.0])]  # the weaker box is gone


def test_a_file_that_only_decoding_finds_to_be_bad_is_its_senders_error(server: Live) -> None:
    good = picture(GREEN, size=(64, 48))
    bad = good[: len(good) - 40] + b"\xff\xd9"
    said = error_of(detect(server, bad), 400, "invalid-input")
    assert "JPEG" in said["error"]
    body = form(*map(file_part, (good, bad, good)))
    results = orjson.loads(detect(server, body, extra=FORM).body)["results"]
    assert [result.get("status", 200) for result in results] == [200, 400, 200]
    assert found_in(results[2])[0][0] == "green"


def test_what_the_device_has_dropped_cannot_be_asked_for(server: Live) -> None:
    assert detect(server, picture(RED), "?score=0.6").status == 200
    assert error_of(detect(server, picture(RED), "?score=0.1"), 400)["field"] == "score"


def test_tensors_and_pictures_over_the_protocol(server: Live) -> None:
    pixels = np.zeros((1, 3, 16, 16), np.uint8)
    pixels[:, 2] = 255
    with server.connect() as client:
        inputs = [
            {"name": "x", "datatype": "UINT8", "shape": [1, 3, 16, 16], "data": pixels.ravel().tolist()}
        ]
        response = client.post("/v2/models/finder/infer", orjson.dumps({"inputs": inputs}))
    outputs = outputs_of(response)
    assert set(outputs) == {"raw", "detections"}
    assert outputs["detections"][:6] == pytest.approx([0, 0, 8, 16, 1, 2])
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        given = triton_grpc.InferInput("image", [1], "BYTES")
        given.set_data_from_numpy(np.array([picture(BLUE)], object))
        answer = client.infer("finder", [given], outputs=[triton_grpc.InferRequestedOutput("answer")])
    assert found_in(orjson.loads(answer.as_numpy("answer")[0]))[0][0] == "blue"
