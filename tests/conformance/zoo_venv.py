"""An environment of its own with the libraries whose files benchmarks/zoo2026.py serves, over the packages of
.venv.

PYTHONPATH=tests python -m conformance.zoo_venv installs it, once, and prints its interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance import environment
from conformance.engines_venv import look_into_ours

PACKAGES = (
    *("transformers==5.23.0", "requests", "pydantic>=2,<3", "pyDeprecate>=0.9,<0.10", "ftfy", "regex"),
    *(
        "omegaconf",
        "pyclipper",
        "shapely",
        "six",
        "colorlog",
        "defusedxml",
        "onnx_graphsurgeon",
        "onnxscript",
    ),
)
ALONE = (
    *("torchvision==0.28.0", "timm==1.0.31", "rfdetr==1.11.2", "open_clip_torch==3.3.0", "rapidocr==3.10.0"),
    *("supervision==0.31.2", "onnxsim==0.8.1"),
)
"""Without what they depend on: it would bring another PyTorch."""


def install() -> Path:
    """Its interpreter."""
    runs = (PACKAGES, ("--no-deps", *ALONE))
    return environment.install("zoo", "libraries of models", *runs, before=look_into_ours) / "bin" / "python"


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
