"""Measures how long a pipeline takes for one picture on an idle machine: whether its SLO can be kept at
all."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.presets import PictureChoice
from carpool.config.repository import ModelSource
from carpool.config.usable_cores import usable_cores
from carpool.engine.loading.trial import examine
from carpool.engine.profile.measuring import Measuring
from carpool.engine.profile.model_profile import cannot_keep
from carpool.extensions.pipelines.picture_graph import PictureGraph


def picture_seconds(graph: PictureGraph, sources: Sequence[ModelSource]) -> float:
    """Along the longest way, with as many crops as are assumed before any were seen. Each model is opened and
    timed; sizes that vary are taken as small as they go, so it may take longer."""
    ends: dict[int, float] = {}
    for number in graph.order:
        after = graph.after[number]
        begins = 0.0 if after is None else ends[after]
        takes = 0.0 if graph.optional(number) else _seconds(sources[number], graph.usual_images(number))
        ends[number] = begins + takes
    return max(ends.values())


def _seconds(source: ModelSource, images: float) -> float:

    found = examine(PictureChoice().applied(source.config), source.versions[-1])
    devices = backends.devices(found.config)
    placement = Placement(threads=usable_cores(), gpu=devices[0] if devices else None, hurry=True)
    backend = backends.load(found.config, found.version, placement)
    try:
        size = min(max(1, ceil(images)), max(1, found.signature.max_batch))
        return Measuring([backend], found.signature).point(size).seconds
    finally:
        backend.close()


def time_report(name: str, slo: float | None, seconds: float) -> str:
    """Returns the time in one sentence."""
    what = "an image with a few crops"
    said = "" if slo is None else cannot_keep(name, slo, seconds, what)
    return said or f"{what} takes about {seconds * 1e3:.0f} ms here"
