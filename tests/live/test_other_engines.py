"""Pictures to models on runtimes other than onnxruntime, over HTTP."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from PIL import Image

from backends import tflite_models
from live.server import serving


@pytest.mark.conformance
def test_a_picture_reaches_a_tflite_model_that_wants_channels_last(tmp_path: Path) -> None:
    folder = tmp_path / "colours"
    (folder / "1").mkdir(parents=True)
    tflite_models.brightness(folder / "1" / "model.tflite")
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    (folder / "model.toml").write_text(
        'task = "classify"\nlabels = "labels.txt"\nmax_batch = 4\n[classify]\nactivation = "none"\n'
    )
    shot = io.BytesIO()
    Image.new("RGB", (40, 30), (10, 200, 100)).save(shot, "png")
    with (
        serving(folder, folder=tmp_path) as server,
        server.connect() as client,
    ):
        answer = orjson.loads(client.post("/classify?top_k=2", shot.getvalue()).body)
    found = [(item["label"], round(item["score"], 2)) for item in answer["classes"]]
    assert [name for name, _ in found] == ["green", "blue"]
    assert 0.6 < found[0][1] < 0.9
