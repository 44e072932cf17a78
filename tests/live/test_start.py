"""Models that start together: what is wrong is told first, and each answers as soon as it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import repositories
from frontend.http.harness import Response
from live.server import (
    LAYOUTS,
    READY_S,
    Live,
    error_of,
    infer_path,
    json_request,
    outputs_of,
    start,
    wait_until,
)

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
        wait_until(server.is_live, "alive", READY_S)
        wait_until(lambda: server.get("/v2/models/good4/ready").status == 200, "a quick one", READY_S)
        assert server.get("/v2/health/ready").status == 400
        assert server.get("/health").status == 503
        assert server.get("/v2/models/slow/ready").status == 503
        assert [line["model"] for line in server.events("model-not-loaded")] == ["broken"]
        asked = json_request([1, 2, 3, 4], (1, 4))
        assert outputs_of(ask(server, "good0", asked))
        refused = error_of(ask(server, "broken", asked), 503, "model-not-ready")
        assert "model.onnx" in refused["error"]
        wait_until(lambda: "loading 7 of 7: slow" in told(server), "it is told")
        go.touch()
        server.until_ready()
        assert server.get("/v2/models/slow/ready").status == 200
        wait_until(lambda: told(server) == "", "it is over")
    finally:
        left = server.end()
    assert left == []


def ask(server: Live, model: str, body: bytes) -> Response:
    with server.connect() as client:
        return client.post(infer_path(model), body)


def told(server: Live) -> str:
    return str(server.get_json("/console/live")["server"]["loading"])
