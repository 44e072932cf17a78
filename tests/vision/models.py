"""Settings of models that exist only as shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from carpool.config.model import ModelConfig
from carpool.config.toml import toml_config
from carpool.types import Datatype, Signature, TensorSpec
from carpool.vision import tasks
from carpool.vision.plans.settings import VisionSettings, describe
from carpool.vision.tasks.task import VisionTask

Shapes = dict[str, tuple[int, ...]]


def signature(
    outputs: Shapes,
    input_shape: tuple[int, ...] = (3, 64, 64),
    *,
    max_batch: int = 8,
    datatype: Datatype = Datatype.FP32,
) -> Signature:
    specs = tuple(TensorSpec(name, datatype, shape) for name, shape in outputs.items())
    return Signature("m", (TensorSpec("images", Datatype.FP32, input_shape),), specs, max_batch)


def config(toml: str = "") -> ModelConfig:
    return toml_config(toml, Path("models/m/model.toml"))


def settings(
    outputs: Shapes, toml: str = "", labels: Sequence[str] = (), input_shape: tuple[int, ...] = (3, 64, 64)
) -> VisionSettings:
    found = describe(config(toml), signature(outputs, input_shape), {next(iter(outputs)): labels}).vision
    assert found is not None
    return found


def task(outputs: Shapes, toml: str = "", labels: Sequence[str] = ()) -> VisionTask:
    return tasks.build(settings(outputs, toml, labels))
