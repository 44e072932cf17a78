"""Models that write, served: pictures of lines in, right text out, whoever leaves and whatever dies."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

pytest.importorskip("torch")

from carpool.backends.fake import fake_text
from carpool.demo import text_model
from frontend.http.harness import post
from live.server import Live, command, descendants, is_alive, serving, wait_until

TEXT = "Invoice 2041, due 17 May"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("generation")
    models = folder / "models"
    shutil.copytree(text_model(), models / "reader")
    fake = models / "writer"
    fake.mkdir()
    (fake / "model.toml").write_text(
        '[generate]\nslots = 4\n[fake]\ncurve = "1+0.1"\nstep_curve = "2+0.01"\n'
    )
    with serving(models, frontends=1, folder=folder) as running:
        yield running


def document(picture: Any, **parameters: Any) -> bytes:
    tensor = {"name": "image", "datatype": "UINT8", "shape": list(picture.shape)}
    return orjson.dumps({"inputs": [tensor | {"data": picture.ravel().tolist()}], "parameters": parameters})


def ask(server: Live, model: str, picture: Any, **parameters: Any) -> tuple[int, dict[str, Any]]:
    with server.connect() as client:
        response = client.post(f"/v2/models/{model}/infer", document(picture, **parameters))
    return response.status, orjson.loads(response.body)


def text_of(answer: dict[str, Any]) -> tuple[str, str]:
    found = {output["name"]: output["data"][0] for output in answer["outputs"]}
    return found["text_output"], found["finish_reason"]


def random_picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 64), dtype=np.uint8)


def runner_pids(server: Live) -> list[int]:
    below = descendants(server.pid)
    return [pid for pid in below if "carpool.runner.runner_process" in command(pid) and is_alive(pid)]


def test_a_picture_of_a_line_is_read(server: Live) -> None:
    with server.connect() as client:
        response = client.post("/read?model=reader", (text_model() / "line.png").read_bytes())
    assert response.status == 200, response
    assert orjson.loads(response.body)["text"] == TEXT
    assert server.metric("carpool_text_tokens_total", model="reader") >= len(TEXT) + 1


def test_whole_texts_over_v2_are_those_of_each_picture(server: Live) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: ask(server, "writer", random_picture(seed)), range(32)))
    for seed, (status, answer) in enumerate(answers):
        assert status == 200, answer
        assert text_of(answer) == (fake_text(random_picture(seed)).decode(), "stop")
    status, answer = ask(server, "writer", random_picture(1), max_tokens=3)
    assert status == 200
    assert text_of(answer) == (fake_text(random_picture(1)).decode()[:3], "length")


@pytest.mark.parametrize(
    ("picture", "parameters", "said"),
    [
        (np.zeros((1, 31, 64), np.uint8), {}, "shape"),
        (np.zeros((1, 32, 60), np.uint8), {}, "image"),
        (np.zeros((1, 32, 1024), np.uint8), {}, "image"),
        (np.zeros((1, 32, 64), np.uint8), {"max_tokens": 0}, "max_tokens"),
        (np.zeros((1, 32, 64), np.uint8), {"max_tokens": "many"}, "max_tokens"),
    ],
)
def test_what_cannot_be_read_is_a_400(server: Live, picture: Any, parameters: Any, said: str) -> None:
    status, answer = ask(server, "reader", picture, **parameters)
    assert status == 400, answer
    assert said in answer["error"]


def test_clients_that_leave_free_their_slots(server: Live) -> None:
    for seed in range(12):
        client = server.connect()
        client.send(post("/v2/models/writer/infer", document(random_picture(seed))))
        client.reset()
    status, answer = ask(server, "writer", random_picture(50))
    assert status == 200, answer
    wait_until(lambda: server.metric("carpool_text_slots", model="writer", state="used") == 0, "free slots")


@pytest.mark.conformance
def test_a_runner_that_is_killed_costs_its_riders_one_error_and_comes_back(server: Live) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, "reader", np.full((1, 32, 512), 250, np.uint8)) for _ in range(4)]
        for pid in runner_pids(server):
            os.kill(pid, signal.SIGKILL)
        for answer in asked:
            status, said = answer.result()
            assert status in (200, 500, 503), said
    wait_until(lambda: ask(server, "reader", np.full((1, 32, 64), 250, np.uint8))[0] == 200, "a new one")
    with server.connect() as client:
        response = client.post("/read?model=reader", Path(text_model() / "line.png").read_bytes())
    assert orjson.loads(response.body)["text"] == TEXT
