"""Looks at a model before it is measured: what its file says, and what it answers to a picture of noise.

Shapes that a file leaves open are known then; values distinguish probabilities from logits, and pixels from
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from carpool import backends
from carpool.backends.backend import Backend
from carpool.config.backend_kinds import kind_of
from carpool.config.file_metadata import read_metadata
from carpool.config.model import DYNAMIC, ModelConfig, Task
from carpool.config.presets import said_of_pixels
from carpool.config.repository import ModelVersion
from carpool.config.rules import read_bytes
from carpool.engine.loading.rebatching import rebatched
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import CarpoolError, ConfigError
from carpool.observe.logs import logger
from carpool.types import Array, Datatype, Signature
from carpool.vision.claims import Claims, read_claims
from carpool.vision.plans.pixels import known_pixels, see_pixels, with_layers
from carpool.vision.plans.settings import ModelFacts, declared_task
from carpool.vision.tasks.task import Picture, find_picture, outputs_of, widened

log = logger("engine")

_LARGEST_LABELS = 4 << 20  # bytes
_MOST_LABELS = 1 << 18
_MORE_LABELS = 1 << 16  # than the output has numbers: it may be another that names classes
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SEED = 1
_OPEN = {Task.DETECT: ("format", "normalized"), Task.POSE: ("format",), Task.OBB: ("format",)}
_OPEN |= {Task.CLASSIFY: ("activation",), Task.SEGMENT: ("activation",), Task.READ: ("activation",)}
_OPEN |= {Task.TEXT_REGIONS: ("format",)}
"""What a declared task leaves open: where the settings say these, no trial is needed."""


class Examined(NamedTuple):
    config: ModelConfig  # nothing is left open
    signature: Signature
    labels: Mapping[str, Sequence[str]]  # by output
    seen: ModelFacts
    version: ModelVersion  # whose file runs, which may be a rewritten one


def examine(config: ModelConfig, version: ModelVersion) -> Examined:
    """Returns what can be known of a model without running it."""
    claims = read_claims(read_metadata(version.file, config.path))
    version, words, refused, rows = rebatched(config, version)
    if rows > 1:
        words, refused = f"{refused}; smaller batches are filled up to {rows}", ""
        config = replace(config, fixed_batch=rows, max_batch=min(rows, config.max_batch or rows))
    claims = replace(claims, lines=(*claims.lines, words)) if words else claims
    config = backends.describe(with_layers(_with_size(config, claims), claims), version)
    config = _with_channels(config, claims)
    if refused and not config.max_batch:
        config = replace(config, unbatched=refused)
    return Examined(config, signature_of(config), read_labels(config), ModelFacts(claims), version)


def try_out(found: Examined, load: Callable[[ModelConfig], Backend]) -> Examined:
    """Returns `found` with what the model's answers show, where a trial is possible: `load` makes an
    instance, which is closed again."""
    config, signature, claims = found.config, found.signature, found.seen.claims
    picture, shape = find_picture(config, signature), trial_shape(found)
    if picture is None or shape is None:
        return found
    try:
        backend = load(config)
        try:
            seen = _tried(backend, signature, picture, shape)._replace(claims=claims)
        finally:
            backend.close()
    except CarpoolError as error:
        seen = ModelFacts(claims, trouble=f"it could not be tried with an image of noise: {error.message}")
    return found._replace(seen=seen)


def _with_size(config: ModelConfig, claims: Claims) -> ModelConfig:
    """A network whose file says nothing of its tensors has an input as soon as its pictures have a size."""
    config = replace(config, image_keys=tuple(said_of_pixels(config)))  # what is filled in later is not said
    if not kind_of(config.backend).values_on_device or config.inputs:
        return config
    image = known_pixels(config, claims)
    return config if image.size is None else replace(config, image=image)


def _with_channels(config: ModelConfig, claims: Claims) -> ModelConfig:
    """Exports that leave every dimension open say by their first layers how many channels a picture has:
    planes of them, since convolutions take no others."""
    required = [tensor for tensor in config.inputs if not tensor.optional]
    if claims.channels not in (1, 3) or len(required) != 1 or len(required[0].dims) < 3:
        return config
    *leading, first, second, third = required[0].dims
    if first != DYNAMIC or third in (1, 3) or len(leading) > (not config.max_batch):
        return config
    filled = replace(required[0], dims=(*leading, claims.channels, second, third))
    return replace(config, inputs=tuple(filled if one is required[0] else one for one in config.inputs))


def read_labels(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Returns class names by output: the output's own file, else the model's, which is for its first
    output."""
    labels: dict[str, Sequence[str]] = {}
    for index, output in enumerate(config.outputs):
        name = output.labels or (config.labels if index == 0 else None)
        if name is None:
            continue
        folder = config.path if config.path.is_dir() else config.path.parent
        lines = _lines(config, folder, name, output.dims)
        if lines is None:
            log.warning("labels-not-found", model=config.name, file=name)
        else:
            labels[output.name] = lines
    return labels


def _lines(config: ModelConfig, folder: Path, name: str, dims: Sequence[int]) -> list[str] | None:
    """Returns the lines of a labels file. Each front end gets them: a file that has far more of them than its
    output has numbers holds something else."""
    file = (folder / name).resolve()
    outside = not file.is_relative_to(folder.resolve()) and not Path(name).is_absolute()  # which only we give
    if outside or not file.is_file():
        return None
    data = read_bytes(file, _LARGEST_LABELS, f"larger than {_LARGEST_LABELS} bytes, too large for labels")
    text = data.decode("utf-8", "replace")
    lines = 1 + sum(map(text.count, _LINE_ENDS))
    most = _MOST_LABELS if DYNAMIC in dims else min(_MOST_LABELS, prod(dims) + _MORE_LABELS)
    if lines > most:
        raise ConfigError(
            f"{config.name}: {file} has {lines} lines, and at most {most} can be labels of an output of "
            f"{list(dims)}: keep one line for each class",
            field="labels",
        )
    return text.splitlines()


def trial_shape(found: Examined) -> tuple[int, ...] | None:
    """Returns the shape of the picture of noise. None: nothing would be learned, or it takes no pictures, or
    of any size."""
    picture = find_picture(found.config, found.signature)
    if picture is None or not _tells(found.config):
        return None
    size = see_pixels(found.config, picture, found.seen.claims).image.size
    height, width = size or (picture.height, picture.width)
    if DYNAMIC in (height, width):
        return None
    channels = picture.spec.shape[0 if picture.layout == "nchw" else 2]
    channels = 3 if channels == DYNAMIC else channels
    return (channels, height, width) if picture.layout == "nchw" else (height, width, channels)


def _tried(backend: Backend, signature: Signature, picture: Picture, shape: tuple[int, ...]) -> ModelFacts:
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
    samples = _samples(signature, picture, answered, whole)
    loud: dict[str, Array] = {}
    if picture.spec.datatype.dtype.kind == "f" and any(map(_like_fractions, samples.values())):
        again = (
            run(images, loud=True) if images else run(*(() if picture.leading is None else (1,)), loud=True)
        )
        loud = _samples(signature, picture, again, whole)
    return ModelFacts(samples=samples, loud=loud, whole=whole)


def _like_fractions(array: Array) -> bool:
    return array.dtype.kind == "f" and bool(array.size) and bool(array.min() >= 0 and array.max() <= 1)


def _grows(run: Callable[..., Mapping[str, Array]]) -> bool:
    """Returns whether each output has a row for each picture, of a model that is asked for one at a time."""
    try:
        return all(array.shape[:1] == (2,) for array in run(2).values())
    except CarpoolError:
        return False


def _tells(config: ModelConfig) -> bool:
    """Python models say in their settings what they answer, and may do anything; fakes answer nothing."""
    kind = kind_of(config.backend)
    if not kind.needs_file or kind.name == "python":
        return False
    declared = declared_task(config)
    if declared is None:
        return True
    left = _OPEN.get(Task(declared), ()) if declared in list(Task) else ()
    return any(getattr(getattr(config, declared), name, None) is None for name in left)


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
