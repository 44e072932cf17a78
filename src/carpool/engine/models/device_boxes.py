"""Detectors whose device also chooses the boxes: one more output, which the answers to pictures read."""

from __future__ import annotations

from dataclasses import replace

from carpool.backends.backend import Finish
from carpool.config.backend_kinds import kind_of
from carpool.config.model import DYNAMIC, KEPT, DetectSettings, ModelConfig, TensorConfig
from carpool.engine.models.device_pictures import on_a_gpu
from carpool.errors import ConfigError
from carpool.types import Datatype, Signature, TensorSpec
from carpool.vision.geometry import read_form
from carpool.vision.settings import VisionSettings

OUTPUT = "detections"


def with_boxes(
    config: ModelConfig, signature: Signature, vision: VisionSettings | None
) -> tuple[ModelConfig, Signature, VisionSettings | None, Finish | None]:
    """All of them as they are, where the front end is to suppress."""
    table = None if vision is None else vision.table
    if vision is None or not isinstance(table, DetectSettings):
        return config, signature, vision, None
    if not _wanted(config, signature, vision, table):
        return config, signature, vision, None
    from carpool.backends.torch.torch_pictures import BoxForm, KeptBoxes  # with torch, which is there by now

    height, width = read_form(vision.image, vision.input, config.name).size
    sources = tuple(spec.name for spec in vision.outputs)
    scale = (float(width), float(height)) if table.normalized else (1.0, 1.0)
    assert table.format is not None
    form = BoxForm(
        table.format, sources, OUTPUT, table.score, table.iou, table.per_class, table.max_detections, scale
    )
    shape = (table.max_detections, 6)
    spec = TensorSpec(OUTPUT, Datatype.FP32, shape)
    config = replace(config, outputs=(*config.outputs, TensorConfig(OUTPUT, Datatype.FP32.value, shape)))
    signature = Signature(signature.model, signature.inputs, (*signature.outputs, spec), signature.max_batch)
    table = replace(table, format=KEPT, normalized=False)
    return config, signature, replace(vision, outputs=(spec,), table=table), KeptBoxes(form)


def _wanted(config: ModelConfig, signature: Signature, vision: VisionSettings, table: DetectSettings) -> bool:
    if table.nms == "cpu" or (table.nms == "auto" and not on_a_gpu(config)):
        return False
    why = None
    if not kind_of(config.backend).values_on_device:
        why = f"is for the pytorch backend, and this model runs on {config.backend}"
    elif not signature.max_batch:
        why = "needs a model that takes batches"
    elif OUTPUT in signature.output_named:
        why = f'needs the name "{OUTPUT}" for its output, which the model has already'
    elif any(DYNAMIC in spec.shape for spec in vision.outputs):
        why = "needs outputs whose shapes are known"
    if why is not None and table.nms == "device":
        raise ConfigError(f'{config.name}: detect.nms = "device" {why}; leave it out, or set it to "cpu"')
    return why is None
