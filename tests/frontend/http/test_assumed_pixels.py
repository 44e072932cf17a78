"""A model of which nothing says how it sees pixels: every answer names what was assumed, until it is set."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from carpool.client.client import Client
from frontend.picture_models import picture
from frontend.whole_server import whole_server
from vision.classifiers import classifier

ASSUMED = ["resize", "mean", "std", "channels"]


def test_answers_documents_and_clients_name_it(tmp_path: Path) -> None:
    with whole_server(classifier(tmp_path / "things.onnx")) as server, server.connect() as client:
        answer = client.post("/classify", picture())
        assert orjson.loads(answer.body)["assumed"] == ASSUMED
        assert answer.fields["x-carpool-assumed"] == ", ".join(ASSUMED)
        config = orjson.loads(client.get("/v2/models/things/config").body)
        assert config["parameters"]["carpool_assumed"]["string_value"] == ", ".join(ASSUMED)
        document = orjson.loads(client.get("/openapi.json").body)
        assert document["x-carpool-models"][0]["assumed"] == ASSUMED
        assert "`things` (resize, mean, std, channels)" in document["info"]["description"]
        assert orjson.loads(client.get("/console/live").body)["models"][0]["assumed"] == ASSUMED
        with Client(f"http://localhost:{server.port}") as asked:
            assert asked.classify(picture()).assumed == ASSUMED


@pytest.mark.parametrize("preset", ["torchvision", "plain"])
def test_a_preset_says_it(preset: str, tmp_path: Path) -> None:
    with whole_server(classifier(tmp_path / "m.onnx"), preset=preset) as server, server.connect() as client:
        answer = client.post("/classify", picture())
        assert answer.status == 200
        assert "assumed" not in orjson.loads(answer.body)
        assert "x-carpool-assumed" not in answer.fields
        config = orjson.loads(client.get("/v2/models/m/config").body)
        assert "carpool_assumed" not in config["parameters"]
