"""Models that start together: what is wrong is told first, and each answers as soon as it can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import carpool.demo
from engine import repositories
from frontend.http.harness import Response
from later import later
from live.server import LAYOUTS, READY_S, Live, error_of, infer_path, json_request, outputs_of, serving, start
from waiting import until

SLOW = """
import os, time
def setup(config):
    while not os.path.exists({go!r}):
        time.sleep(0.01)
def predict(x):
    return 3 * x
"""


@pytest.mark.parametrize("frontends", LAYOUTS)
def test_of_seven_models_one_broken_and_one_slow_the_others_answer(tmp_path: Path, frontends: int) -> None:
    go, models = tmp_path / "go", tmp_path / "models"
    for number in range(5):
        repositories.fake(models, name=f"good{number}", head="slo_ms = 60000")
    slow = repositories.python(models, SLOW.format(go=str(go)), name="slow")
    broken = models / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes(b"no model at all")
    server = start(slow.parent, frontends=frontends, folder=tmp_path)
    try:
        until(server.is_live, "alive", READY_S)
        until(lambda: server.get("/v2/models/good4/ready").status == 200, "a quick one", READY_S)
        assert server.get("/v2/health/ready").status == 400
        assert server.get("/health").status == 503
        assert server.get("/v2/models/slow/ready").status == 503
        assert [line["model"] for line in server.events("model-not-loaded")] == ["broken"]
        asked = json_request([1, 2, 3, 4], (1, 4))
        assert outputs_of(ask(server, "good0", asked))
        refused = error_of(ask(server, "broken", asked), 503, "model-not-ready")
        assert "model.onnx" in refused["error"]
        until(lambda: "loading 7 of 7: slow" in told(server), "it is told")
        go.touch()
        server.until_ready()
        assert server.get("/v2/models/slow/ready").status == 200
        until(lambda: told(server) == "", "it is over")
    finally:
        left = server.end()
    assert left == []


def ask(server: Live, model: str, body: bytes) -> Response:
    with server.connect() as client:
        return client.post(infer_path(model), body)


def told(server: Live) -> str:
    return str(server.get_json("/console/live")["server"]["loading"])


EFFICIENTNET = Path(carpool.demo.__file__).parent / "models" / "efficientnet_lite0"
TROUBLE = ("error", "warning")


def named_in_every_way(folder: Path) -> list[Path]:
    """A file, a folder of versions and a repository, each with a name of its own."""
    file = shutil.copy(EFFICIENTNET / "1" / "model.onnx", folder / "file.onnx")
    versions = shutil.copytree(EFFICIENTNET, folder / "versions")
    shutil.copytree(EFFICIENTNET, folder / "repository" / "kept")
    return [Path(file), versions, folder / "repository"]


@pytest.mark.parametrize("frontends", LAYOUTS)
@pytest.mark.parametrize("kind", [later("paths", name="paths"), later("demo", name="demo")])
def test_a_start_that_works_logs_no_trouble_and_a_line_for_each_model(
    tmp_path: Path, kind: str, frontends: int
) -> None:
    """Also what is done once models have been loaded: rollouts begin, registries are asked."""
    paths = named_in_every_way(tmp_path) if kind == "paths" else []
    with serving(*paths, frontends=frontends, folder=tmp_path) as server:
        names = {line["name"] for line in server.get_json("/console/live")["models"]}
        assert kind == "demo" or names == {"file", "versions", "kept"}
        until(lambda: len(server.events("model-ready")) >= len(names), "each has its line")
        ready = server.events("model-ready")
        assert {line["model"] for line in ready} == names
        assert len(ready) == len(names)
        for line in ready:
            assert {"version", "engine", "device", "instances", "max_batch", "seconds"} <= line.keys()
        progress = ("loading", "profile-measured-again")  # the second where others use the machine
        about_models = [
            line for line in events(server) if line.get("model") and line["event"] not in progress
        ]
        assert [line["event"] for line in about_models if line["level"] == "info"] == ["model-ready"] * len(
            names
        )
    # of a machine that others use
    allowed = {"engine-stalled", "engine-recovered", "process-stalled", "profile-outdated", "profile-drift"}
    trouble = [line for line in events(server) if line["level"] in TROUBLE and line["event"] not in allowed]
    # a bare file does not say its preprocessing
    assumed = [("pixels-assumed", "file")] if kind == "paths" else []
    assert [(line["event"], line.get("model")) for line in trouble] == assumed
    assert "Traceback" not in server.log()


def events(server: Live) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]


def test_a_quiet_server_says_nothing(tmp_path: Path) -> None:
    models = repositories.fake(tmp_path / "models", head="slo_ms = 60000").parent
    with serving(models, folder=tmp_path, environment={"CARPOOL_QUIET": "true"}) as server:
        assert server.get("/v2/health/ready").status == 200
    assert [line for line in server.log().splitlines() if "engine-" not in line] == []
