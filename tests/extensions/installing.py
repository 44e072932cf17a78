"""Lays out a package as an installer does, with what leads a server to its extension."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def install(package: Path, into: Path, points: Mapping[str, str], version: str = "1.0") -> None:
    """`points` are entry points of the group `carpool.extensions`."""
    shutil.copytree(package, into / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    about = into / f"{package.name}-{version}.dist-info"
    about.mkdir()
    name = package.name.replace("_", "-")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{point} = {place}\n" for point, place in points.items()]
    (about / "entry_points.txt").write_text("[carpool.extensions]\n" + "".join(lines))


def environment_with(site: Path) -> dict[str, str]:
    """What a process needs to find the packages in this folder."""
    return {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT / "src")))}
