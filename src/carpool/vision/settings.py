"""How one model answers pictures: settled once when it is loaded, then sent to every front end as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig, Task, values_on_device
from carpool.errors import ConfigError
from carpool.types import DATATYPES, Signature, TensorSpec
from carpool.vision import tasks
from carpool.vision.tasks.task import LoadedModel, Verdict, VisionSettings, find_picture, in_words, outputs_of

__all__ = ["VisionSettings", "describe", "read", "write"]


def write(settings: VisionSettings) -> dict[str, Any]:
    """As JSON."""
    written = asdict(settings)
    for spec in (written["input"], *written["outputs"]):
        spec["datatype"] = spec["datatype"].value
    return {**written, "task": str(settings.task)}


def read(document: Mapping[str, Any]) -> VisionSettings:
    """What `write` wrote, through JSON."""
    kind, table = tasks.kinds()[document["task"]], document["table"]
    made = {
        "task": kind.name,
        "image": ImageSettings(**_tuples(document["image"])),
        "input": _read_spec(document["input"]),
        "outputs": tuple(map(_read_spec, document["outputs"])),
        "table": None if table is None or kind.table is None else kind.table(**table),
    }
    return VisionSettings(**{**_tuples(document), **made})


def _read_spec(spec: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(**{**_tuples(spec), "datatype": DATATYPES[spec["datatype"]]})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# ---- from a loaded model --------------------------------------------------------------------------------


def describe(
    config: ModelConfig, signature: Signature, labels: Mapping[str, Sequence[str]] | None = None
) -> tuple[VisionSettings | None, list[str]]:
    """How this model answers pictures, or None where it takes none; and in words what its shapes told.

    `labels` are class names by output. Declared settings that the model cannot fulfil are a ConfigError.
    """
    declared = _declared_task(config)
    picture = find_picture(config, signature)
    if picture is None:
        if config.image is not None or declared not in (None, Task.RAW):
            raise ConfigError(
                f"{config.name}: {_because(config, declared)} needs one input that can hold a picture: three "
                "dimensions without the batch, with 1 or 3 channels where the layout has them; "
                f"the model's inputs are {in_words(signature.inputs)}"
            )
        return None, []
    names = next((tuple(lines) for lines in (labels or {}).values() if lines), ())
    model = LoadedModel(config, picture, outputs_of(signature, picture), names, [])
    if DYNAMIC in (picture.height, picture.width) and (config.image is None or config.image.size is None):
        return _without_a_size(model, declared)
    task = declared or _told(model)
    table, outputs = tasks.kinds()[task].settle(model)
    image = replace(config.image or ImageSettings(), layout=picture.layout)
    if values_on_device(config):  # who makes the pictures' tensors leaves their pixels as they are
        image = replace(image, mean=(0.0,), std=(1.0,), scale=None)
    return VisionSettings(task, image, picture.spec, outputs, table, names), model.notes


def _declared_task(config: ModelConfig) -> str | None:
    """The task, or the one whose table is there; two that contradict each other are an error."""
    tables = [name for name, kind in tasks.kinds().items() if kind.table and getattr(config, name, None)]
    for task in tables:
        other = config.task or tables[0]
        if task != other:
            raise ConfigError(
                f"{config.name}: [{task}] is for models of that task, and this one is for {other}; remove one"
            )
    return config.task or next(iter(tables), None)


def _because(config: ModelConfig, declared: str | None) -> str:
    if declared is None:
        return "[image]"
    return f'task = "{declared}"' if config.task else f"[{declared}]"


def _without_a_size(model: LoadedModel, declared: str | None) -> tuple[None, list[str]]:
    name = model.config.name
    found = f"the model's input {in_words([model.picture.spec])} takes pictures of any size"
    if declared is not None or model.config.image is not None:
        raise ConfigError(f"{name}: {found}; give the one to use as size in [image]")
    return None, [f"{found}: without size in [image] it has no image route"]


def _told(model: LoadedModel) -> str:
    """The task that the outputs show beyond doubt, or raw."""
    found = [(verdict, name) for name, kind in tasks.kinds().items() if (verdict := kind.recognise(model))]
    verdict, task = max(
        found, default=(Verdict(0, f"outputs {in_words(model.outputs)} could be anything"), Task.RAW)
    )
    model.notes.append(f"task {task}: {verdict.why}")
    return task
