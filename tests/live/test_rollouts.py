"""Rollouts of a real server: killed in the middle of one, and a candidate that fails under traffic."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from live.server import Live, infer_path, json_request, serving, start, wait_until

CODE = {
    "good": "def predict(x): return x * 2",
    "raises": ("def predict(x):\n    if (x == 5).any():\n        raise ValueError('no')\n    return x * 2\n"),
}
PLAN = "shadow = 0\ncanary = [0.1]\ncanary_h = 24\nleast = 500\n"
SOURCES = [f"camera-{number}" for number in range(60)]


def repository(folder: Path, candidate: str, plan: str = PLAN) -> Path:
    model = folder / "models" / "m"
    for version, kind in (("1", "good"), ("2", candidate)):
        (model / version).mkdir(parents=True)
        (model / version / "model.py").write_text(CODE[kind])
    tensors = "".join(
        f'[[{side}]]\nname = "{name}"\ndatatype = "FP32"\nshape = [2]\n'
        for side, name in (("input", "x"), ("output", "y"))
    )
    (model / "model.toml").write_text(
        f'backend = "python"\nmax_batch = 8\nslo_ms = 2000\n[rollout]\n{plan}{tensors}'
    )
    return folder / "models"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"CARPOOL_STATE_DIR": str(tmp_path / "state"), "CARPOOL_ALLOW_ROLLOUTS": "true"}


def status(server: Live) -> dict[str, Any]:
    try:
        response = server.get("/v2/models/m/rollout")
    except (OSError, AssertionError):
        return {"state": "not there"}
    return dict(orjson.loads(response.body)) if response.status == 200 else {"state": "not there"}


def act(server: Live, action: str) -> None:
    body = orjson.dumps({"action": action})
    with server.connect() as client:
        assert client.post("/v2/models/m/rollout", body).status == 200


def infer(server: Live, source: str = "") -> Any:
    extra = f"X-Carpool-Source: {source}\r\n".encode() if source else b""
    with server.connect() as client:
        return client.post(infer_path("m"), json_request([5.0, 1.0], [1, 2]), extra)


def until_state(server: Live, state: str) -> dict[str, Any]:
    wait_until(lambda: status(server)["state"] == state, state)
    return status(server)


def test_killed_in_each_state_it_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    models = repository(tmp_path, "good")
    with serving(models, folder=tmp_path, environment=environment) as server:
        until_state(server, "canary")
        for action, state in (
            (None, "canary"),
            ("pause", "paused"),
            ("resume", "canary"),
            ("promote", "standby"),
        ):
            if action is not None:
                act(server, action)
            before = until_state(server, state)
            os.kill(server.engine_pid, signal.SIGKILL)
            wait_until(lambda: status(server)["state"] == "not there" or not server.is_ready(), "it died")
            after = until_state(server, state)
            for key in ("stable", "candidate", "share", "step", "digests"):
                assert after[key] == before[key]
            assert abs(after["elapsed_s"] - before["elapsed_s"]) <= 10.0


@pytest.mark.conformance
def test_the_supervisor_killed_it_goes_on_too(tmp_path: Path, environment: dict[str, str]) -> None:
    models = repository(tmp_path, "good")
    with serving(models, folder=tmp_path, environment=environment) as server:
        before = until_state(server, "canary")
        server.signal(signal.SIGKILL)
        server.wait()
    again = start(models, folder=tmp_path, environment=environment)
    try:
        again.until_ready()
        after = until_state(again, "canary")
        assert (after["share"], after["digests"]) == (before["share"], before["digests"])
        assert abs(after["elapsed_s"] - before["elapsed_s"]) <= 10.0
    finally:
        again.end()


def test_a_candidate_that_raises_goes_back_and_no_client_notices(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    models = repository(tmp_path, "raises")
    with serving(models, frontends=2, folder=tmp_path, environment=environment) as server:
        until_state(server, "canary")
        statuses: list[int] = []

        def back() -> bool:
            statuses.extend(infer(server, source).status for source in SOURCES)
            return status(server)["state"] == "rolled-back"

        wait_until(back, "rolled back")
        assert set(statuses) == {200}
        found = status(server)
        assert found["rollbacks"] == {"errors": 1}
        wait_until(lambda: status(server)["seen_ms"] is not None, "all front ends know")
        assert {infer(server, source).fields.get("x-carpool-version", "1") for source in SOURCES} == {"1"}


@pytest.mark.conformance
def test_both_doors_choose_alike(tmp_path: Path, environment: dict[str, str]) -> None:
    models = repository(tmp_path, "good", PLAN.replace("0.1", "0.5"))
    with serving(models, grpc=1, folder=tmp_path, environment=environment) as server:
        until_state(server, "canary")
        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:

            def version(**headers: str) -> str:
                tensor = grpcclient.InferInput("x", [1, 2], "FP32")
                tensor.set_data_from_numpy(np.array([[5, 1]], np.float32))
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return str(client.infer("m", [tensor], headers=named).get_response().model_version)

            over_http = [infer(server, source).fields["x-carpool-version"] for source in SOURCES[:20]]
            assert set(over_http) == {"1", "2"}
            assert [version(x_carpool_source=source) for source in SOURCES[:20]] == over_http
            assert {version(x_carpool_rollout="stable") for _ in range(5)} == {"1"}
            assert {version(x_carpool_rollout="candidate") for _ in range(5)} == {"2"}
            with pytest.raises(InferenceServerException, match="must be stable or candidate"):
                version(x_carpool_rollout="newest")
