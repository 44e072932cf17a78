"""An environment of its own with sahi, and its sliced prediction of the demo's detector there.

python tests/conformance/sahi_venv.py installs it, once, and prints its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "CARPOOL_SAHI"
"""Names the interpreter, for tests and for benchmarks/tiles.py."""
PACKAGES = ("sahi==0.12.8", "onnxruntime==1.31.1")
FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "sahi"
PROGRAM = Path(__file__).parent / "sahi_sliced.py"
_INSTALL_S = 1200.0


def install(folder: Path = FOLDER, packages: Sequence[str] = PACKAGES) -> Path:
    """Its interpreter."""
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.is_file() and done.read_text() == " ".join(packages):
        return python
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
        subprocess.run([str(python), *quiet, *packages], check=True, timeout=_INSTALL_S)
    except subprocess.SubprocessError as error:
        sys.exit(f"conformance: sahi could not be installed: {error}\n(--ci goes without)")
    done.write_text(" ".join(packages))
    return python


class Sahi:
    """A process with the model loaded, which answers one question after the other."""

    def __init__(self, python: str | Path, model: Path, *more: str) -> None:
        command = [str(python), "-W", "ignore", str(PROGRAM), str(model), *more]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Sahi:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its pipes
            self._process.kill()

    def ask(self, **question: Any) -> Any:
        given, said = self._process.stdin, self._process.stdout
        assert given is not None
        assert said is not None
        given.write(json.dumps(question) + "\n")
        given.flush()
        line = said.readline()
        assert line, f"sahi ended with {self._process.wait()}"
        return json.loads(line)


def sahi_python() -> str:
    """Returns the interpreter; skips a test where there is none."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter: make conformance installs one")
    return python


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
