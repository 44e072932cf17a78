"""A pipeline whose models decode on their device, here the CPU: crops are cut out of pictures that stay
there, and nothing stays of a request that is over, however that ended."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from extensions.torch.test_live_runner import runner_pids
from frontend.picture_models import BLUE, GREEN, RED, picture
from live.server import Live, serving
from live.test_device_pictures import NETWORK, SETTINGS
from waiting import until

pytestmark = pytest.mark.conformance
NAMER = """
    import torch


    class Means(torch.nn.Module):
        '''Scores the mean colour.'''

        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return 10 * x.mean((2, 3)) * self.gain


    def build():
        return Means()
"""
NAMER_SETTINGS = """
    task = "classify"
    max_batch = 8
    labels = "labels.txt"
    [pytorch]
    device = "cpu"
    module = "model.py:build"
    weights = "model.pt"
    [image]
    decode = "{decode}"
    resize = "stretch"
    scale = 0.00392156862745098
    [[input]]
    name = "x"
    datatype = "UINT8"
    shape = [3, 16, 16]
    [[output]]
    name = "logits"
    datatype = "FP32"
    shape = [3]
"""
STREET = """
    [[step]]
    name = "find"
    model = "finder"
    [[step]]
    name = "kind"
    model = "{namer}"
    each = "find.boxes"
    crop = {{ pad = 0.1 }}
    [[step]]
    name = "scene"
    model = "{namer}"
"""
COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}


def write(models: Path, name: str, network: str, settings: str) -> None:
    (models / name / "1").mkdir(parents=True)
    (models / name / "1" / "model.py").write_text(dedent(network))
    torch.save({"gain": torch.ones(1)}, models / name / "1" / "model.pt")
    (models / name / "model.toml").write_text(dedent(settings))
    (models / name / "labels.txt").write_text("\n".join(COLOURS))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("street")
    models = folder / "models"
    write(models, "finder", NETWORK, SETTINGS)
    for name, decode in (("namer", "device"), ("cpu_namer", "cpu")):
        write(models, name, NAMER, NAMER_SETTINGS.format(decode=decode))
    for name, namer in (("street", "namer"), ("by_hand", "cpu_namer")):
        (models / name).mkdir()
        (models / name / "pipeline.toml").write_text(dedent(STREET.format(namer=namer)))
    with serving(models, frontends=2, grpc=1, folder=folder) as running:
        yield running


def ask(server: Live, model: str, body: bytes) -> Any:
    with server.connect() as client:
        response = client.post(f"/models/{model}/predict", body)
        assert response.status == 200, response.body
        return json.loads(response.body)


def counted(server: Live, where: str) -> float:
    text = server.get("/metrics").body.decode()
    name = "carpool_pipeline_device_pictures_total"
    lines = [line for line in text.splitlines() if line.startswith(name) and f'crops="{where}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_the_device_cuts_what_the_front_end_would_have_cut(server: Live) -> None:
    sent = [(name, kind) for kind in ("JPEG", "PNG") for name in COLOURS for _ in range(6)]
    before = counted(server, "device")

    def both(one: tuple[str, str]) -> tuple[Any, Any]:
        body = picture(COLOURS[one[0]], one[1], size=(64, 48))
        return ask(server, "street", body), ask(server, "by_hand", body)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(both, sent))
    for (name, _), (street, by_hand) in zip(sent, answers, strict=True):
        (found,) = street["detections"]
        assert found["kind"]["classes"][0]["label"] == name
        assert street["scene"]["classes"][0]["label"] == name
        assert found["box"] == by_hand["detections"][0]["box"]
        assert found["kind"]["classes"][0]["score"] == pytest.approx(
            by_hand["detections"][0]["kind"]["classes"][0]["score"], abs=0.02
        )
    assert counted(server, "device") - before == len(sent) / 2
    assert counted(server, "cpu") == 0


def test_a_runner_that_dies_between_steps_costs_the_requests_in_it(server: Live) -> None:
    body = picture(GREEN, size=(64, 48))
    (runner,) = runner_pids(server)
    os.kill(runner, signal.SIGKILL)
    until(lambda: runner_pids(server) not in ([], [runner]), "a new runner")

    def answers() -> bool:
        with server.connect() as client:
            return client.post("/models/street/predict", body).status == 200

    until(answers, "the pipeline")
    assert ask(server, "street", body)["detections"][0]["kind"]["classes"][0]["label"] == "green"
