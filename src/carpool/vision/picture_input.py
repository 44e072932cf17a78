"""Says which input of a model takes pictures. A model without one needs little else of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from carpool.config.model import DYNAMIC, ModelConfig
from carpool.types import Array, Datatype, Signature, TensorSpec

FLOATS = (Datatype.FP32, Datatype.FP16, Datatype.FP64, Datatype.BF16)
_PICTURES = (*FLOATS, Datatype.UINT8, Datatype.INT8, Datatype.UINT16, Datatype.INT32)
_CHANNELS = (1, 3)


@dataclass(frozen=True, slots=True)
class Picture:
    """The input that takes the picture, without any batch; a side that varies is -1."""

    spec: TensorSpec
    layout: str
    height: int
    width: int
    leading: int | None  # the first dimension, where the model has no batches and its tensors begin with one

    @property
    def channels(self) -> int:
        return self.spec.shape[0 if self.layout == "nchw" else 2]


def find_picture(config: ModelConfig, signature: Signature) -> Picture | None:
    """Returns the one required input, if it has three dimensions of which one is 1 or 3 channels."""
    optional = {tensor.name for tensor in config.inputs if tensor.optional}
    required = [spec for spec in signature.inputs if spec.name not in optional]
    if len(required) != 1 or required[0].datatype not in _PICTURES:
        return None
    spec, leading = required[0], None
    if not signature.max_batch and len(spec.shape) == 4 and spec.shape[0] in (1, DYNAMIC):
        leading = spec.shape[0]
        spec = replace(spec, shape=spec.shape[1:])
    if len(spec.shape) != 3:
        return None
    declared = config.image.layout if config.image else None
    declared = declared or next((t.layout for t in config.inputs if t.name == spec.name), None)
    for layout, channel in (("nchw", 0), ("nhwc", 2)):
        known = spec.shape[channel] in _CHANNELS
        if declared in (None, layout) and (known or (declared and spec.shape[channel] == DYNAMIC)):
            height, width = (side for axis, side in enumerate(spec.shape) if axis != channel)
            return Picture(spec, layout, height, width, leading)
    return None


AS_TENSORS = "Send tensors to POST /v2/models/NAME/infer, each input under its name"


def no_picture(config: ModelConfig, signature: Signature) -> tuple[str, bool]:
    """Returns why no input takes a picture, and whether one looks as if it did."""
    optional = {tensor.name for tensor in config.inputs if tensor.optional}
    required = [spec for spec in signature.inputs if spec.name not in optional]
    if not required:
        return "each of its inputs may be left out", False
    likely = any(_like_a_picture(spec, signature) for spec in required)
    found = f"it takes {in_words(required)}"
    if len(required) != 1:
        other = next((spec for spec in required if not _like_a_picture(spec, signature)), required[-1])
        why = f"{found}: {len(required)} inputs, and an image route fills one"
        set_it = f'If "{other.name}" is the same for every image, set [inputs.{other.name}] in model.toml'
        return f"{why}. {set_it}" if likely else why, likely
    spec = required[0]
    if spec.datatype not in _PICTURES:
        return f"{found}: values of {spec.datatype.value} are no pixels", False
    shape = spec.shape
    if not signature.max_batch and len(shape) == 4 and shape[0] > 1:
        why = (
            f"a fixed batch of {shape[0]}, which one image does not fill: export it with a batch of any size"
        )
        return f"{found}: {why}", likely
    sides = shape if signature.max_batch else shape[1:]
    if len(sides) > 3:
        return f"{found}: {len(sides)} dimensions beside the batch are those of a video or a volume", likely
    if len(sides) == 3 and any(side == DYNAMIC for side in (sides[0], sides[2])):
        why = 'nothing says how many channels it has: set layout = "nchw" or "nhwc" in [image] of model.toml'
        return f"{found}: {why}", likely
    if len(sides) == 3:
        channels = min(sides[0], sides[2])
        return f"{found}: {channels} channels, and images have 1 or 3", likely
    return f"{found}: images have three dimensions beside the batch", False


def _like_a_picture(spec: TensorSpec, signature: Signature) -> bool:
    sides = spec.shape if signature.max_batch else spec.shape[1:]
    return spec.datatype in _PICTURES and len(sides) >= 3


def outputs_of(signature: Signature, picture: Picture) -> tuple[TensorSpec, ...]:
    """Returns the outputs for one picture: without the leading dimension, where the input has one too. Maps
    and tables whose first dimension the file leaves open begin with the input's 1 as well."""
    if picture.leading is None:
        return signature.outputs
    open_ = all(len(spec.shape) > 2 and spec.shape[0] in (1, DYNAMIC) for spec in signature.outputs)
    firsts = (1, DYNAMIC) if picture.leading == 1 and open_ else (picture.leading,)
    return tuple(
        replace(spec, shape=spec.shape[1:]) if spec.shape and spec.shape[0] in firsts else spec
        for spec in signature.outputs
    )


def in_words(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f'"{spec.name}" {list(spec.shape)}' for spec in specs) or "none"


def widened(array: Array, spec: TensorSpec) -> Array:
    """Returns bfloat16, which numpy lacks, as float32; anything else as it is."""
    if spec.datatype is not Datatype.BF16:
        return array
    wide: Array = (array.astype(np.uint32) << 16).view(np.float32)
    return wide
