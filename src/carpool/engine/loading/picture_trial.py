"""Runs a model that takes pictures on one of noise: what it answers shows what its file leaves open."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from carpool.backends.backend import Backend
from carpool.config.model import DYNAMIC, ModelConfig
from carpool.errors import CarpoolError
from carpool.types import Array, Datatype, Signature
from carpool.vision.output_facts import Claims
from carpool.vision.picture_input import Picture, outputs_of, widened
from carpool.vision.plans.pixels import see_pixels
from carpool.vision.vision_settings import ModelFacts

_SEED = 1


def noise_shape(config: ModelConfig, picture: Picture, claims: Claims) -> tuple[int, ...] | None:
    """Returns the shape of the picture of noise; None where pictures may have any size."""
    size = see_pixels(config, picture, claims).image.size
    height, width = size or (picture.height, picture.width)
    if DYNAMIC in (height, width):
        return None
    channels = 3 if picture.channels == DYNAMIC else picture.channels
    return (channels, height, width) if picture.layout == "nchw" else (height, width, channels)


def tried(backend: Backend, signature: Signature, picture: Picture, shape: tuple[int, ...]) -> ModelFacts:
    """Tries it with two pictures where it takes so many: what does not grow with the batch is found."""

    def run(*leading: int, loud: bool = False) -> Mapping[str, Array]:
        noise = _noise((*leading, *shape), picture.spec.datatype)
        noise = noise * noise.dtype.type(255) if loud else noise
        return backend.run({picture.spec.name: noise}, ())

    images = min(2, signature.max_batch)
    answered = run(images) if images else run(*(() if picture.leading is None else (1,)))
    for name, array in answered.items():
        if images and array.shape[:1] != (images,):
            found = f'its output "{name}" is {list(array.shape)} for a batch of {images}'
            return ModelFacts(trouble=found, ask=f"{found}: set max_batch = 0 in model.toml")
    whole = not images and picture.leading == DYNAMIC and not _grows(run)
    if picture.leading == 1:
        whole = any(answered[name].shape[:1] != (1,) for name in _taken_for_one(signature, picture, answered))
    samples = _samples(signature, picture, answered, whole)
    loud: dict[str, Array] = {}
    if picture.spec.datatype.dtype.kind == "f" and any(map(_like_fractions, samples.values())):
        again = (
            run(images, loud=True) if images else run(*(() if picture.leading is None else (1,)), loud=True)
        )
        loud = _samples(signature, picture, again, whole)
    return ModelFacts(samples=samples, loud=loud, whole=whole)


def _taken_for_one(signature: Signature, picture: Picture, answered: Mapping[str, Array]) -> list[str]:
    """Returns the outputs whose first dimension is open, and is taken for that of a batch of one."""
    pairs = zip(signature.outputs, outputs_of(signature, picture), strict=True)
    opened = [spec.name for spec, one in pairs if spec.shape[:1] == (DYNAMIC,) and one.shape != spec.shape]
    return [name for name in opened if name in answered]


def _like_fractions(array: Array) -> bool:
    return array.dtype.kind == "f" and bool(array.size) and bool(array.min() >= 0 and array.max() <= 1)


def _grows(run: Callable[..., Mapping[str, Array]]) -> bool:
    """Returns whether each output has a row for each picture, of a model that is asked for one at a time."""
    try:
        return all(array.shape[:1] == (2,) for array in run(2).values())
    except CarpoolError:
        return False


def _noise(shape: tuple[int, ...], datatype: Datatype) -> Array:
    random = np.random.default_rng(_SEED)
    if datatype.dtype.kind == "f":
        return random.random(shape, np.float32).astype(datatype.dtype)
    if datatype is Datatype.BF16:
        bits: Array = (random.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return bits
    return random.integers(0, 128 if datatype is Datatype.INT8 else 256, shape).astype(datatype.dtype)


def _samples(
    signature: Signature, picture: Picture, answered: Mapping[str, Array], whole: bool
) -> dict[str, Array]:
    """Returns the answers by output, as they are for one picture."""
    found = {}
    for spec in signature.outputs if whole else outputs_of(signature, picture):
        array = answered.get(spec.name)
        if array is None or array.dtype != spec.datatype.dtype:
            continue
        one = array[0] if array.ndim > len(spec.shape) and len(array) else array
        found[spec.name] = widened(one, spec)
    return found
