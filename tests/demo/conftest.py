"""The models and pictures of the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from carpool.demo import demo_models, pictures


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    """The folder of each model."""
    return {folder.name: folder for folder in demo_models()}


@pytest.fixture(scope="session")
def model_file(models: dict[str, Path]) -> Callable[[str], Path]:
    return lambda name: models[name] / "1" / "model.onnx"


@pytest.fixture(scope="session")
def photo() -> Callable[[str], Image.Image]:
    """One of the pictures that come with the package."""
    by_name = {path.stem: path for path in pictures()}

    def find(name: str) -> Image.Image:
        with Image.open(by_name[name]) as picture:
            return picture.convert("RGB")

    return find


@pytest.fixture(scope="session")
def middle() -> Callable[[Image.Image, int, Image.Resampling], NDArray[np.float32]]:
    """The short side to side ÷ 0.875, then the middle: [side, side, 3]."""

    def crop(picture: Image.Image, side: int, kernel: Image.Resampling) -> NDArray[np.float32]:
        factor = side / 0.875 / min(picture.size)
        width, height = (round(length * factor) for length in picture.size)
        left, top = (width - side) // 2, (height - side) // 2
        scaled = picture.resize((width, height), kernel).crop((left, top, left + side, top + side))
        return np.asarray(scaled, np.float32)

    return crop
