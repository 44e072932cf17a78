"""What `carpool deploy ray` prints and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import carpool
from carpool.engine.profile.model_profile import StartTimes
from carpool.extensions.ray.fleet_settings import FleetSettings
from cli_run import run_cli
from extensions.deploy.manifests import DEPLOY, documents, problems

ASKED = ["deploy", "ray", "/models", "--slo-ms", "50", "--replicas", "2,8"]
COMPONENT = DEPLOY / "kubernetes" / "components" / "rayservice" / "rayservice.yaml"


def applications(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(text)["applications"]
    return found


def test_the_configuration_has_arguments_that_can_be_read() -> None:
    printed = run_cli([*ASKED, "--dry-run"])
    assert printed.exit_code == 0, printed.output
    assert yaml.safe_load(printed.stdout)["proxy_location"] == "Disabled"
    (one,) = applications(printed.stdout)
    assert (one["name"], one["import_path"], one["route_prefix"]) == ("carpool", "carpool.ray:app", None)
    settings = FleetSettings.read(one["args"])
    assert (settings.models, settings.slo_ms, settings.replicas) == (("/models",), 50.0, (2, 8))


def test_new_replicas_take_as_long_as_the_slowest_start_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(name.encode())
    starts = {b"a": StartTimes(12.5, 40.0), b"b": StartTimes(31.0)}
    monkeypatch.setattr(
        "carpool.engine.profile.model_profile.last_start",
        lambda _, version: starts.get(version.file.read_bytes()),
    )

    def cold_start(*words: str) -> float:
        asked = ["deploy", "ray", *words, "--slo-ms", "50", "--replicas", "2,8", "--dry-run"]
        printed = run_cli(asked)
        assert printed.exit_code == 0, printed.output
        return FleetSettings.read(applications(printed.stdout)[0]["args"]).cold_start_s

    usual = FleetSettings(models=()).cold_start_s
    assert cold_start(str(tmp_path)) == 31.0
    assert cold_start(str(tmp_path / "a")) == 12.5
    assert cold_start(str(tmp_path / "c")) == usual, "it was never started here"
    assert cold_start("/models") == usual, "only the nodes have that folder"
    assert cold_start(str(tmp_path), "--cold-start", "7") == 7.0


def changed(document: Any, patch: list[dict[str, Any]]) -> Any:
    """A JSON patch that only replaces what is there."""
    for change in patch:
        *parents, last = change["path"].strip("/").split("/")
        place = document
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        assert change["op"] == "replace"
        assert last in place
        place[last] = change["value"]
    return document


def test_the_overlay_fits_its_component(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    more = ["--gpus", "1", "--fleet", "My_fleet", "--image", "registry/x:1", "--output", str(folder)]
    written = run_cli([*ASKED, *more])
    assert written.exit_code == 0, written.output
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert all((folder / part / "kustomization.yaml").is_file() for part in named["components"])
    service = changed(
        documents(COMPONENT.read_text())[0], json.loads((folder / "rayservice.yaml").read_text())
    )
    assert problems(service) == []
    assert service["metadata"]["name"] == "my-fleet"
    assert service["spec"]["serveConfigV2"] == (folder / "serve.yaml").read_text()
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (2, 8)
    container = workers["template"]["spec"]["containers"][0]
    assert container["image"] == "registry/x:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_component_serves_what_carpool_ray_takes() -> None:
    service = documents(COMPONENT.read_text())[0]
    (one,) = applications(service["spec"]["serveConfigV2"])
    settings = FleetSettings.read(one["args"])
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert settings.replicas == (workers["minReplicas"], workers["maxReplicas"])
    container = workers["template"]["spec"]["containers"][0]
    assert settings.cores == float(container["resources"]["limits"]["cpu"]), "one replica on each"
    assert {"name": "serve", "containerPort": settings.port} in container["ports"]
    grace = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= settings.stop_s + 10.0


def test_without_a_file_it_is_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed: list[FleetSettings] = []

    def deploy(settings: FleetSettings) -> str:
        deployed.append(settings)
        return "http://10.0.0.1:8000"

    fake = ModuleType("carpool.ray")
    monkeypatch.setattr(fake, "deploy_settings", deploy, raising=False)
    monkeypatch.setitem(sys.modules, "carpool.ray", fake)
    monkeypatch.setattr(carpool, "ray", fake, raising=False)
    told = run_cli(ASKED)
    assert told.exit_code == 0, told.output
    assert "carpool serves at http://10.0.0.1:8000, with 2 to 8 replicas." in told.stdout
    assert deployed[0].replicas == (2, 8)
    monkeypatch.setitem(sys.modules, "carpool.ray", None)
    assert run_cli(ASKED).exit_code == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["deploy", "ray"],
        [*ASKED[:-1], "none", "--dry-run"],
        [*ASKED, "--fleet", "a b", "--dry-run"],
        [*ASKED, "--port", "99999", "--dry-run"],
        [*ASKED, "--image", "}", "--output", "/nowhere/at/all"],
    ],
)
def test_what_cannot_be(wrong: list[str]) -> None:
    told = run_cli(wrong)
    assert told.exit_code == 2, told.output
