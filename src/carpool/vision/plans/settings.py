"""Decides how one model answers pictures: settled once when it is loaded, then sent to every front end as
JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.config.model import ImageSettings, ModelConfig, Task
from carpool.errors import ConfigError
from carpool.types import DATATYPES, Signature, TensorSpec
from carpool.vision.picture_input import AS_TENSORS, find_picture, no_picture
from carpool.vision.vision_settings import (
    NOTHING_SEEN,
    Described,
    ModelFacts,
    VisionSettings,
    because,
    declared_task,
    guesses,
    write,
)

__all__ = ["NOTHING_SEEN", "Described", "ModelFacts", "VisionSettings", "describe", "read", "write"]


def read(document: Mapping[str, Any]) -> VisionSettings:
    """Reads what `write` wrote, through JSON."""
    from carpool.vision.tasks import kinds  # those that have pictures have imported it

    kind, table = kinds()[document["task"]], document["table"]
    made = {
        "task": kind.name,
        "image": ImageSettings(**_tuples(document["image"])),
        "input": _read_spec(document["input"]),
        "outputs": tuple(map(_read_spec, document["outputs"])),
        "table": None if table is None or kind.table is None else kind.table(**_tuples(table)),
    }
    return VisionSettings(**{**_tuples(document), **made})


def _read_spec(spec: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(**{**_tuples(spec), "datatype": DATATYPES[spec["datatype"]]})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def describe(
    config: ModelConfig,
    signature: Signature,
    labels: Mapping[str, Sequence[str]] | None = None,
    seen: ModelFacts = NOTHING_SEEN,
) -> Described:
    """`labels` are class names by output. Settings that the model cannot fulfil are a ConfigError."""
    declared = declared_task(config)
    picture = find_picture(config, signature)
    if picture is None:
        return _without_a_picture(config, signature, declared)
    from carpool.vision.plans.settling import settle_pictures  # most models of tensors never need it

    return settle_pictures(config, signature, picture, declared, labels or {}, seen)


def _without_a_picture(config: ModelConfig, signature: Signature, declared: str | None) -> Described:
    why, likely = no_picture(config, signature)
    if config.image is not None or declared not in (None, Task.RAW):
        raise ConfigError(
            f"{config.name}: {because(config, declared)} needs one input that can hold an image: three "
            f"dimensions without the batch, with 1 or 3 channels where the layout has them; {why}"
        )
    if declared == Task.RAW or not guesses(config):
        return Described(None, [])
    return Described(None, [why], f"{why}. {AS_TENSORS}" if likely else "")
