"""A real `mlflow server` with sqlite: versions registered by MLflow's own client are served."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.onnx_models import identity
from conformance.mlflow_venv import VARIABLE
from live.server import free_ports, infer_path, json_request, outputs_of, serving
from waiting import until

pytestmark = pytest.mark.conformance

START_S = 300.0  # its imports alone take a minute on a busy machine
REGISTER = """
import sys
import mlflow, onnx
from mlflow import MlflowClient

client = MlflowClient()
mlflow.set_experiment("carpool")
for path in sys.argv[1:]:
    with mlflow.start_run():
        model, named = onnx.load(path), {"name": "model", "registered_model_name": "detector"}
        mlflow.onnx.log_model(model, pip_requirements=[], **named)
client.set_registered_model_alias("detector", "champion", 1)
"""


class Mlflow:
    """The server, and its own client in a process of its own."""

    def __init__(self, python: Path, url: str, process: subprocess.Popen[bytes]) -> None:
        self._python = python
        self.url = url
        self._process = process

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def client(self, code: str, *arguments: object) -> str:
        given = os.environ | {"MLFLOW_TRACKING_URI": self.url}
        command = [str(self._python), "-c", code, *map(str, arguments)]
        done = subprocess.run(
            command, env=given, capture_output=True, text=True, timeout=START_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def move(self, version: int, alias: str = "champion") -> None:
        sent = {"name": "detector", "alias": alias, "version": str(version)}
        self._ask("registered-models/alias", sent)

    def tags(self, version: int) -> dict[str, str]:
        found = self._ask(f"model-versions/get?name=detector&version={version}")["model_version"]
        return {tag["key"]: tag["value"] for tag in found.get("tags", ())}

    def champion(self) -> int:
        found = self._ask("registered-models/alias?name=detector&alias=champion")
        return int(found["model_version"]["version"])

    def _ask(self, path: str, sent: object = None) -> Any:
        body = None if sent is None else json.dumps(sent).encode()
        asked = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Mlflow]:
    found = os.environ.get(VARIABLE)
    if not found:
        pytest.skip(f"no MLflow: `make conformance` installs one (not with --ci), or {VARIABLE}=…/bin/python")
    python = Path(found)
    [port] = free_ports(1)
    command = [str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts"), "--serve-artifacts"]
    with (tmp_path / "mlflow.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
    one = Mlflow(python, url := f"http://127.0.0.1:{port}", process)
    try:
        until(lambda: _answers(url) or process.poll() is not None, "MLflow did not start", START_S)
        assert process.poll() is None, (tmp_path / "mlflow.log").read_text(errors="replace")
        yield one
    finally:
        one.end()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def test_registered_versions_are_served_and_told_how_they_fare(mlflow: Mlflow, tmp_path: Path) -> None:
    models = [identity(tmp_path / f"{number}.onnx", shape=("batch", 2 + number)) for number in (1, 2)]
    mlflow.client(REGISTER, *models)
    folder = tmp_path / "detector"
    folder.mkdir()
    (folder / "model.toml").write_text('[registry]\nstable = "models:/detector@champion"\npoll_s = 1\n')
    with serving(folder, folder=tmp_path, environment={"CARPOOL_REGISTRY": mlflow.url}) as server:

        def shape() -> list[int]:
            [one] = server.get_json("/v2/models/detector")["inputs"]
            return list(one["shape"])

        assert shape() == [-1, 3]
        mlflow.move(2)
        until(lambda: shape() == [-1, 4], "the new version")
        until(lambda: mlflow.tags(2).get("carpool.state") == "full", "the tag")
        mlflow.move(1)
        until(lambda: shape() == [-1, 3], "the old version again")


def test_a_challenger_is_rolled_out_and_becomes_the_champion(mlflow: Mlflow, tmp_path: Path) -> None:
    """Shadow, canary and full, each told to MLflow; back when the alias moves back; and MLflow may go."""
    models = [identity(tmp_path / f"{number}.onnx") for number in (1, 2)]
    mlflow.client(REGISTER, *models)
    folder = tmp_path / "detector"
    folder.mkdir()
    (folder / "model.toml").write_text(
        'slo_ms = 5000\n[registry]\nstable = "models:/detector@champion"\n'
        'candidate = "models:/detector@challenger"\npoll_s = 1\nmove_alias = true\n'
        "[rollout]\nshadow = 1.0\nshadow_h = 0.0001\ncanary = [0.5]\ncanary_h = 0\nleast = 10\n"
        "guards = { disagreement = 0.5, errors = false, late = false, feedback = false }\n"
    )
    given = {"CARPOOL_REGISTRY": mlflow.url, "CARPOOL_STATE_DIR": str(tmp_path / "state")}
    with serving(folder, folder=tmp_path, environment=given) as server:

        def found() -> dict[str, Any]:
            return dict(server.get_json("/v2/models/detector/rollout"))

        def told(version: int, word: str) -> None:
            until(lambda: mlflow.tags(version).get("carpool.state") == word, f"{version}: {word}")

        def ask() -> None:
            with server.connect() as client:
                answered = client.post(infer_path("detector"), json_request([1, 2, 3], [1, 3]))
            assert outputs_of(answered) == {"y": [1, 2, 3]}

        def asked_until(state: str) -> bool:
            ask()
            return found()["state"] == state

        mlflow.move(2, "challenger")
        told(2, "shadow")
        mlflow.move(1, "challenger")
        told(2, "rolled-back")
        mlflow.move(2, "challenger")
        told(2, "shadow")  # it waits for comparisons
        until(lambda: asked_until("canary"), "the canary")
        told(2, "canary")  # it waits for answers
        until(lambda: asked_until("standby"), "everything")
        told(2, "standby")
        assert [line["to"] for line in found()["history"]][-6:] == [
            *("loading", "checked", "shadow", "canary", "full", "standby"),
        ]
        assert mlflow.tags(2)["carpool.rollout"].startswith("1 to 2, begun ")
        until(lambda: mlflow.champion() == 2, "the alias")
        mlflow.end()
        server.until_metric(0.0, "carpool_registry_up")
        ask()
    with serving(folder, folder=tmp_path, environment=given) as server:
        ask()
        assert found()["state"] == "standby"
        until(lambda: server.get_json("/v2/models/detector")["versions"] == ["1", "2"], "both versions")
