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

from carpool import backends
from carpool.backends.backend import Backend
from carpool.config.backend_kinds import kind_of
from carpool.config.model import DYNAMIC, ModelConfig, Task
from carpool.config.presets import said_of_pixels
from carpool.config.repository import ModelVersion
from carpool.config.rules import read_bytes
from carpool.engine.loading.fixed_batches import rebatched
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import CarpoolError, ConfigError
from carpool.observe.logs import logger
from carpool.types import Signature
from carpool.vision.output_facts import NO_CLAIMS, Claims
from carpool.vision.picture_input import find_picture
from carpool.vision.vision_settings import ModelFacts, declared_task

log = logger("engine")

_LARGEST_LABELS = 4 << 20  # bytes
_MOST_LABELS = 1 << 18
_MORE_LABELS = 1 << 16  # than the output has numbers: it may be another that names classes
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
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
    config = replace(config, image_keys=tuple(said_of_pixels(config)))  # what is filled in later is not said
    file, claims = version.file, NO_CLAIMS
    version, words, refused, rows = rebatched(config, version)
    if rows > 1:
        words, refused = f"{refused}; smaller batches are filled up to {rows}", ""
        config = replace(config, fixed_batch=rows, max_batch=min(rows, config.max_batch or rows))
    on_device = kind_of(config.backend).values_on_device
    if on_device:  # the size of its pictures may be that of its input
        config, claims = _as_claimed(config, file)
    config = backends.describe(config, version)
    if not on_device and _may_take_pictures(config):
        config, claims = _as_claimed(config, file)
    config = _with_channels(config, claims)
    claims = replace(claims, lines=(*claims.lines, words)) if words else claims
    if refused and not config.max_batch:
        config = replace(config, unbatched=refused)
    return Examined(config, signature_of(config), read_labels(config), ModelFacts(claims), version)


def _may_take_pictures(config: ModelConfig) -> bool:
    """Returns whether the one required input has a picture's dimensions: else no claims are read."""
    required = [tensor for tensor in config.inputs if not tensor.optional]
    return len(required) == 1 and len(required[0].dims) >= 3


def claims_of(file: Path | None, config: ModelConfig) -> Claims:
    """Returns what the model's file, and those beside it, claim."""
    from carpool.config.file_metadata import read_metadata
    from carpool.vision.claims import read_claims  # most models of tensors never need it

    return read_claims(read_metadata(file, config.path))


def try_out(found: Examined, load: Callable[[ModelConfig], Backend]) -> Examined:
    """Returns `found` with what the model's answers show, where a trial is possible: `load` makes an
    instance, which is closed again."""
    picture, shape = find_picture(found.config, found.signature), trial_shape(found)
    if picture is None or shape is None:
        return found
    from carpool.engine.loading.picture_trial import tried

    claims = found.seen.claims
    try:
        backend = load(found.config)
        try:
            seen = tried(backend, found.signature, picture, shape)._replace(claims=claims)
        finally:
            backend.close()
    except CarpoolError as error:
        seen = ModelFacts(claims, trouble=f"it could not be tried with an image of noise: {error.message}")
    return found._replace(seen=seen)


def trial_shape(found: Examined) -> tuple[int, ...] | None:
    """Returns the shape of the picture of noise. None: nothing would be learned, or it takes no pictures, or
    of any size."""
    picture = find_picture(found.config, found.signature)
    if picture is None or not _tells(found.config):
        return None
    from carpool.engine.loading.picture_trial import noise_shape

    return noise_shape(found.config, picture, found.seen.claims)


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


def _as_claimed(config: ModelConfig, file: Path | None) -> tuple[ModelConfig, Claims]:
    """Returns the settings with what is claimed of pixels, and all claims. A network whose file says nothing
    of its tensors has an input as soon as its pictures have a size."""
    from carpool.vision.plans.pixels import known_pixels, with_layers

    claims = claims_of(file, config)
    image = None if config.inputs else known_pixels(config, claims)
    if image is not None and image.size is not None:
        config = replace(config, image=image)
    return with_layers(config, claims), claims


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
