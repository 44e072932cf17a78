"""`carpool sweep` with real servers of its own on the fake backend: stopped, gone on with, and reported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import repositories
from live.server import serving
from waiting import until

CODE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
TINY = "--seconds 0.3 --warmup 0 --max-delay-ms 0 --json"


def sweep(target: str, options: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-P", "-c", CODE, "sweep", target, *options.split()]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    with process:
        said, error = process.communicate(timeout=90)
    assert process.returncode == 0, error
    found: dict[str, Any] = json.loads(said)
    return found


@pytest.fixture(name="model")
def a_model(tmp_path: Path) -> Path:
    return repositories.fake(tmp_path / "models", curve="2+0.5")


@pytest.mark.conformance  # tests/lab/sweep has its servers and its settings without processes
def test_its_own_servers_have_the_settings_that_were_asked_for(model: Path, tmp_path: Path) -> None:
    found = finished(
        sweep(str(model), f"{TINY} --rates 40 --repeats 1 --max-batch 2 --out {tmp_path / 'out'}")
    )
    assert [point["setting"] for point in found["points"]] == ["promise 200 ms", "knobs 0 ms, batch 2"]
    for run in found["runs"]:
        ends = run["answered"] + run["timed_out"] + run["unanswered"]
        assert ends + sum(run["refused"].values()) + sum(run["failed"].values()) == run["offered"]
        assert run["answered"] > 0
    assert {int(size) for size in found["runs"][1]["batches"]} <= {1, 2}
    assert "SLO 200 ms" in (tmp_path / "out" / "server-1.log").read_text()
    assert "fixed batching" in (tmp_path / "out" / "server-2.log").read_text()


@pytest.mark.conformance  # tests/lab/sweep/test_journal.py has what is kept of it
def test_a_sweep_of_a_running_server_is_interrupted_and_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = f"{TINY} --rates 20,40 --repeats 3 --curve 2+0.5 --out {out}"
    with serving(model, folder=tmp_path) as server:
        url = f"http://{server.url}"
        first = sweep(url, options)
        lines = out / "runs.jsonl"
        until(lambda: lines.exists() and lines.read_text().count("\n") >= 2, "two runs", 60.0)
        first.send_signal(signal.SIGINT)
        begun = finished(first)
        assert 2 <= len(begun["runs"]) <= begun["planned_runs"] == 6
        found = finished(sweep(url, options))
        assert server.process.poll() is None
    assert found["runs"][: len(begun["runs"])] == begun["runs"], "what was done is not done again"
    assert len(found["runs"]) == 6
    assert (found["model"], found["requests"]) == ("fake", "random tensors, one in a request")
    assert [point["setting"] for point in found["points"]] == ["as it is"] * 2
    assert (out / "report.html").stat().st_size > 20_000
    with sweep(url, options.replace("20,40", "20,50")) as other:
        _, error = other.communicate(timeout=60)
    assert (other.returncode, "rates was [20.0, 40.0] and is [20.0, 50.0] now" in error) == (2, True), error
    with sweep(url, f"{TINY} --rates 5 --out {tmp_path / 'gone'}") as gone:
        _, error = gone.communicate(timeout=60)
    assert (gone.returncode, "there is no server" in error) == (1, True), error
