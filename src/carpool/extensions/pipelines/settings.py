"""Holds what `pipeline.toml` says, as plain data: models as steps, what goes from one to the next, and the
answer.

pipeline_toml.py reads it, and says what is wrong with it by itself; picture_graph.py what is wrong with it
beside its models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from carpool.config.model import ModelConfig

NAME = "pipelines"
MOST_STEPS = 8
MOST_CROPS = 100
"""That one picture may become in one step."""
MOST_WIDTHS = 8
BOXES, REGIONS = "boxes", "regions"
PARTS = (BOXES, REGIONS)
"""What a step finds that others can be asked about: objects, and quadrilaterals of text."""
WITHOUT, REFUSE = "without", "refuse"
LATE = (REFUSE, WITHOUT)


@dataclass(frozen=True, slots=True)
class StepKeepSettings:
    """Decides which of the things that a step finds are answered and handed on, the best first."""

    labels: tuple[str, ...] = ()  # none: all
    score: float = 0.0
    most: int = 20


@dataclass(frozen=True, slots=True)
class CropSettings:
    """Describes how a part of the picture becomes a picture of its own."""

    pad: float = 0.0  # on every side, as a share of the box's own
    square: bool = False
    least: int = 1  # pixels of a side: smaller ones grow around their middle
    rectify: bool = False  # a quadrilateral becomes an upright picture:
    height: int = 48
    widths: tuple[int, ...] = (160, 320, 480, 640, 960)  # each is a kind of work; what is longer is squeezed
    stretch: float = 1.0  # times as wide as it is: for a reader that needs more columns for each letter


@dataclass(frozen=True, slots=True)
class EscalateSettings:
    """This step is asked only where another one is not sure."""

    source: str
    by: str
    below: float


@dataclass(frozen=True, slots=True)
class PipelineStep:
    name: str
    model: str
    version: int = -1  # the newest
    keep: StepKeepSettings = StepKeepSettings()
    each: tuple[str, str] | None = None  # a step, and which of its parts; None: it sees the whole picture
    crop: CropSettings = CropSettings()
    escalate: EscalateSettings | None = None
    line: int = 0  # of its model, for messages


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """`answer` names the steps whose answer it is, the first that there is; the others are attached to it."""

    file: str
    steps: tuple[PipelineStep, ...]
    answer: tuple[str, ...]
    if_late: str = REFUSE
    under_load: str = REFUSE
    keep_px: int = 1600  # of the longer side of what is kept for crops

    def numbered(self, name: str) -> int:
        return next(number for number, step in enumerate(self.steps) if step.name == name)

    def at(self, number: int) -> str:
        """Returns where the model of a step is named."""
        step = self.steps[number]
        return f"{self.file}:{step.line}: step {step.name}.model"


def pipeline_settings(config: ModelConfig) -> PipelineSettings | None:
    """Returns a model's; None: it is no pipeline."""
    settings = config.extra.get(NAME)
    return settings if isinstance(settings, PipelineSettings) else None


def read_document(document: Mapping[str, Any]) -> PipelineSettings:
    """Reads what `dataclasses.asdict` made of one, through JSON."""
    steps = []
    for step in document["steps"]:
        keep, crop = step["keep"], step["crop"]
        made = {
            "keep": StepKeepSettings(**{**keep, "labels": tuple(keep["labels"])}),
            "crop": CropSettings(**{**crop, "widths": tuple(crop["widths"])}),
            "each": step["each"] and tuple(step["each"]),
            "escalate": step["escalate"] and EscalateSettings(**step["escalate"]),
        }
        steps.append(PipelineStep(**{**step, **made}))
    return PipelineSettings(**{**document, "steps": tuple(steps), "answer": tuple(document["answer"])})
