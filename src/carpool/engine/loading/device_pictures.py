"""Handles pictures that go to the model's device as files: which models take them, and what their decoder
needs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, cast

import numpy as np

from carpool.backends.backend import Filling, FillPictures, Finish, PictureForm, PlacedRectangle
from carpool.config.asked_extensions import asked_extensions
from carpool.config.backend_kinds import kind_of, module_of
from carpool.config.model import (
    DYNAMIC,
    KEPT,
    PILLOW,
    DetectSettings,
    ImageSettings,
    ModelConfig,
    TensorConfig,
)
from carpool.errors import ConfigError
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.vision.geometry import place, read_form
from carpool.vision.plans.settings import VisionSettings

OUTPUT = "detections"


def with_boxes(
    config: ModelConfig, signature: Signature, vision: VisionSettings | None
) -> tuple[ModelConfig, Signature, VisionSettings | None, Finish | None]:
    """Returns all of them as they are, where the front end is to suppress."""
    table = None if vision is None else vision.table
    if vision is None or not isinstance(table, DetectSettings):
        return config, signature, vision, None
    if not _wanted(config, signature, vision, table):
        return config, signature, vision, None
    height, width = read_form(vision.image, vision.input, config.name).size
    sources = tuple(spec.name for spec in vision.outputs)
    scale = (float(width), float(height)) if table.normalized else (1.0, 1.0)
    assert table.format is not None
    form = (table.format, sources, OUTPUT, table.score, table.iou, table.per_class, table.max_detections)
    finish = module_of(kind_of(config.backend)).kept_boxes(*form, scale)
    shape = (table.max_detections, 6)
    spec = TensorSpec(OUTPUT, Datatype.FP32, shape)
    config = replace(config, outputs=(*config.outputs, TensorConfig(OUTPUT, Datatype.FP32.value, shape)))
    signature = replace(signature, outputs=(*signature.outputs, spec))
    table = replace(table, format=KEPT, normalized=False)
    return config, signature, replace(vision, outputs=(spec,), table=table), finish


def _wanted(config: ModelConfig, signature: Signature, vision: VisionSettings, table: DetectSettings) -> bool:
    if table.nms == "cpu" or (table.nms == "auto" and not on_a_gpu(config)):
        return False
    why = None
    if table.format not in ("yolov5", "yolov8", "boxes_scores") or table.background is not None:
        why = f"is not for the format {table.format}"
    elif not kind_of(config.backend).values_on_device:
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


_SAMPLE = (640, 480)
_SAMPLE_QUALITY = 90


def divided(config: ModelConfig, signature: Signature, vision: VisionSettings) -> VisionSettings:
    """Returns it with the word for front ends whether they send files."""
    return replace(vision, encoded=_encoded(config, signature, vision))


def _encoded(config: ModelConfig, signature: Signature, vision: VisionSettings) -> bool:
    asked = vision.image.decode
    if asked == "cpu" or (asked == "auto" and not _chip_decodes(config)):
        return False
    why = _cannot(config, signature, vision)
    if why is None:
        return True
    if asked == "auto":
        return False
    raise ConfigError(f'{config.name}: image.decode = "device" {why}; leave it out, or set it to "cpu"')


def _chip_decodes(config: ModelConfig) -> bool:
    return on_a_gpu(config) and bool(module_of(kind_of(config.backend)).decodes_pictures())


def on_a_gpu(config: ModelConfig) -> bool:
    """The settings are settled: nothing is left to "auto"."""
    return kind_of(config.backend).values_on_device and config.pytorch.device.startswith("cuda")


def _cannot(config: ModelConfig, signature: Signature, vision: VisionSettings) -> str | None:
    if not kind_of(config.backend).pictures_on_device:
        return f"is for the pytorch backend, and this model runs on {config.backend}"
    if not signature.max_batch:
        return "needs a model that takes batches"
    if any(extension.instance for extension in asked_extensions(config)):
        return "needs a model that gets nothing but its images"
    form = read_form(vision.image, vision.input, config.name)
    if vision.input.datatype is not Datatype.UINT8 or form.channels != 3:
        found = f"{vision.input.datatype.value} with {form.channels} channels"
        return f'needs an input of UINT8 with 3 channels, and "{vision.input.name}" is {found}'
    return None


def filling(config: ModelConfig, vision: VisionSettings | None) -> Filling | None:
    """Returns one for `backends.load`: makes what decodes pictures on the device it is given."""
    if vision is None or not vision.encoded:
        return None
    settings = vision.image
    form = read_form(settings, vision.input, config.name)
    height, width = form.size
    wanted = PictureForm(height, width, form.planar, settings.channels == "bgr", settings.pad)

    def place_one(picture_width: int, picture_height: int) -> PlacedRectangle:
        return _placed(picture_width, picture_height, form.size, settings)

    def fill(device: Any) -> FillPictures:
        home = module_of(kind_of(config.backend))
        return cast(FillPictures, home.fill_pictures(device, wanted, place_one, _pixels))

    return fill


def _placed(width: int, height: int, size: tuple[int, int], settings: ImageSettings) -> PlacedRectangle:
    at = place(width, height, size, settings)
    sides = {name: getattr(at, name) for name in PlacedRectangle._fields if name != "kernel"}
    asked = "auto" if settings.kernel in PILLOW else settings.kernel  # the device has nothing nearer
    return PlacedRectangle(**sides, kernel=at.kernel(asked))


def _pixels(file: Array) -> Array:
    from carpool.vision.decode import decode  # brings OpenCV along, which most engines never need

    return decode(file.data).pixels


@lru_cache(maxsize=1)
def sample_picture() -> Array:
    """Returns an ordinary photo, as a file: what a model that decodes on its device is measured with."""
    import cv2
    import simplejpeg

    from carpool.vision.decode import decode

    photo = decode(files("carpool.demo").joinpath("pictures/coffee.jpg").read_bytes()).pixels
    pixels = np.ascontiguousarray(cv2.resize(photo, _SAMPLE, interpolation=cv2.INTER_AREA))
    file = simplejpeg.encode_jpeg(pixels, quality=_SAMPLE_QUALITY, colorspace="RGB", colorsubsampling="420")
    return np.frombuffer(file, np.uint8).copy()  # decoders want memory that could be written to


SAMPLE_TOLD = f"with JPEGs of {_SAMPLE[0]}×{_SAMPLE[1]} pixels, which the device decodes"
