"""Describes how libraries make tensors of pictures, by name; and what the command line says about a model's
pictures.

A preset is a set of fields of [image]. The settings can replace each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from carpool.config.model import ImageSettings, ModelConfig, Task
from carpool.errors import ConfigError

_IMAGENET: Mapping[str, Any] = {
    "scale": 1 / 255,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}
_IMAGENET_255: Mapping[str, Any] = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
_CLIP: Mapping[str, Any] = {
    "scale": 1 / 255,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
_KERAS = {"resize": "stretch", "kernel": "bilinear"}
_MEGVII = {"resize": "letterbox", "anchor": "top_left", "kernel": "bilinear", "scale": 1.0}
_RTMDET = {"mean": (103.53, 116.28, 123.675), "std": (57.375, 57.12, 58.395)}
_ORDERS: Mapping[str, str] = {
    "keras-caffe": "bgr",
    "yolox": "bgr",
    "rtmdet": "bgr",
}  # of channels; the others' is RGB
_VALUES_OF: Mapping[str, Mapping[str, Any]] = {
    "torchvision": {"resize": "crop", "crop": 0.875, "kernel": "pil-bilinear", **_IMAGENET},
    "timm": {"resize": "crop", "crop": 0.875, "kernel": "pil-bicubic", **_IMAGENET},
    "clip": {"resize": "crop", "kernel": "pil-bicubic", **_CLIP},
    "keras-tf": {**_KERAS, "scale": 1 / 127.5, "mean": (1.0,)},
    "keras-caffe": {**_KERAS, "scale": 1.0, "mean": (103.939, 116.779, 123.68)},
    "ultralytics": {"resize": "letterbox", "kernel": "bilinear", "scale": 1 / 255},
    "rfdetr": {**_KERAS, **_IMAGENET},
    "rtdetr": {"resize": "stretch", "kernel": "pil-bilinear", "scale": 1 / 255},
    "rtmdet": {**_MEGVII, **_RTMDET},
    "yolox": _MEGVII,
    "rtmpose": {"resize": "letterbox", "pad": 0, "kernel": "bilinear", "scale": 1.0, **_IMAGENET_255},
    "scrfd": {**_MEGVII, "pad": 0, "mean": (127.5,), "std": (128.0,)},
    "anomalib": {"resize": "stretch", "kernel": "pil-bilinear", "scale": 1 / 255},
    "plain": {"resize": "letterbox", "scale": 1 / 255},
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {"channels": _ORDERS.get(name, "rgb"), **found} for name, found in _VALUES_OF.items()
}
"""What each library does to a picture before its models see it, as fields of ImageSettings."""

VALUES = ("scale", "mean", "std")
_ALIKE = 1e-2  # of values that run over some units
_NOT_PIXELS = ("size", "layout", "decode")
PIXELS = tuple(one.name for one in fields(ImageSettings) if one.name not in _NOT_PIXELS)
_FIT = tuple(name for name in PIXELS if name not in (*VALUES, "kernel", "channels"))
_OF_MIDDLES = {"resize": "crop", "crop": 1.0, "kernel": "pil-bilinear"}


def preset_fields(preset: str, task: str | None = None) -> dict[str, Any]:
    """A crop would cut off what detectors and segmenters look for, so that theirs is a letterbox. Of
    Ultralytics, classifiers see the middle of the picture, and models of depth see it stretched."""
    found = dict(PRESETS[preset])
    if preset == "ultralytics" and task == Task.CLASSIFY:
        found |= _OF_MIDDLES
    if preset == "ultralytics" and task == Task.DEPTH:
        found["resize"] = "stretch"
    if not keeps_crop(preset, task):
        found = {name: value for name, value in found.items() if name != "crop"} | {"resize": "letterbox"}
    return found


def keeps_crop(preset: str, task: str | None) -> bool:
    """Returns whether pictures are fitted as the preset's library does it: False where its crop became a
    letterbox, since the library has no rule of its own for this task."""
    cropped = PRESETS[preset]["resize"] == "crop"
    return not cropped or task in (None, Task.CLASSIFY, Task.EMBED, Task.RAW)


def same_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether scale, mean and std of both make the same of every pixel."""

    def ends(found: Mapping[str, Any]) -> list[float]:
        scale, means, stds = found.get("scale", 1.0), found.get("mean", (0.0,)), found.get("std", (1.0,))
        pairs = [(means[at % len(means)], stds[at % len(stds)]) for at in range(3)]
        return [(pixel * scale - mean) / std for pixel in (0, 255) for mean, std in pairs]

    return all(abs(a - b) < _ALIKE for a, b in zip(ends(one), ends(other), strict=True))


_LIKE = 0.03  # as near are the means that CLIP and others computed themselves


def like_imagenet(mean: Iterable[float]) -> bool:
    """Returns whether these are means of photos, red before green before blue, from 0 to 1 or to 255. Turned
    round they are none: then the channels may be, too."""
    values = [float(value) for value in mean]
    return len(values) == 3 and any(
        all(abs(value / unit - usual) < _LIKE for value, usual in zip(values, _IMAGENET["mean"], strict=True))
        for unit in (1.0, 255.0)
    )


def said_of_pixels(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of [image] about pixels that the settings give, which may be the usual ones."""
    image, plain, keys = config.image or ImageSettings(), ImageSettings(), config.image_keys
    if keys is None:
        keys = tuple(name for name in PIXELS if getattr(image, name) != getattr(plain, name))
    return {name: getattr(image, name) for name in keys if name in PIXELS}


def replaced(found: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, except where the settings say it: scale, mean and std belong together, and so does what
    goes with one way to resize."""
    gone = set(said)
    if gone.intersection(VALUES):
        gone.update(VALUES)
    if "resize" in said:
        gone.update(_FIT)
    return {name: value for name, value in found.items() if name not in gone} | dict(said)


def with_preset(config: ModelConfig) -> ModelConfig:
    """Returns the same settings, whose [image] has the values of their preset where it says nothing else."""
    if config.preset is None:
        return config
    said = said_of_pixels(config)
    found = preset_fields(config.preset, config.task) | said
    if found["resize"] != "crop":
        found.pop("crop", None)
    image = replace(config.image or ImageSettings(), **found)
    return replace(config, image=image, image_keys=tuple(said))


@dataclass(frozen=True, slots=True)
class PictureChoice:
    """What is said about a model's pictures when it is served, in place of its settings."""

    task: str | None = None
    labels: Path | None = None
    size: tuple[int, int] | None = None  # height, width
    preset: str | None = None
    strict: bool = False

    def applied(self, config: ModelConfig) -> ModelConfig:
        if self.labels is not None and not self.labels.is_file():
            raise ConfigError(f"{config.name}: there is no file {self.labels} for its labels", field="labels")
        image = config.image
        if self.size is not None:
            image = replace(image or ImageSettings(), size=self.size)
        labels = config.labels if self.labels is None else str(self.labels.absolute())
        config = replace(config, task=self.task or config.task, labels=labels, image=image)
        config = replace(config, strict_pixels=self.strict or config.strict_pixels)
        if self.preset is None:
            return config
        if image is not None:  # what the settings say of pixels is replaced, too
            image = ImageSettings(size=image.size, layout=image.layout, decode=image.decode)
        return with_preset(replace(config, preset=self.preset, image=image, image_keys=()))
