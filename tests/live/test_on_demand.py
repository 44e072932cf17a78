"""Models that are loaded by the requests for them, over every protocol."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
import tritonclient.grpc

from engine import repositories
from frontend.http.harness import Response
from live.server import LAYOUTS, Live, error_of, infer_path, json_request, outputs_of, serving
from waiting import until

ON_DEMAND = {"CARPOOL_ON_DEMAND": "true"}
ASKED = json_request([1, 2], (1, 2))
RAW = b"Inference-Header-Content-Length: 0\r\n"
SLOW = """
import os, time
def setup(config):
    while not os.path.exists({go!r}):
        time.sleep(0.01)
def predict(x):
    return 3 * x
"""


def ask(server: Live, model: str, body: bytes = ASKED, extra: bytes = b"") -> Response:
    with server.connect() as client:
        return client.post(infer_path(model), body, extra)


def index(server: Live) -> dict[str, tuple[str, str]]:
    with server.connect() as client:
        lines = orjson.loads(client.post("/v2/repository/index", b"").body)
    return {line["name"]: (line["state"], line.get("reason", "")) for line in lines}


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", LAYOUTS)
def test_requests_load_what_they_ask_for(tmp_path: Path, frontends: int) -> None:
    go, models = tmp_path / "go", tmp_path / "models"
    for name in "abcde":
        repositories.python(models, "def predict(x):\n    return 3 * x\n", name=name)
    repositories.python(models, SLOW.format(go=str(go)), name="slow")
    with serving(models, frontends=frontends, grpc=1, folder=tmp_path, environment=ON_DEMAND) as server:
        assert server.get("/v2/health/ready").status == 200
        assert {state for state, _ in index(server).values()} == {"UNAVAILABLE"}
        assert "on demand" in index(server)["a"][1]
        assert server.get("/v2/models/a/ready").status == 503, "it is not in memory, and that is the truth"
        assert outputs_of(ask(server, "a")) == {"y": [3, 6]}
        assert server.get("/v2/models/a/ready").status == 200
        assert index(server)["a"] == ("READY", "")
        assert index(server)["b"][0] == "UNAVAILABLE"
        assert server.get_json("/v2/models/b")["name"] == "b", "a document about it loads it, too"
        assert server.get_json("/v2/models/c/config")["name"] == "c"
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        given = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
        given.set_data_from_numpy(np.array([[1, 2]], np.float32))
        assert client.infer("d", [given]).as_numpy("y").tolist() == [[3, 6]]
        raw = ask(server, "e", np.array([1, 2], np.float32).tobytes(), RAW)
        assert raw.status == 200
        assert np.frombuffer(raw.body[-8:], np.float32).tolist() == [3, 6]
        late = ask(server, "slow", extra=b"X-Carpool-Deadline-Ms: 50\r\n")
        refused = error_of(late, 503, "loading")
        assert int(late.fields["retry-after"]) >= 1
        assert refused["retry_after_s"] > 0
        assert index(server)["slow"][0] in ("LOADING", "UNAVAILABLE")
        go.touch()
        assert outputs_of(ask(server, "slow")) == {"y": [3, 6]}
        error_of(ask(server, "x"), 404, "unknown-model")
        until(lambda: server.events("loaded-on-demand"), "it is logged")
