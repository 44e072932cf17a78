"""A model in plain Python: the mean colour of a picture, and how its pixels spread over shades of grey."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

INPUTS = {"image": ("UINT8", [32, 32, 3])}  # name: datatype, shape without the batch
OUTPUTS = {"colour": ("FP32", [3]), "shades": ("FP32", [4])}
MAX_BATCH = 16


class Model:
    def setup(self, config: dict[str, Any]) -> None:
        """Runs once, before the first batch: load weights here. Parameters arrive as strings."""
        self.shades = int(config["parameters"]["shades"])

    def predict(self, image: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        """`image` holds the whole batch: [n, 32, 32, 3]. Every output has n rows too."""
        grey = image.mean(axis=3)
        level = (grey * self.shades / 256).astype(int)
        shades = [(level == shade).mean(axis=(1, 2)) for shade in range(self.shades)]
        return {
            "colour": image.mean(axis=(1, 2), dtype=np.float32),
            "shades": np.stack(shades, axis=1).astype(np.float32),
        }
