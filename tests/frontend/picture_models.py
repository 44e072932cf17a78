"""Models that answer with the mean colour of their picture, one per task, and pictures of one colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from carpool.config.toml import toml_config
from carpool.core.job import INFINITY
from carpool.frontend.pictures.workers import PictureJob, Then, Workers
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.vision.plans.settings import describe, write
from frontend.fake_door import FakeModel, Function, echo

SIDE = 16
LABELS = ("red", "green", "blue")
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
_IMAGES = TensorSpec("images", Datatype.FP32, (3, SIDE, SIDE))


def begin(
    workers: Workers,
    work: Callable[[], Any],
    then: Then,
    deadline: float = INFINITY,
    weight: float = 1.0,
    client: str = "",
) -> PictureJob:
    """Have threads decode something."""
    job = PictureJob(work, then, weight, client)
    workers.begin(job, deadline)
    return job


def picture(
    colour: tuple[int, int, int] = RED, kind: str = "JPEG", size: tuple[int, int] = (32, 24), **more: Any
) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind, **more)
    return file.getvalue()


def _means(inputs: Mapping[str, Array]) -> Array:
    means: Array = inputs["images"].mean(axis=(-2, -1))
    return means


def detections(inputs: Mapping[str, Array]) -> dict[str, Any]:
    """The first of four anchors holds the colour, over the left half of the input."""
    means = _means(inputs)
    boxes, scores = np.zeros((len(means), 4, 4)), np.zeros((len(means), 4, 3))
    boxes[:, 0] = (0, 0, SIDE / 2, SIDE)
    scores[:, 0] = means
    return {"boxes": boxes, "scores": scores}


def detector(
    name: str = "finder", *, anchors: int = 4, function: Function = detections, **settings: Any
) -> FakeModel:
    boxes, scores = ((anchors, 4), (anchors, len(LABELS)))
    outputs = [TensorSpec("boxes", Datatype.FP32, boxes), TensorSpec("scores", Datatype.FP32, scores)]
    return _model(name, outputs, function, "task = 'detect'\n[image]\nresize = 'stretch'\n", **settings)


def classifier(name: str = "namer", **settings: Any) -> FakeModel:
    outputs = [TensorSpec("logits", Datatype.FP32, (3,))]
    return _model(
        name, outputs, lambda given: {"logits": 10 * _means(given)}, "task = 'classify'", **settings
    )


def device_classifier(name: str = "chip", **settings: Any) -> FakeModel:
    """As `classifier`, but its device decodes pictures."""
    images = TensorSpec("images", Datatype.UINT8, (3, SIDE, SIDE))
    outputs = [TensorSpec("logits", Datatype.FP32, (3,))]
    return _model(
        name,
        outputs,
        lambda given: {"logits": 10 / 255 * _means(given)},
        "task = 'classify'",
        images=images,
        encoded=True,
        **settings,
    )


def segmenter(name: str = "cutter", **settings: Any) -> FakeModel:
    outputs = [TensorSpec("map", Datatype.FP32, (1, SIDE, SIDE))]
    return _model(
        name, outputs, lambda given: {"map": given["images"][:, :1]}, "task = 'segment'", **settings
    )


def embedder(name: str = "vector", **settings: Any) -> FakeModel:
    outputs = [TensorSpec("embedding", Datatype.FP32, (3,))]
    return _model(name, outputs, lambda given: {"embedding": _means(given)}, "task = 'embed'", **settings)


def raw(name: str = "plain", **settings: Any) -> FakeModel:
    outputs = [TensorSpec("means", Datatype.FP32, (3,))]
    return _model(name, outputs, lambda given: {"means": _means(given)}, "task = 'raw'", **settings)


def words(given: Mapping[str, Array]) -> list[dict[str, Any]]:
    """A word at a time; of two pictures, the same."""
    said = ["Red", " and", " blue…", ""]
    return [
        {"text_output": [word.encode()], **({} if word else {"finish_reason": [b"stop"]})} for word in said
    ]


def writer(name: str = "writer", task: str = "read", **settings: Any) -> FakeModel:
    """Writes about its picture, a word at a time."""
    outputs = [TensorSpec(output, Datatype.BYTES, (1,)) for output in ("text_output", "finish_reason")]
    return _model(name, outputs, words, f"task = '{task}'", decoupled=True, **settings)


def models() -> list[FakeModel]:
    return [detector(), classifier(), embedder(), raw(), echo("tensors", Datatype.FP32)]


def _model(
    name: str,
    outputs: list[TensorSpec],
    function: Any,
    toml: str,
    max_batch: int = 8,
    mode: str = "eager",  # with a promise, a slow machine would have its answers refused
    images: TensorSpec = _IMAGES,
    encoded: bool = False,
    **settings: Any,
) -> FakeModel:
    config = toml_config(toml, Path(f"models/{name}/model.toml"))
    signature = Signature(name, (images,), tuple(outputs), max_batch)
    vision, *_ = describe(config, signature, {outputs[0].name: LABELS})
    assert vision is not None
    return FakeModel(
        name,
        [images],
        outputs,
        function,
        max_batch=max_batch,
        mode=mode,
        vision=write(replace(vision, encoded=encoded)),
        **settings,
    )
