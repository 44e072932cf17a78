"""Two extensions of the future, as far as they try the hook: cameras and prompted models (sketches/)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from extensions.installing import environment_with, install
from live.server import Live, is_alive, serving
from waiting import until

SKETCHES = Path(__file__).parent / "sketches"
PLAIN = """
backend = "python"
[[input]]
name = "x"
datatype = "FP32"
shape = [4]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
PROMPTED = """
backend = "prompted"
max_batch = 0
[parts.encoder]
file = "encoder.onnx"
[parts.decoder]
file = "decoder.onnx"
[[input]]
name = "key"
datatype = "UINT8"
shape = [16]
[[input]]
name = "points"
datatype = "FP32"
shape = [-1]
[[input]]
name = "picture"
datatype = "FP32"
shape = [-1]
optional = true
[[output]]
name = "mask"
datatype = "FP32"
shape = [-1]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    site, models = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("models")
    install(SKETCHES / "carpool_cameras", site, {"cameras_sketch": "carpool_cameras:EXTENSION"})
    install(SKETCHES / "carpool_prompts", site, {"prompts_sketch": "carpool_prompts:EXTENSION"})
    for name, settings in (("scene", PLAIN), ("sam", PROMPTED)):
        (models / name / "1").mkdir(parents=True)
        (models / name / "model.toml").write_text(settings)
    (models / "scene" / "1" / "model.py").write_text("def predict(x):\n    return x\n")
    own = {"CAMERAS_FILE": str(site / "cameras.json")}
    with serving(models, folder=site, environment=environment_with(site) | own) as running:
        yield running


def ask(server: Live, method: str, path: str, document: object = None) -> tuple[int, Any]:
    with server.connect() as client:
        body = None if document is None else orjson.dumps(document)
        response = client.ask(method, path) if body is None else client.post(path, body)
    return response.status, orjson.loads(response.body)


def camera_pid(server: Live, count: int) -> int:
    def ups() -> list[int]:
        return [event["child"] for event in server.events("process-up") if event["role"] == "cameras"]

    return until(lambda: ups() if len(ups()) >= count else [])[count - 1]


def answered(server: Live) -> float:
    try:
        return server.metric("carpool_camera_frames_total", model="scene", result="answered")
    except AssertionError:  # no frame was counted yet
        return 0.0


def test_cameras_are_added_and_removed_while_they_run(server: Live) -> None:
    assert ask(server, "GET", "/cameras") == (200, {})
    assert ask(server, "POST", "/cameras", {"name": "gate"})[0] == 400
    camera = {"model": "scene", "fps": 50}
    assert ask(server, "POST", "/cameras", {"name": "gate", **camera}) == (200, {"gate": camera})
    until(lambda: answered(server) >= 3)
    assert ask(server, "GET", "/cameras") == (200, {"gate": camera})
    assert ask(server, "DELETE", "/cameras/gate") == (200, {})
    status, why = ask(server, "DELETE", "/cameras/gate")
    assert (status, why["error"]) == (404, "there is no camera gate")


def test_its_process_and_the_engine_may_die(server: Live) -> None:
    camera = {"name": "door", "model": "scene", "fps": 50}
    assert ask(server, "POST", "/cameras", camera)[0] == 200
    os.kill(camera_pid(server, 1), signal.SIGKILL)
    assert is_alive(camera_pid(server, 2))
    before = answered(server)
    until(lambda: answered(server) > before)
    server.until_metric(1.0, "carpool_process_restarts_total", process="cameras")
    os.kill(server.engine_pid, signal.SIGKILL)
    until(lambda: len([e for e in server.events("process-up") if e["role"] == "engine"]) == 2)
    server.until_ready()
    before = answered(server)
    until(lambda: answered(server) > before)
    assert ask(server, "DELETE", "/cameras/door") == (200, {})


def segment(server: Live, **document: object) -> tuple[int, Any]:
    return ask(server, "POST", "/prompts/segment", {"model": "sam", **document})


def test_a_picture_is_encoded_once_and_is_gone_when_others_came(server: Live) -> None:
    status, first = segment(server, image=[1, 3], points=[2])
    assert (status, first["mask"]) == (200, [-2.0, 2.0])
    handle = first["handle"]
    assert segment(server, handle=handle, points=[1, 2]) == (200, {"handle": handle, "mask": [-3.0, 3.0]})
    for number in (5, 6):
        assert segment(server, image=[number, 0], points=[1])[0] == 200
    gone = {"detail": "the picture is not stored any more: send it again", "type": "gone"}
    assert segment(server, handle=handle, points=[1]) == (410, gone)
    for count, result in ((3.0, "stored"), (1.0, "found"), (1.0, "gone")):
        assert server.metric("carpool_embeddings_total", model="sam", result=result) == count


def test_its_errors_are_in_its_own_words(server: Live) -> None:
    assert segment(server, points=[])[1]["detail"] == "points must be a list of numbers"
    assert ask(server, "DELETE", "/prompts/images/none") == (
        404,
        {"detail": "there is no such picture", "type": "not-found"},
    )
    _, picture = segment(server, image=[1, 2, 3], points=[1])
    assert ask(server, "DELETE", f"/prompts/images/{picture['handle']}") == (200, {})
    assert segment(server, handle=picture["handle"], points=[1])[0] == 410
