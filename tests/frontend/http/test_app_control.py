"""Loading and unloading over HTTP: a whole server in one process, with Triton's own client and with bytes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from engine.scripted import Stage, model, scripted_stage, settings, weights
from frontend.http.harness import Client, Response
from frontend.whole_server import WholeServer, whole_server
from waiting import until

__all__ = ["scripted_stage"]

CONFIG = orjson.dumps(
    {
        "backend": "fake",
        "max_batch_size": 2,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    }
).decode()


def client_of(server: WholeServer) -> InferenceServerClient:
    return InferenceServerClient(server.url, network_timeout=60.0)


def ask(client: InferenceServerClient, name: str = "m", version: str = "") -> tuple[str, float]:
    """The version that answered, and what."""
    tensor = InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
    result = client.infer(name, [tensor], model_version=version)
    return result.get_response()["model_version"], float(result.as_numpy("y")[0, 0])


def index(client: InferenceServerClient) -> list[dict[str, str]]:
    found: list[dict[str, str]] = client.get_model_repository_index()
    return found


def status(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return caught.value.status(), caught.value.message()


def order(client: Client, what: str, document: object = None, name: str = "m") -> Response:
    body = b"" if document is None else orjson.dumps(document)
    return client.post(f"/v2/repository/models/{name}/{what}", body)


def test_explicit_control_with_tritons_client(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, policy="{ latest = 1 }")
    model(tmp_path, "n", v1=5.0)
    with (
        whole_server(tmp_path, model_control_mode="explicit", load_models=("n",)) as server,
        client_of(server) as client,
    ):
        assert "model_repository(unload_dependents)" in client.get_server_metadata()["extensions"]
        assert index(client) == [{"name": "m"}, {"name": "n", "version": "1", "state": "READY"}]
        assert not client.is_model_ready("m")
        assert status(lambda: ask(client)) == (
            "404",
            "Request for unknown model: 'm' is not found; it is in the repository, but not loaded",
        )
        client.load_model("m")
        assert client.is_model_ready("m")
        assert ask(client) == ("1", 1.0)
        weights(tmp_path, "m", 2, 2.0)
        client.load_model("m")
        assert ask(client) == ("2", 2.0)
        client.unload_model("m", unload_dependents=True)
        assert status(lambda: ask(client)) == (
            "404",
            "Request for unknown model: 'm' has no available versions; it is not loaded",
        )
        until(
            lambda: (
                {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"} in index(client)
            )
        )
        client.unload_model("m")
        client.unload_model("o")  # which never was
        code, message = status(lambda: client.load_model("o"))
        said = (
            "failed to load 'o', failed to poll from model repository: there is no model 'o'; there are m, n"
        )
        assert (code, message) == ("404", said)
        assert ask(client, "n") == ("1", 5.0)
        assert client.is_server_ready()


def test_overrides_with_tritons_client(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    with (
        whole_server(tmp_path, model_control_mode="explicit", load_models=("*",)) as server,
        client_of(server) as client,
    ):
        client.load_model("m", config=CONFIG)
        assert client.get_model_config("m")["max_batch_size"] == 2
        client.load_model("m", config=CONFIG, files={"file:3/weights": b"3"})
        assert ask(client) == ("3", 3.0)
        client.load_model("m")
        assert ask(client) == ("1", 1.0)
        assert client.get_model_config("m")["max_batch_size"] == 4
        code, message = status(lambda: client.load_model("m", config='{"max_batch": 3}'))
        assert (code, 'unknown field "max_batch"' in message) == ("400", True)
        assert message.startswith("failed to load 'm', failed to poll from model repository: ")


def test_a_load_that_fails_says_why_and_the_old_one_answers(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    with (
        whole_server(tmp_path, model_control_mode="explicit", load_models=("m",)) as server,
        client_of(server) as client,
    ):
        weights(tmp_path, "m", 1, "broken")
        said = "load failed for model 'm': m: broken weights"
        assert status(lambda: client.load_model("m")) == ("500", said)
        assert ask(client) == ("1", 1.0)
        assert index(client)[0]["reason"] == "m: broken weights"
        assert index(client)[0]["state"] == "READY"
        client.unload_model("m")
        assert status(lambda: client.load_model("m"))[0] == "500"
        assert status(lambda: ask(client)) == (
            "503",
            "Request for unknown model: 'm' has no available versions; it is unavailable: m: broken weights",
        )


@pytest.mark.parametrize(
    ("mode", "words"), [("none", "at its start; to load"), ("poll", "follows its model folders")]
)
def test_the_other_modes_refuse_and_say_what_to_do(
    tmp_path: Path, stage: Stage, mode: str, words: str
) -> None:
    model(tmp_path, v1=1.0)
    with whole_server(tmp_path, model_control_mode=mode) as server, client_of(server) as client:
        extensions = client.get_server_metadata()["extensions"]
        assert "model_repository" in extensions
        assert "model_repository(unload_dependents)" not in extensions
        for call in (client.load_model, client.unload_model):
            code, message = status(lambda call=call: call("m"))  # type: ignore[misc]
            assert code == "503"
            assert words in message
            assert "--model-control-mode explicit" in message
        assert ask(client) == ("1", 1.0)


def test_polling_follows_the_folders(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0, policy="{ latest = 1 }")
    with whole_server(tmp_path, model_control_mode="poll") as server, client_of(server) as client:
        weights(tmp_path, "m", 2, 2.0)
        assert ask(client) == ("1", 1.0)
        server.wait_for(server.desk.look())
        assert ask(client) == ("2", 2.0)
        model(tmp_path, "n", v1=3.0)
        settings(tmp_path, policy='"all"')
        server.wait_for(server.desk.look())
        assert ask(client, "n") == ("1", 3.0)
        assert ask(client, "m", "1") == ("1", 1.0)


def test_polling_looks_by_itself(tmp_path: Path, stage: Stage) -> None:
    (tmp_path / "models").mkdir()
    with (
        whole_server(tmp_path / "models", model_control_mode="poll", poll_s=0.1) as server,
        client_of(server) as client,
    ):
        assert index(client) == []
        model(tmp_path, v1=1.0)
        (tmp_path / "m").rename(tmp_path / "models" / "m")
        until(lambda: client.is_model_ready("m"))


def test_in_explicit_mode_the_index_learns_of_new_folders(tmp_path: Path, stage: Stage) -> None:
    with (
        whole_server(tmp_path, model_control_mode="explicit", poll_s=0.1) as server,
        client_of(server) as client,
    ):
        model(tmp_path, v1=1.0)
        until(lambda: index(client) == [{"name": "m"}])
        assert stage.loads == []


def test_a_body_on_its_way_is_answered_by_what_is_current_when_it_is_complete(
    tmp_path: Path, stage: Stage
) -> None:
    model(tmp_path, v1=1.0, policy="{ latest = 1 }")
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
    head = orjson.dumps({"inputs": [tensor]})
    body = head + bytes(4)
    fields = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n" % (len(head), len(body))
    start = b"POST /v2/models/m%b/infer HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n"
    with (
        whole_server(tmp_path, model_control_mode="explicit", load_models=("m",)) as server,
        server.connect() as control,
        server.connect() as slow,
        server.connect() as named,
        server.connect() as other,
    ):
        slow.send(start % b"" + body[:-1])
        named.send(start % b"/versions/1" + body[:-1])
        assert other.send(start % b"" + body).response().status == 200  # the others have been heard too
        weights(tmp_path, "m", 2, 2.0)
        assert order(control, "load").status == 200
        until(lambda: stage.open == [2.0])
        answer = slow.send(body[-1:]).response()
        assert answer.status == 200
        assert orjson.loads(answer.body)["model_version"] == "2"
        assert orjson.loads(answer.body)["outputs"][0]["data"] == [2.0]
        gone = named.send(body[-1:]).response()
        assert (gone.status, orjson.loads(gone.body)["reason"]) == (404, "unknown-version")


def test_an_answer_names_the_version_that_gave_it(tmp_path: Path, stage: Stage) -> None:
    """Requests with one head share what was worked out of it, but not the model that answers them."""
    model(tmp_path, v1=1.0, policy="{ latest = 1 }")
    body = orjson.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]})
    other = body.replace(b"1.0", b"0.0")
    with (
        whole_server(tmp_path, model_control_mode="explicit", load_models=("m",)) as server,
        server.connect() as control,
        server.connect() as rider,
        server.connect() as quick,
    ):
        rider.send(
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        until(lambda: server.wait_for(_busy(server)))
        weights(tmp_path, "m", 2, 2.0)
        assert order(control, "load").status == 200
        assert orjson.loads(quick.post("/v2/models/m/infer", other).body)["model_version"] == "2"
        stage.riding.set()
        answer = orjson.loads(rider.response().body)
        assert (answer["model_version"], answer["outputs"][0]["data"]) == ("1", [1.0])


async def _busy(server: WholeServer) -> bool:
    return not server.host.engine.find("m").runtime.driver.idle


BAD: list[tuple[str, Any, int, str]] = [
    ("load", [], 400, "JSON object"),
    ("load", {"parameters": []}, 400, "parameters must be an object"),
    ("load", {"parametres": {}}, 400, 'did you mean "parameters"'),
    ("load", {"parameters": {"confg": "{}"}}, 400, 'unknown parameter "confg"; did you mean "config"'),
    ("load", {"parameters": {"config": {}}}, 400, "config must be a string"),
    ("load", {"parameters": {"file:1/a": 3}}, 400, "file:1/a must be a string"),
    ("load", {"parameters": {"config": CONFIG, "file:1/a": "§"}}, 400, "base64"),
    ("load", {"parameters": {"config": CONFIG, "file:../a": "AA=="}}, 400, "must be named like"),
    ("load", {"parameters": {"config": CONFIG, "file:1/" + "a" * 300: "AA=="}}, 400, "at most 255"),
    ("load", {"parameters": {"file:1/a": "AA=="}}, 400, "needs its settings too"),
    ("load", {"parameters": {"unload_dependents": True}}, 400, "unknown parameter"),
    ("unload", {"parameters": {"unload_dependents": 1}}, 400, "true or false"),
    ("unload", {"parameters": {"config": "{}"}}, 400, "unknown parameter"),
    ("load", {"parameters": {"config": "{"}}, 400, "not valid JSON"),
]


def test_bad_orders_change_nothing(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    with (
        whole_server(
            tmp_path, model_control_mode="explicit", load_models=("m",), max_body_bytes=1 << 16
        ) as server,
        server.connect() as client,
    ):
        for what, document, code, words in BAD:
            response = order(client, what, document)
            assert response.status == code, (what, document, response)
            assert words in orjson.loads(response.body)["error"]
        assert client.post("/v2/repository/models/m/load", b"{").status == 400
        named = client.post("/v2/repository/mine/models/m/load", b"")
        assert (named.status, "several repositories" in named.body.decode()) == (501, True)
        huge = {"parameters": {"config": CONFIG, "file:1/a": base64.b64encode(bytes(1 << 16)).decode()}}
        with server.connect() as another:
            assert order(another, "load", huge).status == 413
        for name in ("..%2Fm", "%00", "m%2F1", "x" * 300):
            assert order(client, "load", name=name).status in (400, 404)
        for name in ("..%2Fm", "%2Fetc"):
            files = {"parameters": {"config": CONFIG, "file:1/weights": "MQ=="}}
            assert order(client, "load", files, name=name).status == 400
        with client_of(server) as checked:
            assert ask(checked) == ("1", 1.0)
        assert len(stage.loads) == 1
