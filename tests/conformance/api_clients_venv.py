"""An environment of its own with the clients of other tools, which bring a hundred packages along.

python tests/conformance/api_clients_venv.py installs it, once, and prints its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "CARPOOL_API_CLIENTS"
"""Names the interpreter, for tests."""
PACKAGES = (
    *("inference-sdk==1.8.3", "supervision==0.30.9", "pydoods==1.0.2", "openai==3.51.0", "mcp==2.3.0"),
    "pyzmq==27.3.0",
)
FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "api-clients"
_INSTALL_S = 1200.0
_RUN_S = 300.0  # 400 runs of a detector on a busy machine


def install(folder: Path = FOLDER) -> Path:
    """Its interpreter."""
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.is_file() and done.read_text() == " ".join(PACKAGES):
        return python
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
        subprocess.run([str(python), *quiet, *PACKAGES], check=True, timeout=_INSTALL_S)
    except subprocess.SubprocessError as error:
        sys.exit(f"conformance: clients of other tools could not be installed: {error}\n(--ci goes without)")
    done.write_text(" ".join(PACKAGES))
    return python


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
