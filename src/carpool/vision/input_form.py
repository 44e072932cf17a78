"""What the model's input looks like as a picture: read from its shape and the settings, which must agree."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.model import DYNAMIC, ImageSettings
from carpool.errors import ConfigError
from carpool.types import TensorSpec


@dataclass(frozen=True, slots=True)
class InputForm:
    shape: tuple[int, ...]  # of the input, without the batch, nothing left open
    planar: bool  # channels first
    channels: int
    size: tuple[int, int]  # height, width


def read_form(settings: ImageSettings, spec: TensorSpec, where: str) -> InputForm:
    """Of an input like [3, h, w], [h, w, 3] or [1, 3, h, w]; a ConfigError names the key to change."""
    *ones, first, second, third = (1, 1, 1, *spec.shape) if len(spec.shape) < 3 else spec.shape
    told = f'the input "{spec.name}" is {list(spec.shape)}'
    if len(spec.shape) < 3 or any(side not in (1, DYNAMIC) for side in ones):
        raise ConfigError(f"{where}: a picture needs three dimensions besides the batch, but {told}")
    planar = _planar(settings, (first, second, third), f"{where}: image.layout", told)
    channels, sides = (first, (second, third)) if planar else (third, (first, second))
    channels = 3 if channels == DYNAMIC else channels
    if channels not in (1, 3):
        raise ConfigError(f"{where}: image.layout: a picture has 1 or 3 channels, but {told}")
    size = _size(settings, sides, f"{where}: image.size", told)
    _check_values(settings, channels, where)
    picture = (channels, *size) if planar else (*size, channels)
    return InputForm((*(1 for _ in ones), *picture), planar, channels, size)


def _planar(settings: ImageSettings, shape: tuple[int, int, int], key: str, told: str) -> bool:
    if settings.layout is not None:
        return settings.layout == "nchw"
    if shape[0] in (1, 3):
        return True
    if shape[2] in (1, 3):
        return False
    raise ConfigError(f'{key} is needed, "nchw" or "nhwc": {told}, which leaves it open')


def _size(settings: ImageSettings, sides: tuple[int, int], key: str, told: str) -> tuple[int, int]:
    if settings.size is None:
        if DYNAMIC in sides:
            raise ConfigError(f"{key} is needed, as height and width: {told}, which leaves it open")
        return sides
    if any(side not in (DYNAMIC, wanted) for side, wanted in zip(sides, settings.size, strict=True)):
        raise ConfigError(f"{key} {list(settings.size)} (height, width) does not fit: {told}")
    return settings.size


def _check_values(settings: ImageSettings, channels: int, where: str) -> None:
    for key, values in (("mean", settings.mean), ("std", settings.std)):
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{where}: image.{key} has {len(values)} numbers; the model's input has {channels} channel"
                + ("s" if channels > 1 else "")
            )
