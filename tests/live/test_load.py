"""`carpool load` against `carpool serve`, with real processes: counts and reasons, but no times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import carpool.demo
from later import later
from live.server import PATIENCE_S, Live, serving
from waiting import until

MODEL = """
backend = "fake"
{mode}
max_batch = 16
[fake]
curve = "{curve}"
[[input]]
name = "x"
datatype = "UINT8"
shape = [1000]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
CODE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("load")
    for name, mode, curve in (("quick", "", "1+0.1"), ("slow", "slo_ms = 200", "60+30")):
        model = folder / "models" / name
        model.mkdir(parents=True)
        (model / "model.toml").write_text(MODEL.format(mode=mode, curve=curve))
    given = {"CARPOOL_RECORD": str(folder / "arrivals.jsonl"), "CARPOOL_ALLOW_CLIENT_SHM": "1"}
    with serving(folder / "models", frontends=2, grpc=1, folder=folder, environment=given) as running:
        yield running


def start(url: str, options: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-P", "-c", CODE, "load", url, *options.split()]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def load(url: str, options: str) -> dict[str, Any]:
    with start(url, options + " --json") as process:
        said, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    found: dict[str, Any] = json.loads(said)
    ends = found["answered"] + found["timed_out"] + found["unanswered"]
    ends += sum(found["refused"].values()) + sum(found["failed"].values())
    assert ends == found["offered"]
    return found


def arrivals(server: Live, model: str) -> list[dict[str, Any]]:
    """What the server has written of them so far."""
    lines = (server.log_file.parent / "arrivals.jsonl").read_bytes().split(b"\n")
    return [arrival for arrival in map(json.loads, filter(None, lines)) if arrival["model"] == model]


def url_of(server: Live, protocol: str) -> str:
    return f"http://{server.url}" if protocol == "http" else f"grpc://127.0.0.1:{server.grpc_port}"


@pytest.mark.parametrize(
    ("protocol", "processes"), [("http", 2), ("grpc", 1), later("http", 1), later("grpc", 2)]
)
def test_everything_that_is_sent_is_answered_and_counted(server: Live, protocol: str, processes: int) -> None:
    before = server.metric("nv_inference_request_success", model="quick")
    options = f"--model quick --concurrency 4 --requests 200 --batch 2 --processes {processes}"
    found = load(url_of(server, protocol), options + " --source a:2 --source b --slo-ms 60000")
    assert (found["offered"], found["answered"], found["good"]) == (200, 200, 200)
    assert found["batch"]["count"] == found["queue_ms"]["count"] == found["outside_ms"]["count"] == 200
    assert found["batch"]["max"] >= 2
    assert found["generator"]["processes"] == processes
    assert found["settings"]["batch"] == 2
    # Each process tried one request before it began.
    server.until_metric(before + 200 + processes, "nv_inference_request_success", model="quick")


@pytest.mark.conformance
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_refusals_have_the_servers_reasons(server: Live, protocol: str) -> None:
    before = len(arrivals(server, "slow"))
    found = load(url_of(server, protocol), "--model slow --rate 400:1,50:1 --arrivals constant --slo-ms 200")
    assert [phase["offered"] for phase in found["phases"]] == [400, 50]
    assert not found["failed"]
    assert sum(found["refused"].values()) > 50
    assert set(found["refused"]) <= {"cannot-finish", "overload", "given-up", "over-share", "deadline"}
    assert found["refusal_ms"]["count"] == sum(found["refused"].values())
    # Refused or not, it came; so did the one that was tried before.
    until(lambda: len(arrivals(server, "slow")) == before + 451, "recorded")
    assert all(set(arrival) == {"time", "model", "images"} for arrival in arrivals(server, "slow"))


def test_a_table_for_people_and_single_requests_in_a_file(server: Live, tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    with start(
        f"http://{server.url}", f"--model quick --rate 100 --duration 0.5 --seed 4 --save {file}"
    ) as process:
        said, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "open loop, 0.5 s" in said
    assert "response p99 / p99.9" in said
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert f"{len(rows)}  (" in said
    assert all(row["outcome"] == "answered" for row in rows)


def test_interrupted_it_still_reports(server: Live) -> None:
    before = server.metric("nv_inference_request_success", model="quick")
    with start(f"http://{server.url}", "--model quick --rate 100 --duration 600 --json") as process:
        try:
            until(
                lambda: server.metric("nv_inference_request_success", model="quick") >= before + 20,
                "under way",
            )
            os.kill(process.pid, signal.SIGINT)
            said, error = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, error
    found = json.loads(said)
    assert found["stopped_early"]
    assert 19 <= found["offered"] == found["answered"]


@pytest.mark.conformance
def test_a_server_without_such_a_model(server: Live) -> None:
    for protocol in ("http", "grpc"):
        with start(url_of(server, protocol), "--model none --rate 5") as process:
            said, error = process.communicate(timeout=60)
        assert (process.returncode, said) == (1, "")
        assert "none" in error
        assert len(error.splitlines()) == 1


@pytest.mark.conformance
def test_pictures_are_uploaded(tmp_path: Path) -> None:
    demo = Path(carpool.demo.__file__).parent
    picture = demo / "pictures" / "coffee.jpg"
    with serving(demo / "models" / "nanodet", folder=tmp_path) as server:
        found = load(f"http://{server.url}/detect", f"--image {picture} --concurrency 2 --requests 6")
    assert (found["offered"], found["failed"]) == (6, {})
    assert found["answered"] >= 1
    assert found["batch"]["count"] == found["answered"]


@pytest.mark.conformance
def test_tensors_in_shared_memory(server: Live) -> None:
    before = {path.name for path in Path("/dev/shm").glob("carpool-load-*")}
    found = load(server.url, "--model quick --concurrency 4 --requests 40 --shared-memory")
    assert found["answered"] == 40
    assert {path.name for path in Path("/dev/shm").glob("carpool-load-*")} <= before
