"""What each of the 256 values of a pixel becomes in the model's input, exact and in its datatype."""

from __future__ import annotations

import numpy as np

from carpool.config.model import ImageSettings
from carpool.errors import ConfigError
from carpool.types import Array, Datatype
from carpool.vision.input_form import InputForm

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
