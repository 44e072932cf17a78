"""One object per model turns the outputs for one picture into its answer, or into the picture drawn over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from carpool.config.model import Task
from carpool.vision.settings import VisionSettings
from carpool.vision.tasks.classify import Classify
from carpool.vision.tasks.detect import Detect
from carpool.vision.tasks.embed import Embed
from carpool.vision.tasks.raw import Raw
from carpool.vision.tasks.segment import Segment
from carpool.vision.tasks.task import VisionTask

_BUILT: Mapping[Task, Callable[[VisionSettings], VisionTask]] = {
    Task.CLASSIFY: Classify,
    Task.DETECT: Detect,
    Task.SEGMENT: Segment,
    Task.EMBED: Embed,
    Task.RAW: Raw,
}


def build(settings: VisionSettings) -> VisionTask:
    return _BUILT[settings.task](settings)
