"""Rollouts of a real server: killed in the middle of one, and a candidate that fails under traffic."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from link.redis_server import redis_server
from live.server import Live, infer_path, json_request, serving, start
from waiting import until

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
    """And until it has gone on there, where its server was started again."""

    def there() -> bool:
        found = status(server)
        return found["state"] == state and not found.get("why", "").startswith("after a restart")

    until(there, state)
    return status(server)


def kill_engine(server: Live) -> None:
    """And wait until it is noticed."""
    os.kill(server.engine_pid, signal.SIGKILL)
    until(lambda: status(server)["state"] == "not there" or not server.is_ready(), "it died")


def check_same(after: dict[str, Any], before: dict[str, Any]) -> None:
    for key in ("state", "stable", "candidate", "share", "step", "digests", "paused_in"):
        assert after[key] == before[key], key
    assert abs(after["elapsed_s"] - before["elapsed_s"]) <= 10.0


def test_killed_it_goes_on_and_a_candidate_that_raises_goes_back_unnoticed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    models = repository(tmp_path, "raises")
    with serving(models, frontends=2, folder=tmp_path, environment=environment) as server:
        before = until_state(server, "canary")
        kill_engine(server)
        check_same(until_state(server, "canary"), before)
        until(server.is_ready, "ready again")
        statuses: list[int] = []

        def back() -> bool:
            statuses.extend(infer(server, source).status for source in SOURCES)
            return status(server)["state"] == "rolled-back"

        until(back, "rolled back")
        assert set(statuses) == {200}
        found = status(server)
        assert found["rollbacks"] == {"errors": 1}
        until(lambda: status(server)["seen_ms"] is not None, "all front ends know")
        assert {infer(server, source).fields.get("x-carpool-version", "1") for source in SOURCES} == {"1"}


WALK = (  # what is done, and the state that it leads to and stays in
    ("", "checked"),
    ("promote", "shadow"),
    ("promote", "canary"),
    ("promote", "canary"),
    ("pause", "paused"),
    ("resume", "canary"),
    ("promote", "standby"),
    ("promote", "done"),
)


@pytest.mark.conformance
@pytest.mark.parametrize("walk", [WALK, (*WALK[:4], ("abort", "rolled-back"))], ids=["done", "rolled-back"])
def test_engine_and_supervisor_killed_in_each_state(
    tmp_path: Path, environment: dict[str, str], walk: tuple[tuple[str, str], ...]
) -> None:
    """`full` and `retired` last for no time; tests/extensions/rollout/test_killed.py has their files."""
    plan = (
        "shadow = 1.0\nshadow_h = 24\ncanary = [0.1, 0.5]\ncanary_h = 24\nstandby_h = 24\n"
        'evaluate = "labelled.csv"\n'  # which is not there: it waits in `checked`
    )
    gate = tmp_path / "gate"
    gate.write_text("closed")
    models = repository(tmp_path, "good", plan)
    (models / "m" / "2" / "model.py").write_text(
        f"import time\nfrom pathlib import Path\nwhile Path({str(gate)!r}).exists():\n    time.sleep(0.05)\n"
        + CODE["good"]
    )
    server = start(models, folder=tmp_path, environment=environment)
    server.until_ready()

    def killed_twice(state: str) -> None:
        nonlocal server
        before = until_state(server, state)
        kill_engine(server)
        check_same(between := until_state(server, state), before)
        server.signal(signal.SIGKILL)
        server.wait()
        server = start(models, folder=tmp_path, environment=environment)
        server.until_ready()
        check_same(until_state(server, state), between)
        serves = "2" if state in ("standby", "done") else "1"
        answer = infer(server).fields.get("x-carpool-version", serves)
        assert answer == serves or before["share"]

    try:
        killed_twice("loading")
        gate.unlink()
        for action, state in walk:
            if action:
                act(server, action)
            killed_twice(state)
    finally:
        server.end()


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


@pytest.mark.conformance
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_replicas_roll_out_together_and_a_guard_of_one_sends_all_back(tmp_path: Path, kind: str) -> None:
    """Real servers: only the first gets traffic, and what it sees of the candidate ends it everywhere."""
    place = tmp_path / "shared"
    place.mkdir()
    models = repository(tmp_path, "raises")
    with contextlib.ExitStack() as stack:
        where = f"file:{place}" if kind == "file" else stack.enter_context(redis_server(place)).url
        servers = []
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            own = {
                "CARPOOL_STATE_DIR": str(tmp_path / name / "state"),
                "CARPOOL_ALLOW_ROLLOUTS": "true",
                "CARPOOL_ROLLOUT_STATE": where,
                "CARPOOL_CACHE_SECRET": "sixteen characters",
            }
            servers.append(stack.enter_context(serving(models, folder=tmp_path / name, environment=own)))
        for server in servers:
            until_state(server, "canary")
        statuses: list[int] = []

        def back() -> bool:
            statuses.extend(infer(servers[0], source).status for source in SOURCES)
            return status(servers[0])["state"] == "rolled-back"

        until(back, "rolled back")
        assert set(statuses) == {200}
        why = until_state(servers[0], "rolled-back")["why"]
        for server in servers[1:]:
            assert until_state(server, "rolled-back")["why"] == why
            assert {infer(server, source).fields.get("x-carpool-version", "1") for source in SOURCES} == {"1"}
        seen = [server.events("rollout")[-1] for server in servers]
        assert {line["state"] for line in seen} == {"rolled-back"}
