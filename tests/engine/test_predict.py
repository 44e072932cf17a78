"""Pictures through the engine's public face: what the image routes answer, without a server."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import carpool
from carpool.errors import InvalidInput, NotFound
from carpool.vision.python_pictures import Classes

SETTINGS = """backend = "fake"
max_batch = {batch}
{task}
[[input]]
name = "pixels"
datatype = "FP32"
shape = {dims}
[[output]]
name = "logits"
datatype = "FP32"
shape = {outputs}
[fake]
curve = "1+1"
"""


def model(folder: Path, batch: int = 4, task: str = 'task = "classify"', dims: str = "[3, 8, 8]") -> Path:
    folder.mkdir()
    outputs = "[3]" if batch else "[1, 3]"
    (folder / "model.toml").write_text(SETTINGS.format(batch=batch, task=task, dims=dims, outputs=outputs))
    return folder


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 90, 30)).save(out, "JPEG")
    return out.getvalue()


def predict(path: Path, given: bytes | str | Path, **options: Any) -> dict[str, Any]:
    async def story() -> dict[str, Any]:
        async with carpool.Engine(path) as engine:
            return await engine.predict(path.name, given, **options)

    return asyncio.run(asyncio.wait_for(story(), 60))


@pytest.mark.parametrize(("batch", "dims"), [(4, "[3, 8, 8]"), (0, "[1, 3, 8, 8]")])
def test_a_picture_is_answered_as_by_its_route(tmp_path: Path, batch: int, dims: str) -> None:
    answer = predict(model(tmp_path / "m", batch, dims=dims), picture(), top_k=2)
    assert {**answer, "classes": len(answer["classes"])} == {
        "model": "m",
        "version": "1",
        "image": {"width": 40, "height": 30},
        "classes": 2,
    }
    assert answer["classes"][0] == {"label": "0", "class_id": 0, "score": 0.333333}


def test_a_path_is_as_good_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(picture())
    folder = model(tmp_path / "m")
    assert predict(folder, tmp_path / "a.jpg") == predict(folder, str(tmp_path / "a.jpg"))


def test_what_means_nothing_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    with pytest.raises(InvalidInput, match="iou"):
        predict(folder, picture(), iou=0.5)
    with pytest.raises(InvalidInput, match="not an image of a known format"):
        predict(folder, b"no picture")
    with pytest.raises(InvalidInput, match="takes tensors, not images"):
        predict(model(tmp_path / "t", 4, "", "[5]"), picture())


def test_a_model_need_not_be_named(tmp_path: Path) -> None:
    """And what comes back is typed, as a client's answers are."""
    model(tmp_path / "a", 4, "", "[5]")
    model(tmp_path / "b")

    async def story() -> None:
        async with carpool.Engine(tmp_path, cache_dir=str(tmp_path / "cache")) as engine:
            first = await engine.predict(picture(), top_k=1)
            assert isinstance(first, Classes)
            assert (first.model, first.labels, first.width) == ("b", ["0"], 40)
            pixels = np.asarray(Image.open(io.BytesIO(picture())))
            assert await engine.predict(pixels, model="b", top_k=1) == first
            assert await engine.predict("b", Image.fromarray(pixels), top_k=1) == first
            with pytest.raises(InvalidInput, match="an image, or a model's name and an image"):
                await engine.predict("b", picture(), model="b")
            with pytest.raises(InvalidInput, match="cannot be read"):
                await engine.predict(tmp_path / "absent.jpg")

    asyncio.run(asyncio.wait_for(story(), 60))


def test_where_no_model_takes_pictures(tmp_path: Path) -> None:
    async def story() -> None:
        async with carpool.Engine(model(tmp_path / "a", 4, "", "[5]")) as engine:
            with pytest.raises(NotFound, match="takes images"):
                await engine.predict(picture())

    asyncio.run(asyncio.wait_for(story(), 60))
