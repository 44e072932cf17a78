"""Lists the tasks that there are. A package adds one with an entry point in the group carpool.tasks that
leads to a VisionTask of the entry point's name: docs/python.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from carpool.config.model import TASK_GROUP, Task
from carpool.config.rules import nearest, shown
from carpool.errors import ConfigError, InvalidInput
from carpool.types import Datatype
from carpool.vision.picture_answers import Option, Options
from carpool.vision.tasks.anomaly import FindAnomaly
from carpool.vision.tasks.classify import Classify
from carpool.vision.tasks.depth import Depth
from carpool.vision.tasks.detect import Detect
from carpool.vision.tasks.obb import ObbTask
from carpool.vision.tasks.plain_numbers import Embed, Raw
from carpool.vision.tasks.pose import PoseTask
from carpool.vision.tasks.read import Read
from carpool.vision.tasks.restore import Restore
from carpool.vision.tasks.segment import Segment
from carpool.vision.tasks.task import VisionTask
from carpool.vision.tasks.text_regions import FindText
from carpool.vision.tasks.written import Caption, WrittenLine
from carpool.vision.vision_settings import VisionSettings

_OWN: tuple[type[VisionTask], ...] = (
    Detect,
    Classify,
    FindAnomaly,
    Restore,
    Segment,
    PoseTask,
    ObbTask,
    Depth,
    Embed,
    FindText,
    Read,
    Caption,
    Raw,
)
_STANDARD = {field.name for field in fields(Options)} - {"extra"}


@cache
def kinds() -> Mapping[str, type[VisionTask]]:
    """Returns the tasks by name: those of this package, then those of others, which can replace none."""
    found: dict[str, type[VisionTask]] = {kind.name: kind for kind in _OWN}
    for point in entry_points(group=TASK_GROUP):
        try:
            kind = point.load()
        except Exception as error:  # whatever goes wrong while another project's package is imported
            raise ConfigError(f"the task {point.name} ({point.value}) does not import: {error}") from None
        fits = isinstance(kind, type) and issubclass(kind, VisionTask) and kind.name == point.name
        if not fits or kind.name in found:
            raise ConfigError(
                f"the task {point.name} ({point.value}) must be a VisionTask of that name, "
                "which no other task has"
            )
        found[kind.name] = kind
    return found


def build(settings: VisionSettings) -> VisionTask:
    if settings.task == Task.READ and settings.outputs[0].datatype is Datatype.BYTES:
        return WrittenLine(settings)
    return kinds()[settings.task](settings)


def options_of(task: str | None = None) -> Mapping[str, Option]:
    """Returns the options that mean something to this task; without one, all of them."""
    if task is not None:
        return kinds()[task].options
    return {name: option for kind in kinds().values() for name, option in kind.options.items()}


def read_options(values: Mapping[str, str], task: str | None = None) -> Options:
    """Returns the options in a query or a form; with a task, only those that mean something to it."""
    valid = options_of(task)
    for name in values:
        if name not in valid:
            known = name in options_of()
            what = f"{shown(name)} is not an option of {task}" if known else f"unknown {shown(name)}"
            end = nearest(name, valid) if valid else f"{task} takes no options"
            raise InvalidInput(f"{what}; {end}", field=name[:64])
    given: dict[str, Any] = {name: valid[name].read(name, text) for name, text in values.items()}
    extra = {name: given.pop(name) for name in [*given] if name not in _STANDARD}
    return Options(**given, extra=extra)


def parameters(task: str | None = None) -> list[dict[str, Any]]:
    """The same options as OpenAPI describes query parameters."""
    fixed = {"in": "query", "required": False}
    return [
        {"name": name, **fixed, "description": option.description, "schema": dict(option.schema)}
        for name, option in options_of(task).items()
    ]
