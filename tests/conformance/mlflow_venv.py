"""An environment of its own with MLflow in it, for the tests against a real server: it has ninety packages,
and none of them is needed for anything else.

    make mlflow      installs it, once
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance import environment

VARIABLE = "CARPOOL_MLFLOW"
"""Names the interpreter, for tests."""
PACKAGES = ("mlflow==3.17.2", "onnx", "onnxruntime")


def install() -> Path:
    """Its interpreter."""
    return environment.install("mlflow", "MLflow", PACKAGES) / "bin" / "python"


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
