from __future__ import annotations

import json

import pytest

from cli_run import run_cli

KEYS = {
    "replicas",
    "max_batch",
    "max_delay_ms",
    "p50_ms",
    "p99_ms",
    "capacity_rps",
    "headroom",
    "cost_per_1000",
    "why",
}
BASE = ("plan", "--curve", "4+1", "--slo-ms", "50", "--rate", "500")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter checks: whether the planner is right is asked in tests/lab/test_plan.py."""
    monkeypatch.setattr("carpool.lab.fleet_plan._REQUESTS", 3_000)
    monkeypatch.setattr("carpool.lab.fleet_plan._SECONDS", 4.0)


def test_json_has_every_key() -> None:
    result = run_cli([*BASE, "--price-per-hour", "2.5", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found.keys() >= KEYS
    assert (found["replicas"], found["max_delay_ms"], found["max_batch"]) == (1, 0, 46)
    assert found["cost_per_1000"] > 0
    assert found["settings"]["surge"] == 1
    assert all(isinstance(sentence, str) for sentence in found["why"])


def test_text_gives_the_numbers_and_the_reasons() -> None:
    options = ("--redundancy", "1", "--price-per-hour", "2.5", "--max-batch", "32")
    result = run_cli([*BASE, *options])
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "replicas 2, 1 of them redundant" in text
    assert "max batch 32" in text
    assert "max delay 0 ms" in text
    assert "cost per 1,000 images 0.00278" in text
    assert "the SLO holds with 1 failed" in text


def test_no_plan_is_an_answer_with_exit_code_1() -> None:
    args = ("plan", "--curve", "10+1", "--slo-ms", "20", "--rate", "5")
    result = run_cli(args)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert "an SLO of at least 22 ms" in " ".join(result.stdout.split())
    found = json.loads(run_cli([*args, "--json"]).stdout)
    assert found["replicas"] is None
    assert "No number of replicas" in found["why"][0]


@pytest.mark.conformance
def test_steps_of_a_pipeline_are_planned_together() -> None:
    asked = ("plan", "--step", "4+1", "--step", "3+0.22@4.2", "--slo-ms", "100", "--rate", "1500", "--json")
    result = run_cli(asked)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["replicas"] == 2
    assert found["max_batch"] is None
    assert found["settings"]["step"] == ["4+1", "3+0.22@4.2"]
    assert "2 steps on a device for each" in found["why"][0]
