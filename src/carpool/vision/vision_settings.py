"""Holds how one model answers pictures, and what that is settled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from carpool.config.asked_extensions import asked_extensions
from carpool.config.backend_kinds import kind_of
from carpool.config.model import (
    AnomalySettings,
    ClassifySettings,
    DepthSettings,
    DetectSettings,
    EmbedSettings,
    ImageSettings,
    ModelConfig,
    ObbSettings,
    PoseSettings,
    ReadSettings,
    SegmentSettings,
    Task,
    TextRegionsSettings,
)
from carpool.errors import ConfigError
from carpool.types import Array, TensorSpec
from carpool.vision.output_facts import NO_CLAIMS, Claims

TaskTable: TypeAlias = (
    ClassifySettings
    | DetectSettings
    | SegmentSettings
    | PoseSettings
    | ObbSettings
    | DepthSettings
    | AnomalySettings
    | EmbedSettings
    | TextRegionsSettings
    | ReadSettings
)
_TABLES = (
    *(Task.DETECT, Task.CLASSIFY, Task.ANOMALY, Task.SEGMENT, Task.POSE, Task.OBB),
    *(Task.DEPTH, Task.EMBED, Task.TEXT_REGIONS, Task.READ),
)
"""Tables of a model's settings, each named like its task."""


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """Nothing is left open: the format, the activation and the outputs are known. Shapes have no batch."""

    task: str
    image: ImageSettings
    input: TensorSpec  # three dimensions, in the order of image.layout
    outputs: tuple[TensorSpec, ...]  # those the task reads, in the order of its format
    table: TaskTable | None = None  # the task's own settings, if it has any
    labels: tuple[str, ...] = ()
    encoded: bool = False  # the model's device decodes pictures; `image` says what is left to do elsewhere
    assumed: tuple[str, ...] = ()  # settings of [image] that nothing says

    @property
    def sides(self) -> tuple[int, int]:
        """Returns height and width that the model's input has; -1: any."""
        shape = self.input.shape
        return (shape[1], shape[2]) if self.image.layout == "nchw" else (shape[0], shape[1])

    def label(self, class_id: int) -> str:
        name = self.labels[class_id] if class_id < len(self.labels) else ""
        return name or str(class_id)


def write(settings: VisionSettings) -> dict[str, Any]:
    """Returns the settings as JSON."""
    written = asdict(settings)
    for spec in (written["input"], *written["outputs"]):
        spec["datatype"] = spec["datatype"].value
    return {**written, "task": str(settings.task)}


class Described(NamedTuple):
    """Describes how a model answers pictures; None where it does not, and then `ask` says what to set, if
    that could help. `evidence` is what was found, in words."""

    vision: VisionSettings | None
    evidence: list[str]
    ask: str = ""
    tasks: tuple[str, ...] = ()  # that it could be for, where nothing is sure


class ModelFacts(NamedTuple):
    """Describes what is known of a model beside its settings and its signature."""

    claims: Claims = NO_CLAIMS
    samples: Mapping[str, Array] = MappingProxyType({})  # what a dry run answered, by output, for one picture
    loud: Mapping[str, Array] = MappingProxyType({})  # the same for noise 255 times as large
    whole: bool = False  # outputs do not begin with a batch, although the input does
    trouble: str = ""  # why there is no dry run, in words
    ask: str = ""  # what to set, where that alone says it


NOTHING_SEEN = ModelFacts()


def declared_task(config: ModelConfig) -> str | None:
    """The task, or the one whose table is there; two that contradict each other are an error."""
    tables = [name for name in _TABLES if getattr(config, name)]
    for task in tables:
        other = config.task or tables[0]
        if task != other:
            raise ConfigError(
                f"{config.name}: [{task}] is for models of that task, but this model is for {other}; "
                "remove one"
            )
    return config.task or next(iter(tables), None)


def because(config: ModelConfig, declared: str | None) -> str:
    if declared is None:
        return "[image]"
    return f'task = "{declared}"' if config.task else f"[{declared}]"


def guesses(config: ModelConfig) -> bool:
    """Who writes a Python model writes it for the pictures that this server sends; a fake one sees none."""
    kind = kind_of(config.backend)
    batched = not any(one.no_batches for one in asked_extensions(config))
    return kind.needs_file and kind.name != "python" and batched
