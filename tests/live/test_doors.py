"""Keys, browsers and the default address, with a server of real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from backends import onnx_models
from frontend.access.key_files import ALICE, BOB, ROOT, admin_keys, api_keys, write
from frontend.http.harness import Client
from live.server import Live, command, descendants, infer_path, json_request, serving, start
from waiting import until

FRONTENDS = 2
BODY = json_request([1, 2, 3, 4, 5, 6], [2, 3])
LOAD = "/v2/repository/models/a/load"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("doors")
    onnx_models.arithmetic(made / "models" / "a" / "1" / "model.onnx")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    environment = {
        "CARPOOL_API_KEY_FILE": api_keys(folder),
        "CARPOOL_ADMIN_KEY_FILE": admin_keys(folder),
        "CARPOOL_MODEL_CONTROL_MODE": "explicit",
        "CARPOOL_LOAD_MODELS": "a",
    }
    with serving(
        folder / "models", frontends=FRONTENDS, grpc=1, folder=folder, environment=environment
    ) as running:
        yield running


def statuses(server: Live, key: str, times: int = 12) -> set[int]:
    """On connections of their own: over all front ends."""
    found = set()
    for _ in range(times):
        with server.connect() as client:
            found.add(client.post(infer_path("a"), BODY, b"X-API-Key: %b\r\n" % key.encode()).status)
    return found


def test_tritons_clients_bring_their_key(server: Live) -> None:
    with tritonclient.http.InferenceServerClient(server.url) as http:
        assert http.is_server_ready()
        with pytest.raises(InferenceServerException, match="a key is needed"):
            http.get_model_metadata("a")
        headers = {"Authorization": f"Bearer {ALICE}"}
        assert http.get_model_metadata("a", headers=headers)["name"] == "a"
        with pytest.raises(InferenceServerException, match="alice is for inference"):
            http.load_model("a", headers=headers)
        http.load_model("a", headers={"X-API-Key": ROOT})
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc:
        assert grpc.is_server_ready()
        with pytest.raises(InferenceServerException, match="a key is needed"):
            grpc.get_model_metadata("a")
        assert grpc.get_model_metadata("a", headers={"x-api-key": ALICE}).name == "a"
        grpc.load_model("a", headers={"authorization": f"Bearer {ROOT}"})
    assert {line["by"] for line in server.events("control")} == {"root"}


def test_new_keys_reach_every_process(server: Live, folder: Path) -> None:
    assert statuses(server, ALICE) == {200}
    write(folder / "api", f"carol {BOB}\n")
    until(lambda: statuses(server, BOB) == {200}, "the new key is known")
    until(lambda: statuses(server, ALICE) == {401}, "the old key is not")
    told = len(server.events("keys-not-read"))
    write(folder / "api", f"carol {BOB}\n", mode=0o644)
    until(lambda: len(server.events("keys-not-read")) > told, "a file for everybody is told")
    assert statuses(server, BOB) == {200}
    api_keys(folder)  # for the tests that may come next
    until(lambda: statuses(server, ALICE) == {200}, "the first key is known again")


def test_keys_are_nowhere_to_be_read(server: Live) -> None:
    seen = [server.log(), *(" ".join(command(pid)) for pid in (server.pid, *descendants(server.pid)))]
    for key in (ALICE, BOB, ROOT):
        assert not any(key in text for text in seen)


def test_files_that_will_not_do_stop_the_start(folder: Path, tmp_path: Path) -> None:
    bad = write(tmp_path / "keys", "alice\n")
    server = start(folder / "models", folder=tmp_path, environment={"CARPOOL_API_KEY_FILE": bad})
    assert server.wait() != 0
    assert f"{bad}, line 1" in server.log()


@pytest.mark.conformance
def test_control_without_keys_is_not_for_pages(folder: Path, tmp_path: Path) -> None:
    given = {"CARPOOL_MODEL_CONTROL_MODE": "explicit"}
    with serving(folder / "models", frontends=0, folder=tmp_path, environment=given) as closed:
        assert not closed.events("control-is-open")
        with Client("127.0.0.1", closed.port) as client:
            field = b"Sec-Fetch-Site: cross-site\r\n"
            assert client.post(LOAD, b"{}", field).status == 403
            assert client.post(LOAD, b"{}").status == 200
