"""A task and a backend from another package, asked over HTTP: two entry points are all that they need."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

import outside
from carpool.demo import pictures
from live.server import serving

TASK = """
from __future__ import annotations

from typing import Annotated

from carpool.vision.picture_answers import Option, fraction
from carpool.vision.picture_answers import Answer
from carpool.vision.tasks.task import VisionTask, read_floats, size


class Brightness(Answer):
    brightness: Annotated[float, "from 0 to 2"]
    is_dark: Annotated[bool, "below the limit"]


class TASK(VisionTask):
    name = "brightness"
    route, summary = "/brightness", "Say how bright a picture is"
    form, title = Brightness, "How bright the image is"
    example = {"brightness": 0.5, "is_dark": True}
    options = {"limit": Option(fraction, {"type": "number"}, "Darker is dark.")}
    quick = True

    def answer(self, outputs, geometry, options):
        value = float(read_floats(outputs, self._settings.outputs[0])[0])
        is_dark = value < options.extra.get("limit", 0.1)
        return dict(Brightness(image=size(geometry), brightness=round(value, 3), is_dark=is_dark))
"""


@pytest.mark.conformance
def test_a_picture_is_asked_about(tmp_path: Path) -> None:
    package = tmp_path / "site"
    package.mkdir()
    outside.install(package, tasks=TASK)
    model = outside.model(tmp_path, 'task = "brightness"\n')
    photo = pictures()[0].read_bytes()
    with (
        serving(model, folder=tmp_path, environment={"PYTHONPATH": str(package)}) as server,
        server.connect() as client,
    ):
        answer = orjson.loads(client.post("/brightness?limit=1", photo).body)
        assert answer.pop("brightness") > 0.3
        assert answer == {
            "model": "bright",
            "version": "1",
            "assumed": ["resize", "mean", "std", "channels"],
            "image": {"width": 512, "height": 512},
            "is_dark": True,
        }
        wrong = client.post("/brightness?score=1", photo)
        assert wrong.status == 400
        assert b'\\"score\\" is not an option of brightness' in wrong.body
        drawn = client.post("/models/bright/predict", photo, b"Accept: image/png\r\n")
        assert b"cannot be drawn" in drawn.body
        document = orjson.loads(client.get("/openapi.json").body)
        assert document["paths"]["/brightness"]["post"]["summary"] == "Say how bright a picture is"
        assert "is_dark" in document["components"]["schemas"]["Brightness"]["properties"]
