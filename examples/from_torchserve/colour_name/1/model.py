"""Serves the TorchServe handler beside it, unchanged: a request's bytes in, its answer as JSON out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from handler import ColourHandler
from numpy.typing import NDArray
from PIL import Image

INPUTS = {"data": ("BYTES", [1])}
OUTPUTS = {"answer": ("BYTES", [1])}


def blank() -> bytes:
    """A small picture. Before the first request the model is measured with empty strings."""
    file = io.BytesIO()
    Image.new("RGB", (224, 224), "grey").save(file, "JPEG")
    return file.getvalue()


class Model:
    def setup(self, config: dict[str, Any]) -> None:
        properties = {"model_dir": str(Path(config["file"]).parent), "gpu_id": config["gpu"]}
        self.context = SimpleNamespace(system_properties=properties, manifest={})
        self.blank = blank()
        self.handler = ColourHandler()
        self.handler.initialize(self.context)

    def predict(self, data: NDArray[np.object_]) -> list[list[bytes]]:
        """`data` holds the whole batch: one row of one string for each request."""
        requests = [{"body": row[0] or self.blank} for row in data]
        return [[json.dumps(answer).encode()] for answer in self.handler.handle(requests, self.context)]
