"""A model that nobody can be sure of: tensors are served, and every image route says what to set."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from frontend.picture_models import picture
from frontend.whole_server import whole_server
from vision.tiny_exports import ULTRALYTICS, detector

ASKED = 'set task = "detect" or "obb" in model.toml, or give --task to carpool serve'


@pytest.mark.parametrize("route", ["/models/parts/predict", "/detect?model=parts", "/detect", "/classify"])
def test_every_image_route_says_what_to_set(route: str, tmp_path: Path) -> None:
    with whole_server(detector(tmp_path / "parts.onnx", 2)) as server, server.connect() as client:
        answer = client.post(route, picture())
        assert answer.status in (400, 404)
        assert ASKED in orjson.loads(answer.body)["error"]
        config = orjson.loads(client.get("/v2/models/parts/config").body)
        told = {name: value["string_value"] for name, value in config["parameters"].items()}
        assert told["carpool_task"] == ""
        assert "could be detect" in told["carpool_evidence"]
        assert ASKED in told["carpool_ask"]
        live = orjson.loads(client.get("/console/live").body)
        assert ASKED in live["models"][0]["ask"]


def test_the_command_line_can_say_it(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("nut\nbolt\n")
    given = {"task": "detect", "labels": str(tmp_path / "names.txt")}
    with whole_server(detector(tmp_path / "parts.onnx", 2), **given) as server, server.connect() as client:
        answer = orjson.loads(client.post("/detect?score=0", picture()).body)
        assert {one["label"] for one in answer["detections"]} <= {"nut", "bolt"}


def test_an_export_with_dynamic_axes_is_served_as_it_says(tmp_path: Path) -> None:
    file = detector(tmp_path / "parts.onnx", 2, dynamic=True, **ULTRALYTICS)
    with whole_server(file) as server, server.connect() as client:
        answer = client.post("/detect?score=0", picture())
        assert answer.status == 200
        assert {one["label"] for one in orjson.loads(answer.body)["detections"]} <= {"nut", "bolt"}
        config = orjson.loads(client.get("/v2/models/parts/config").body)
        assert config["parameters"]["carpool_task"]["string_value"] == "detect"
        assert "metadata of Ultralytics" in config["parameters"]["carpool_evidence"]["string_value"]
