"""An environment of its own with MLflow in it, for the tests against a real server: it has ninety packages,
and none of them is needed for anything else.

    make mlflow      installs it, once
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VARIABLE = "CARPOOL_MLFLOW"
"""Names the interpreter, for tests."""
PACKAGES = ("mlflow==3.17.2", "onnx", "onnxruntime")
FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "mlflow"
_INSTALL_S = 1200.0


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
        sys.exit(f"conformance: MLflow could not be installed: {error}\n(--ci goes without)")
    done.write_text(" ".join(PACKAGES))
    return python


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
