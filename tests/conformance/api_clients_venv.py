"""An environment of its own with the clients of other tools, which bring a hundred packages along.

PYTHONPATH=tests python -m conformance.api_clients_venv installs it, once, and prints its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import environment

VARIABLE = "CARPOOL_API_CLIENTS"
"""Names the interpreter, for tests."""
PACKAGES = (
    *("inference-sdk==1.8.3", "supervision==0.30.9", "pydoods==1.0.2", "openai==3.51.0", "mcp==2.3.0"),
    "pyzmq==27.3.0",
)
_RUN_S = 300.0  # 400 runs of a detector on a busy machine


def install() -> Path:
    """Its interpreter."""
    return environment.install("api-clients", "clients of other tools", PACKAGES) / "bin" / "python"


def said_by(program: str, *arguments: object) -> Any:
    """Runs a program there; returns the JSON that its last line is."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter: make conformance installs one")
    command = [python, "-W", "ignore", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
