"""`carpool top`: the sums of a history, and what scripts get."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from carpool.cli.top_command import bars, summary
from cli_run import run_cli
from console.stage import Stage, stage
from waiting import until

BOUNDS = {"seconds": [0.01, 0.02, 0.05], "batch": [1.0, 2.0, 4.0]}


def point(second: int, **model: Any) -> dict[str, Any]:
    server = {"connections": 3, "cores": 1.5, "memory_bytes": 2e8, "gpus": []}
    models = {"m/1": model} if model else {}
    return {"number": second, "time": float(second), "seconds": 1.0, "server": server, "models": models}


def test_figures_are_of_the_last_seconds_and_the_line_of_all() -> None:
    busy = {
        "answered": 10,
        "latency": {"buckets": {"1": 10}, "sum": 0.15},
        "rejected": {"overload": 4, "given-up": 1},
        "batch": {"buckets": {"2": 3}, "sum": 10.0},
        "pending": 6,
    }
    points = [point(1, answered=99), point(2, **busy), point(3, **busy), point(4)]
    found = summary({"bounds": BOUNDS, "points": points}, 3)
    assert found["seconds"] == 3.0
    model = found["models"]["m/1"]
    assert model["answered_rps"] == pytest.approx(6.67)
    assert model["rejected"] == {"overload": 8, "given-up": 2}
    assert (model["p50_ms"], model["mean_batch"], model["pending"]) == (15.0, 3.33, 0)
    assert model["answered_by_second"] == [99, 10, 10, 0]
    assert summary({"bounds": BOUNDS, "points": []}, 10)["models"] == {}


def test_core_time_per_request_is_that_of_all_processes_over_all_models() -> None:
    points = [point(1, answered=1000), point(2, answered=20), point(3, answered=10), point(4)]
    points[2]["models"]["other/1"] = {"answered": 15}
    found = summary({"bounds": BOUNDS, "points": points}, 3)
    assert found["core_ms_per_request"] == 100.0  # 1.5 cores for 3 s over 45 requests
    assert summary({"bounds": BOUNDS, "points": points}, 1)["core_ms_per_request"] is None


def test_the_highest_column_is_the_largest_value() -> None:
    assert bars([0, 1, 2, 4]) == " ▂▄█"
    assert bars([]) == ""


@pytest.fixture(scope="module")
def served() -> Iterator[Stage]:
    with stage() as running:
        yield running


def run(*words: str, url: str = "") -> str:
    done = run_cli(["top", *words], env={"CARPOOL_URL": url})
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_once_and_json_over_a_server_that_the_environment_names(served: Stage) -> None:
    def counted() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("--json", "--seconds", "900", url=served.url))["models"]
        return found.get("detector/1", {})

    served.count("detector", 40, 0.02, cannot_finish=4)
    until(lambda: bool(counted()))
    assert counted()["rejected"] == {"cannot-finish": 4}
    text = run("--once", "--seconds", "900", url=served.url)
    assert "detector/1" in text
    assert "cannot-finish" in text
    assert "ms of a core per request" in text


def test_what_is_wrong_is_one_line() -> None:
    done = run_cli(["top", "--seconds", "0", "--once"])
    assert done.exit_code == 2
    assert "--seconds must be a whole number from 1 to 900" in done.stderr
