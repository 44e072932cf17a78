"""A pipeline on a server of real processes: both doors, and front ends and engines that die between steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from carpool.demo import bundled_models, pictures
from extensions.pipelines.test_pipeline_server import STREET
from live import sleeping_models
from live.server import Live, serving
from waiting import until

pytestmark = pytest.mark.conformance
PICTURE = next(path for path in pictures() if path.stem == "astronaut").read_bytes()
SLOW = """
import time, numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.3)
        made = []
        for request in requests:
            images = pb_utils.get_input_tensor_by_name(request, "images").as_numpy()
            logits = np.zeros((len(images), 3), np.float32)
            made.append(pb_utils.InferenceResponse([pb_utils.Tensor("logits", logits)]))
        return made
"""
SLOW_TOML = """
task = "classify"
backend = "python"
max_batch = 8
[[input]]
name = "images"
datatype = "FP32"
shape = [3, 32, 32]
[[output]]
name = "logits"
datatype = "FP32"
shape = [3]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("pipelines")
    models = folder / "models"
    for name in ("nanodet", "efficientnet_lite0"):
        shutil.copytree(bundled_models() / name, models / name)
        settings = models / name / "model.toml"
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if not line.startswith("slo")))
    (models / "slow" / "1").mkdir(parents=True)
    (models / "slow" / "1" / "model.py").write_text(SLOW)
    (models / "slow" / "model.toml").write_text(SLOW_TOML)
    street = (STREET / "pipeline.toml").read_text().replace("slo_ms = 2000", "")
    for name, text in (("street", street), ("tired", street.replace('"efficientnet_lite0"', '"slow"'))):
        (models / name).mkdir()
        (models / name / "pipeline.toml").write_text(text)
    with serving(models, frontends=2, grpc=1, folder=folder) as running:
        yield running


def ask(server: Live, model: str) -> Any:
    with server.connect() as client:
        response = client.post(f"/models/{model}/predict", PICTURE)
        return response.status, json.loads(response.body)


def test_over_grpc(server: Live) -> None:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        image = tritonclient.grpc.InferInput("image", [1], "BYTES")
        image.set_data_from_numpy(np.array([PICTURE], object))
        answer = json.loads(client.infer("street", [image]).as_numpy("answer")[0])
        assert answer == ask(server, "street")[1]
        assert client.get_model_metadata("street").platform == "pipeline"
        assert client.get_model_config("street").config.name == "street"


def under_way(server: Live, count: int) -> list[threading.Thread]:
    """Requests whose crops wait for the slow step; what becomes of them is noted nowhere."""

    def one() -> None:
        try:
            ask(server, "tired")
        except (OSError, AssertionError):
            """Its front end was killed."""

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def reached(server: Live) -> float:
    return server.metric("carpool_pipeline_fan_out_count", pipeline="tired", step="kind")


@pytest.mark.parametrize("who", ["front ends", "engine"])
def test_who_dies_between_steps(server: Live, who: str) -> None:
    before = reached(server)
    threads = under_way(server, 6)
    until(lambda: reached(server) > before, "no request came to the second step")
    http = [pid for pid in server.frontend_pids if pid not in server.grpc_pids]
    for pid in http if who == "front ends" else [server.engine_pid]:
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()

    def answers() -> bool:
        try:
            return bool(ask(server, "tired")[0] == 200 and ask(server, "street")[0] == 200)
        except (OSError, AssertionError):
            return False

    until(answers, "it does not answer again")


@pytest.mark.parametrize("slow", [False, True], ids=["profiled calm", "profiled slow"])
def test_a_slow_pipeline_answers_on_an_idle_server(tmp_path: Path, *, slow: bool) -> None:
    """All of 50, one a second: a forecast never refuses what an idle server would answer within the SLO."""
    busy = tmp_path / "busy"
    if slow:
        busy.touch()
    with serving(sleeping_models.write(tmp_path / "models", busy), folder=tmp_path) as running:
        busy.unlink(missing_ok=True)
        statuses = []
        for _ in range(50):
            began = monotonic()
            statuses.append(ask(running, "street")[0])
            sleep(max(0.0, 1.0 - (monotonic() - began)))
    assert statuses == [200] * 50
