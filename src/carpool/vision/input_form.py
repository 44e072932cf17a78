"""What the model's input looks like as a picture: read from its shape and the settings, which must agree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from carpool.config.model import DYNAMIC, ImageSettings
from carpool.errors import ConfigError
from carpool.types import Array, Datatype, TensorSpec


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


# ---- what each of the 256 values of a pixel becomes in the model's input, exact and in its datatype


_FLOATS = (Datatype.FP16, Datatype.BF16, Datatype.FP32, Datatype.FP64)
_NOT_NUMBERS = (Datatype.BOOL, Datatype.BYTES)


def lookup_tables(settings: ImageSettings, form: InputForm, datatype: Datatype, where: str) -> list[Array]:
    """[1, 256] for each plane of a planar input; [1, 256, channels] where the channels lie side by side."""
    if datatype in _NOT_NUMBERS:
        raise ConfigError(f"{where}: the picture's input is {datatype.value}, and pixels are numbers")
    values = np.arange(256, dtype=np.float64)[:, None] * scale_of(settings, datatype)
    values = (values - np.array(settings.mean)) / np.array(settings.std)
    table = _cast(np.broadcast_to(values, (256, form.channels)), datatype)
    if form.planar or form.channels == 1:
        return [np.ascontiguousarray(table[:, c]).reshape(1, 256) for c in range(form.channels)]
    return [np.ascontiguousarray(table).reshape(1, 256, form.channels)]


def scale_of(settings: ImageSettings, datatype: Datatype) -> float:
    """Floats run from 0 to 1 where the settings say nothing about values at all, and bytes stay bytes."""
    if settings.scale is not None:
        return settings.scale
    untold = set(settings.mean) == {0.0} and set(settings.std) == {1.0}
    return 1 / 255 if untold and datatype in _FLOATS else 1.0


def _cast(values: Array, datatype: Datatype) -> Array:
    """To the nearest value that the datatype has; whole numbers stop at its ends."""
    if datatype is Datatype.BF16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    if datatype not in _FLOATS:
        ends = np.iinfo(datatype.dtype)
        values = np.clip(np.rint(values), float(ends.min), float(ends.max))
    with np.errstate(over="ignore"):
        return values.astype(datatype.dtype)
