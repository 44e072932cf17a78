"""Single files of other tools, as they are, which no package brings: fetched for the tests that run them.

python tests/conformance/tool_sources.py fetches them, once, and prints the folder. Where their host is out of
reach, CARPOOL_TOOL_SOURCES names a folder that has them, as OWNER/NAME/PATH. They are checked by their sums.
"""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

VARIABLE = "CARPOOL_TOOL_SOURCES"
"""Names the folder, for tests too."""
FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "tool-sources"
_FETCH_S = 30.0


class Repository(NamedTuple):
    revision: str
    files: Mapping[str, str]  # SHA-256 by path


REPOSITORIES: Mapping[str, Repository] = {
    "blakeblackshear/frigate": Repository(
        "e3fa70189324e5eb3b1dba756c153f6696f457de",
        {
            "frigate/detectors/detection_api.py": (
                "454266e22834bc455d2ae34032d5d19c760aa3d96359664d4f986b49d10e0f79"
            ),
            "frigate/detectors/detector_config.py": (
                "cddb12c7c1df488aa633fc2cddc9afff469666b9e0bb580a7b763bf5b6854b17"
            ),
            "frigate/detectors/plugins/deepstack.py": (
                "26a8e9e3385059241e12d7a6c38e578d1b7682b87993c1423b5a7d2301d48f34"
            ),
            "frigate/detectors/plugins/zmq_ipc.py": (
                "a7196d7827a05e66ee28611ac963b4bcb16a6f851eb43a55d5a659cbb1b05018"
            ),
            "frigate/util/model.py": "c66e1a4f3081209c7c8bebbd8bf81af65b218bb1fa777fe704295c37a0c8df85",
        },
    ),
    "cvat-ai/cvat": Repository(
        "fb475182d8dda8693007ada3ae2cd4e95c9076cf",
        {
            "cvat/apps/lambda_manager/views.py": (
                "df9878a1b2588a53ae5b75a4254c9a8ec6108c8fd2489b17664bb6c4a3ebc1f8"
            )
        },
    ),
    "HumanSignal/label-studio": Repository(
        "a58848ff14ed5ebb41c15d76cde537a421a4bf14",
        {
            "label_studio/ml/api_connector.py": (
                "3258af3828208fbda3f39e3260c21388cd0d22963edb25ac11464c3e70e22b29"
            )
        },
    ),
}


def install(folder: Path = FOLDER) -> Path:
    """Returns the folder with all files. Raises `OSError` that says which file could not be had, and why."""
    given = os.environ.get(VARIABLE)
    for name, repository in REPOSITORIES.items():
        for path, digest in repository.files.items():
            target = folder / name / path
            if target.is_file() and _digest(target.read_bytes()) == digest:
                continue
            known = Path(given, name, path) if given else None
            found = known.read_bytes() if known is not None else _fetched(name, repository.revision, path)
            if _digest(found) != digest:
                raise OSError(f"{name}/{path} is another file than the tests were written for")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(found)
    return folder


def _fetched(name: str, revision: str, path: str) -> bytes:
    url = f"https://raw.githubusercontent.com/{name}/{revision}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=_FETCH_S) as answer:
            found: bytes = answer.read()
    except OSError as error:
        raise OSError(f"{url}: {error}; {VARIABLE} may name a folder that has it") from None
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sources_of(name: str) -> Path:
    """Returns the folder of one repository, for a test."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"{VARIABLE} names no folder: make conformance fetches one, or says why it cannot")
    return Path(folder, name)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{install()}\n")
    except OSError as error:
        sys.exit(f"conformance: sources of other tools could not be fetched: {error}")
