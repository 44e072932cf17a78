"""Log and trace settings changed while a server of real processes runs, and seen in what it writes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from backends import onnx_models
from live.server import Live, infer_path, json_request, serving
from waiting import until

FRONTENDS = 2
BODY = json_request([1, 2, 3, 4, 5, 6], [2, 3], id="my-id")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("settings")
    for name in ("a", "b"):
        onnx_models.arithmetic(folder / "models" / name / "1" / "model.onnx")
    traces = {"CARPOOL_TRACE_FILE": str(folder / "traces.jsonl")}
    with serving(folder / "models", frontends=FRONTENDS, folder=folder, environment=traces) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.url) as connected:
        yield connected


def ask(server: Live, model: str, times: int) -> None:
    """On connections of their own: over all front ends."""
    for _ in range(times):
        with server.connect() as connection:
            assert connection.post(infer_path(model), BODY).status == 200


# ---- logs


def levels(server: Live, since: int) -> Counter[tuple[str, str]]:
    lines = server.log()[since:].splitlines()
    return Counter((line["part"], line["level"]) for line in map(orjson.loads, filter(None, lines)))


@pytest.mark.conformance
def test_log_settings_reach_every_process(server: Live, client: InferenceServerClient) -> None:
    settings = client.get_log_settings()
    assert settings == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    with pytest.raises(InferenceServerException):
        client.update_log_settings({"log_file": "/tmp/x"})
    assert client.update_log_settings({"log_info": False}) == {**settings, "log_info": False}
    silent = len(server.log())
    os.kill(server.frontend_pids[0], signal.SIGKILL)  # its death is an error; its start would be told as info
    until(lambda: ("supervisor", "error") in levels(server, silent), "the death is told")
    server.until_ready()
    until(lambda: len(server.frontend_pids) == FRONTENDS, "it is back")
    seen = levels(server, silent)
    assert {level for _, level in seen} == {"error"}, "neither the supervisor nor anyone else says more"
    assert client.update_log_settings(settings) == settings
    loud = len(server.log())
    client.update_trace_settings(settings={"trace_rate": "5"})
    client.update_trace_settings(settings={"trace_rate": None})
    until(lambda: levels(server, loud)["trace", "info"] == 2, "the engine talks again")


# ---- traces


def traces(server: Live) -> list[dict[str, Any]]:
    file = server.log_file.parent / "traces.jsonl"
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]


def test_traces(server: Live, client: InferenceServerClient) -> None:
    assert "trace" in client.get_server_metadata()["extensions"]
    off = client.get_trace_settings()
    assert off["trace_level"] == ["OFF"]
    ask(server, "a", 3)
    assert traces(server) == []
    on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    assert client.update_trace_settings(settings=on) == {**off, **on}
    client.update_trace_settings("b", {"trace_level": ["OFF"]})
    ask(server, "a", 20)
    ask(server, "b", 5)
    client.update_trace_settings(settings={"trace_level": None, "trace_rate": None})
    ask(server, "a", 5)
    assert client.get_trace_settings() == off
    found = traces(server)
    assert len(found) == 20
    assert {(trace["model"], trace["request_id"], trace["images"]) for trace in found} == {("a", "my-id", 2)}
    assert len({trace["id"] for trace in found}) == 20
    assert len({trace["id"].partition("-")[0] for trace in found}) == FRONTENDS
    for trace in found:
        times = [step["ns"] for step in trace["timestamps"]]
        assert times == sorted(times)
        assert 0 < times[-1] - times[0] < 20e9


def test_a_number_of_traces_holds_for_all_front_ends(server: Live, client: InferenceServerClient) -> None:
    before = len(traces(server))
    client.update_trace_settings(
        settings={"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "10"}
    )
    ask(server, "a", 40)
    until(lambda: client.get_trace_settings()["trace_count"] == "0", "all are used")
    until(lambda: len(traces(server)) == before + 10, "ten traces")
    ask(server, "a", 10)
    assert len(traces(server)) == before + 10
    client.update_trace_settings(settings=dict.fromkeys(("trace_level", "trace_rate", "trace_count")))


def test_wrong_settings(client: InferenceServerClient) -> None:
    for settings, status in (({"trace_rat": "1"}, "400"), ({"trace_file": "/tmp/x"}, "501")):
        with pytest.raises(InferenceServerException) as raised:
            client.update_trace_settings(settings=settings)
        assert raised.value.status() == status
    with pytest.raises(InferenceServerException, match="unknown model: 'c'") as raised:
        client.get_trace_settings("c")
    assert raised.value.status() == "404"


@pytest.mark.conformance
def test_without_a_file_for_traces(tmp_path: Path) -> None:
    onnx_models.arithmetic(tmp_path / "models" / "a" / "1" / "model.onnx")
    with (
        serving(tmp_path / "models", frontends=0, folder=tmp_path) as server,
        InferenceServerClient(server.url) as client,
    ):
        with pytest.raises(InferenceServerException, match="--trace-file"):
            client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
        client.update_log_settings({"log_info": False, "log_warning": False})
        assert client.get_log_settings()["log_info"] is False
        ask(server, "a", 1)
