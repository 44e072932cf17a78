"""A real Ray cluster in a namespace of its own: what must hold whatever the clock says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ray_fleet
from conformance.ray_venv import VARIABLE

LIMIT_S = 600.0
ATTACKS = Path(__file__).parents[1] / "conformance" / "ray_attacks.py"


def told(script: Path, *arguments: str) -> dict[str, Any]:
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip("make ray installs what this needs, and make conformance names it")
    command = ray_fleet.isolated(Path(python), script, list(arguments))
    if subprocess.run(
        [*command[: command.index(python)], "true"], check=False, capture_output=True
    ).returncode:
        pytest.skip("no namespaces for us on this machine")
    environment = ray_fleet.clean() | {"PYTHONPATH": str(Path(ray_fleet.__file__).parent)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.conformance
def test_a_step_a_lost_node_and_less_load_cost_no_request() -> None:
    found = told(Path(ray_fleet.__file__), "--json", "--inside")
    assert (found["failed"], found["why"]) == (0, "")
    assert found["seconds"].keys() == {"deploy", "step", "node", "down"}, "each was reached"
    assert found["requests"] > 1000
    assert found["over"]["grpc"]["requests"] > 100


@pytest.mark.conformance
def test_attacks() -> None:
    found = told(ATTACKS)
    assert "/nowhere/models" in found["bad path"]
    assert found["bad path leaves"] == []
    assert "was not ready within 0.1 s" in found["never ready"]
    assert (found["first answer"], found["addresses"]) == (200, True)
    assert "HAProxy does not start at" in found["same port"]
    assert found["two fleets"] == [200, 200, True]
    assert found["one deleted, the other serves"] == [200, []]
    assert found["deployed again"] == [True, [200]]
    assert found["book killed"] == [[200], True]
    assert found["haproxy killed"] == [200, True]
    assert found["balancer killed"] == [200, False]
    assert found["server killed"] == [[200], 2]
    assert found["actor killed"] == [[200], 2]
    assert found["built"] == [200]
    assert found["deleted by Serve alone"] == []
    assert (found["served"], found["predict"], found["infer"]) == (200, "eyes", [[0.0] * 4])
    assert found["errors"] == [
        ["NotFound", "unknown-model"],
        ["InvalidInput", "invalid-input"],
        ["Refused", "cannot-finish"],
        ["InvalidInput", "invalid-input"],
    ]
    assert (found["grpc"], found["log"]) == (0, True), "every call answered, in the replica's log"
    assert found["changed ports"] == [["ConfigError", "invalid-config"]] * 2
    assert (found["composed"], found["serve build"]) == ("eyes", [200])


def test_the_text_says_what_is_not_as_wished() -> None:
    found = {"seconds": {"deploy": 31.0, "step": 5.0}, "requests": 10, "failed": 0, "why": ""}
    found["over"] = {"grpc": {"requests": 4, "failed": 0}}
    text = ray_fleet.as_text(found | {"in_time": 0.9, "refused": 1})
    assert text.count("NOT as wished") == 1
    assert "over grpc: 4 requests, 0 failed" in text
    assert "10 requests, 0 failed (none), 1 refused early, 90.0 % in time" in text
