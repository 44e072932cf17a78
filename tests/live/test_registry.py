"""A server that follows a registry: it starts from an address, an alias moves, the registry goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.onnx_models import identity
from extensions.registry.stand_in import standing_in
from live.server import Live, infer_path, json_request, outputs_of, serving
from waiting import until

CHAMPION = "models:/detector@champion"


def served_version(server: Live) -> list[str]:
    versions: list[str] = server.get_json("/v2/models/detector")["versions"]
    return versions


def check_answer(server: Live) -> None:
    with server.connect() as client:
        answered = client.post(infer_path("detector"), json_request([1, 2, 3], [1, 3]))
    assert outputs_of(answered) == {"y": [1, 2, 3]}


@pytest.mark.conformance
def test_an_alias_moves_and_the_registry_goes_while_it_serves(tmp_path: Path) -> None:
    folder = tmp_path / "detector"
    folder.mkdir()
    (folder / "model.toml").write_text(f'[registry]\nstable = "{CHAMPION}"\npoll_s = 1\n')
    with standing_in() as mlflow:
        for version in (1, 2):
            mlflow.register(version, identity(tmp_path / f"{version}.onnx").read_bytes())
        mlflow.aliases["champion"] = 1
        environment = {"MLFLOW_TRACKING_URI": mlflow.url, "MLFLOW_TRACKING_TOKEN": "s3cret"}
        with serving(folder, folder=tmp_path, environment=environment) as server:
            assert served_version(server) == ["1"]
            mlflow.aliases["champion"] = 2
            until(lambda: served_version(server) == ["2"], "the new version")
            check_answer(server)
            until(lambda: mlflow.tags.get(2), "the tag")
            mlflow.instead = lambda _path: (503, {}, b"")
            server.until_metric(0.0, "carpool_registry_up")
            check_answer(server)
            assert server.metric("carpool_registry_moves_total", model="detector") == 1
            assert "s3cret" not in server.log()
    with serving(folder, folder=tmp_path, environment=environment) as server:  # nobody answers there now
        assert served_version(server) == ["2"]
        check_answer(server)
        assert "no response" in server.log()


@pytest.mark.conformance
def test_an_address_is_served(tmp_path: Path) -> None:
    with standing_in() as mlflow:
        mlflow.register(5, identity(tmp_path / "5.onnx").read_bytes())
        mlflow.aliases["champion"] = 5
        environment = {"CARPOOL_REGISTRY": mlflow.url}
        with serving(Path(CHAMPION), frontends=0, folder=tmp_path, environment=environment) as server:
            assert served_version(server) == ["5"]
            check_answer(server)
