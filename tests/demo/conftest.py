"""The real models, built once for all tests of a worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from carpool.demo import demo_models, pictures
from carpool.demo.recipes import RECIPES, Recipe
from carpool.demo.sources import Source, find_source
from carpool.errors import Unavailable

NAMED = {recipe.name: recipe for recipe in RECIPES}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each model that could be built."""
    told: list[str] = []
    [_, *folders] = demo_models(tmp_path_factory.mktemp("cache"), told.append)
    found = {folder.name: folder for folder in folders}
    assert set(found) >= {recipe.name for recipe in RECIPES if not recipe.fetched}, told
    return found


@pytest.fixture(scope="session")
def model_file(models: dict[str, Path]) -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if name not in models and NAMED[name].fetched:
            pytest.skip(f"{name} cannot be fetched here")
        return models[name] / "1" / "model.onnx"

    return find


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """What the packages carry."""
    found: dict[str, Source] = {}

    def find(name: str) -> Source:
        recipe: Recipe = NAMED[name]
        try:
            if name not in found:
                found[name] = find_source(recipe, tmp_path_factory.mktemp(name))
        except Unavailable as error:
            pytest.skip(error.message)
        return found[name]

    return find


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
