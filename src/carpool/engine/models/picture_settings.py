"""How a model answers pictures, settled once its tensors are known: what its device does, and front ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.backends.backend import Finish
from carpool.config.model import ModelConfig
from carpool.engine.models.device_boxes import with_boxes
from carpool.engine.models.device_pictures import divided
from carpool.errors import ConfigError
from carpool.observe.logs import logger
from carpool.types import Signature
from carpool.vision.geometry import lookup_tables, read_form
from carpool.vision.settings import VisionSettings, describe

log = logger("engine")

Settled = tuple[ModelConfig, Signature, VisionSettings | None, Finish | None]


def settle(config: ModelConfig, signature: Signature, labels: Mapping[str, Sequence[str]]) -> Settled:
    """With the output that its device adds, if it does. Raises what its settings say and it cannot be."""
    vision, notes = describe(config, signature, labels)
    try:
        if vision is not None:
            form = read_form(vision.image, vision.input, config.name)
            lookup_tables(vision.image, form, vision.input.datatype, config.name)
            vision = divided(config, signature, vision)
    except ConfigError as error:
        if config.task is not None or config.image is not None:
            raise
        vision, notes = None, [f"it has no image route: {error.message}"]  # nobody asked for one
    for note in notes:
        log.info("pictures", model=config.name, note=note)
    return with_boxes(config, signature, vision)
