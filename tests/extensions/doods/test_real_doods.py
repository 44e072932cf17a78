"""pydoods, as it is, against a front end with a fake engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from conformance.api_clients_venv import said_by
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import front_end
from frontend.picture_models import LABELS, RED, detector, picture

pytestmark = pytest.mark.conformance
PROGRAM = """
import json, sys
from pydoods import PyDOODS
url, key, path = sys.argv[1:]
client = PyDOODS(url, key, 30)
listed = client.get_detectors()["detectors"]
found = client.detect(open(path, "rb").read(), {"red": 50}, listed[0]["name"], id="7")
print(json.dumps([listed, found]))
"""


def test_detectors_and_detection(tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(picture(RED))
    guard, settings = Guard(api_key_file=api_keys(tmp_path)), ServerSettings(api=("doods",))
    with front_end(detector(), guard=guard, settings=settings) as served:
        listed, found = said_by(PROGRAM, f"http://{served.url}/doods", ALICE, photo)
    assert listed[0]["labels"] == list(LABELS)
    assert found["id"] == "7"
    assert [one["label"] for one in found["detections"]] == ["red"]
