"""The models of the demo come with the package, and all of them can be served."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from carpool import demo
from carpool.config.repository import find_models
from carpool.core.objectives import Promise
from carpool.demo import bundled_models, demo_models, pictures
from carpool.demo.labelled import labelled_pictures, write_broken, write_classifier
from carpool.extensions.rollout.settings import rollout_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text("utf-8")


def test_the_models_can_be_served(models: dict[str, Path]) -> None:
    found, warnings = find_models(demo_models())
    assert [source.config.name for source in found] == list(models)
    assert warnings == []
    for source in found:
        assert isinstance(source.config.policy, Promise)
        assert source.config.task
        assert source.config.image


def test_settings_agree_with_the_models(models: dict[str, Path]) -> None:
    for source in find_models(demo_models())[0]:
        image, labels = source.config.image, (source.config.path / str(source.config.labels)).read_text()
        graph = onnx.load(str(source.versions[0].file), load_external_data=False).graph
        shape = [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim][1:]
        assert image is not None
        assert image.size is not None
        assert shape == ([3, *image.size] if image.layout == "nchw" else [*image.size, 3])
        if source.config.task == "classify":
            [_, classes] = graph.output[0].type.tensor_type.shape.dim
            assert len(labels.splitlines()) == classes.dim_value


def test_nothing_is_fetched_or_built(models: dict[str, Path]) -> None:
    assert list(models) == ["nanodet", "efficientnet_lite0", "open_nsfw", "u2netp"]
    assert sorted(models.values()) == sorted(path.parent for path in bundled_models().glob("*/model.toml"))
    assert all((folder / "1" / "model.onnx").is_file() for folder in models.values())


def test_the_segmenter_takes_batches(model_file: Any) -> None:
    graph = onnx.load(model_file("u2netp")).graph
    for [tensor], name, channels in ((graph.input, "images", 3), (graph.output, "mask", 1)):
        dims = tensor.type.tensor_type.shape.dim
        assert tensor.name == name
        assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", channels, 320, 320]


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
    assert sum(path.stat().st_size for path in files) < 26_500_000


def test_every_model_says_where_it_comes_from(models: dict[str, Path]) -> None:
    for name, folder in models.items():
        assert f"`{name}`" in PAGE
        readme = (folder / "README.md").read_text("utf-8")
        assert "icense" in readme
        assert name == "nanodet" or any(path.name.startswith("LICENSE") for path in folder.iterdir())


@pytest.mark.conformance
def test_what_the_demo_of_a_rollout_is_made_of(tmp_path: Path) -> None:
    """Two versions of two sizes, a third that is wrong, and pictures of which it is known what they show."""
    folder = tmp_path / "classifier"
    write_classifier(folder, "[rollout]\nguards = { disagreement = false }\n")
    write_broken(folder, 3)
    [source], warnings = find_models([folder])
    assert warnings == []
    rollout = rollout_settings(source.config)
    assert rollout is not None
    assert rollout.guards.disagreement is None
    names = (folder / str(source.config.labels)).read_text().splitlines()
    photos = labelled_pictures(6)
    right = dict.fromkeys((1, 2, 3), 0)
    for version in right:
        file = folder / str(version) / "model.onnx"
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        side = session.get_inputs()[0].shape[-1]
        for photo in photos:
            with Image.open(BytesIO(photo.picture)) as picture:
                pixels = np.asarray(picture.resize((side, side)), np.float32)
            [logits] = session.run(None, {"images": ((pixels - 127) / 128).transpose(2, 0, 1)[None]})
            right[version] += photo.is_right([names[place] for place in np.argsort(logits[0])[-5:]])
    assert right == {1: 6, 2: 6, 3: 0}
    assert len({photo.picture for photo in photos}) == 6
