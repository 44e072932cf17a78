"""Checks the rules that hold for every source of settings: what Triton and model.toml must both obey."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path, PurePosixPath
from unicodedata import category

from carpool.config.backend_kinds import kind_of
from carpool.config.model import (
    DEFAULT_MAX_BATCH,
    DYNAMIC,
    ModelConfig,
    ModelSignature,
    TensorConfig,
    TensorSignature,
)
from carpool.config.regular_file import open_regular
from carpool.config.sequence_settings import SequenceSettings
from carpool.core.objectives import Knobs, Promise, TimeoutAction
from carpool.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_BATCH = 65536
MAX_OPEN = 1024
MAX_PRIORITY_LEVELS = 2**64 - 1
MAX_INSTANCES = 1024
MAX_RANK = 32
MAX_ELEMENTS = 2**40
"""Of a tensor, as its settings declare it: more fit no memory, and no number of 64 bits counts them."""
MAX_FILE_NAME = 255

_SHOWN = 64  # characters of a user's word that a message repeats


def read_bytes(path: Path, most: int, complaint: str) -> bytes:
    """Returns what a small regular file holds; `complaint` is said of one that has more bytes."""
    try:
        with open_regular(path) as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > most:
        raise ConfigError(f"{path}: {complaint}")
    return data


def read_settings(path: Path) -> str:
    """The text of a settings file; anything that is not a small UTF-8 file is an error."""
    complaint = f"larger than {MAX_FILE_BYTES} bytes, too large for a settings file"
    data = read_bytes(path, MAX_FILE_BYTES, complaint)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None


def shown(word: str) -> str:
    """Returns a user's word in quotes, cut to a length that fits a message."""
    return f'"{word[:_SHOWN]}…"' if len(word) > _SHOWN else f'"{word}"'


def nearest(word: str, valid: Iterable[str]) -> str:
    """Returns the end of an error about an unknown word: the valid one it resembles, or all of them."""
    choices = sorted(valid)
    close = resembling(word, choices, 0.5)
    return f'did you mean "{close}"?' if close else "valid here: " + ", ".join(choices)


def resembling(word: str, valid: Iterable[str], likeness: float) -> str | None:
    """The valid word most like this one, if it is at least so like (1 is equal)."""
    close = difflib.get_close_matches(word[:_SHOWN], list(valid), n=1, cutoff=likeness)
    return close[0] if close else None


def check_name(name: str, where: str) -> str:
    """A model's name is part of URLs, metric labels, file names and commands that people copy: it must not
    reach outside its folder, look like an option, or be expanded by a shell."""
    sound = (
        0 < len(name.encode(errors="replace")) <= MAX_FILE_NAME
        and (name[0].isalnum() or name[0] == "_")
        and not name.endswith(" ")
        and all(c in "_-.+@() " or category(c)[0] in "LMN" for c in name)
    )
    if not sound:
        raise ConfigError(
            f"{where}: {shown(name)} cannot be a model's name. A name has letters and digits of any "
            "script, _ - . + @ ( ) and spaces inside. It begins with a letter, a digit or _, and has at "
            f"most {MAX_FILE_NAME} bytes"
        )
    return name


def check_inside(file: str, where: str) -> str:
    """A file named in the settings must lie inside the model's folder."""
    path = PurePosixPath(file)
    outside = path.is_absolute() or ".." in path.parts
    if not file or outside or "\\" in file or "\0" in file or len(file) > MAX_FILE_NAME:
        raise ConfigError(f"{where}: {shown(file)} must be a file inside the model's folder")
    return file


def check_dims(dims: Sequence[int], where: str) -> tuple[int, ...]:
    if len(dims) > MAX_RANK:
        raise ConfigError(f"{where}: {len(dims)} dimensions are more than the {MAX_RANK} allowed")
    for dim in dims:
        if dim < 1 and dim != DYNAMIC:
            raise ConfigError(f"{where}: a dimension must be 1 or more, or -1 where it varies, not {dim}")
    if prod(dim for dim in dims if dim != DYNAMIC) > MAX_ELEMENTS:
        raise ConfigError(f"{where}: a tensor of {list(dims)} would have more than {MAX_ELEMENTS} elements")
    return tuple(dims)


def check_tensor(tensor: TensorConfig, where: str, max_batch: int | None) -> TensorConfig:
    if tensor.layout is not None and len(tensor.dims) != 3:
        raise ConfigError(
            f"{where}: an image format needs 3 dims, {list(tensor.dims)} has {len(tensor.dims)}"
        )
    if tensor.reshape is None:
        return tensor
    if not tensor.reshape and max_batch == 0:
        raise ConfigError(f"{where}: an empty reshape needs a model that batches")
    if _elements(tensor.dims) != _elements(tensor.reshape):
        raise ConfigError(
            f"{where}: dims {list(tensor.dims)} and reshape {list(tensor.reshape)} differ in their elements"
        )
    return tensor


def _elements(dims: Sequence[int]) -> list[int]:
    """Returns the elements between the varying dimensions, so that 2,4,-1,6 equals 8,-1,3,2 and nothing
    else."""
    counts = [1]
    for dim in dims:
        if dim == DYNAMIC:
            counts.append(1)
        else:
            counts[-1] *= dim
    return counts


def check_distinct(tensors: Sequence[TensorConfig], where: str) -> tuple[TensorConfig, ...]:
    for name, times in Counter(tensor.name for tensor in tensors).items():
        if times > 1:
            raise ConfigError(f"{where}: {shown(name)} is declared twice")
    return tuple(tensors)


def check_knobs(knobs: Knobs, where: str) -> Knobs:
    levels = knobs.priority_levels
    if levels and not 1 <= knobs.default_priority <= levels:
        raise ConfigError(
            f"{where}: the default priority must be 1 to {levels}, not {knobs.default_priority}"
        )
    for level in knobs.level_limits:
        if not 1 <= level <= levels:
            raise ConfigError(
                f"{where}: priority level {level} has queue limits, but levels run from 1 to {levels}"
            )
    if knobs.preserve_ordering and levels > 1:
        raise ConfigError(f"{where}: preserve_ordering allows one priority level, not {levels}")
    delays = (
        limits.timeout and limits.action is TimeoutAction.DELAY
        for limits in (knobs.limits, *knobs.level_limits.values())
    )
    if knobs.preserve_ordering and any(delays):
        raise ConfigError(f"{where}: preserve_ordering and the timeout action DELAY contradict each other")
    return knobs


def check_decoupled(config: ModelConfig) -> ModelConfig:
    """Checks a decoupled model: what only holds where a request has exactly one answer does not go with
    it."""
    if not config.decoupled:
        return config
    promises = isinstance(config.policy, Promise)
    candidate = config.registry is not None and config.registry.candidate
    on_device = config.image is not None and config.image.decode == "device"
    reshaped = any(tensor.reshape is not None for tensor in config.inputs + config.outputs)
    ordered = isinstance(config.policy, Knobs) and config.policy.preserve_ordering
    other = config.backend or "this one"
    unfit = {
        f"it is for Python models; {other} gives one response to each request": config.backend != "python",
        "slo_ms is the latency of a single response; leave it out for this model": promises,
        "preserve_ordering needs requests with exactly one response": ordered,
        "the next request of a sequence waits for the one response to the last; leave [sequences] out": (
            config.sequences
        ),
        'image.decode = "device" is for models with one response per image; leave it out': on_device,
        "reshape is not supported; declare the tensors as the model has them": reshaped,
        "a cache stores the one response to a request; switch it off for this model": config.caching,
        "a rollout compares the one response to a request; leave it and a registry's candidate out": (
            config.rollout or candidate
        ),
    }
    for why, given in unfit.items():
        if given:
            raise ConfigError(f"{config.name}: decoupled: {why}", field="decoupled")
    return config


def with_max_batch(config: ModelConfig, max_batch: int, where: str) -> ModelConfig:
    """The same settings once the largest batch is known; preferred sizes must fit into it."""
    too_large = [n for n in preferred(config.policy) if n > max(max_batch, 1)]
    if too_large:
        raise ConfigError(
            f"{where}: preferred batch {too_large[0]} is larger than the largest batch, {max_batch}"
        )
    policy = replace(config.policy, max_batch=max(max_batch, 1))
    return replace(config, max_batch=max_batch, policy=policy)


def singly(config: ModelConfig, why: str) -> ModelConfig:
    """The same settings for a model whose requests never share a batch."""
    policy = replace(config.policy, max_batch=1)
    if isinstance(policy, Knobs):
        policy = replace(policy, preferred=())
    buckets = config.pytorch.buckets[:1] and (1,)
    pytorch = replace(config.pytorch, buckets=buckets)
    return replace(config, max_batch=1, policy=policy, pytorch=pytorch, unbatched=why)


def preferred(policy: Promise | Knobs) -> tuple[int, ...]:
    return policy.preferred if isinstance(policy, Knobs) else ()


# ---- what the settings declare and what the model file says have to agree ---------------------------------


def complete(config: ModelConfig, signature: ModelSignature) -> ModelConfig:
    """The settings with nothing left open: tensors, their shapes and the largest batch are all known.

    A backend that cannot read its file passes an empty signature; the settings must then declare the tensors.
    """
    max_batch = _max_batch(config, signature)
    if config.max_batch is None and max_batch < 2 and signature.can_batch:
        config = replace(config, unbatched=signature.why_not_rows)
    batched = max_batch > 0
    if config.sequences is not None:
        signature = _without_own(config, config.sequences, signature, batched)
    inputs = _merge(config, "input", config.inputs, signature.inputs, batched)
    outputs = _merge(config, "output", config.outputs, signature.outputs, batched)
    # Declaring some outputs only is a choice; an input nobody declared would never get a value.
    declared = {t.name for t in config.inputs}
    missing = [t.name for t in signature.inputs if t.name not in declared and not t.optional]
    if declared and missing:
        raise ConfigError(
            f'{config.name}: the model file has the input "{missing[0]}", which is not declared'
        )
    done = with_max_batch(config, max_batch, config.name)
    return check_decoupled(replace(done, inputs=inputs, outputs=outputs))


def _without_own(
    config: ModelConfig, sequences: SequenceSettings, signature: ModelSignature, batched: bool
) -> ModelSignature:
    """Without what the server fills in and keeps, which the file must have as the settings say. A state that
    is declared as an output as well is one."""
    wanted: list[tuple[bool, str, str, tuple[int, ...]]] = [
        (True, control.name, control.datatype, (1,)) for control in sequences.controls
    ]
    wanted += [(True, state.input, state.datatype, state.dims) for state in sequences.states]
    wanted += [(False, state.output, state.datatype, state.dims) for state in sequences.states]
    for is_input, name, datatype, dims in wanted:
        found = {t.name: t for t in (signature.inputs if is_input else signature.outputs)}
        if not found:
            continue
        where = f'{config.name}: the {"input" if is_input else "output"} "{name}", for its sequences,'
        tensor = found.get(name)
        if tensor is None:
            raise ConfigError(f"{where} is not in the model file; {nearest(name, found)}")
        shape = tensor.shape[1:] if batched else tensor.shape
        fits = len(shape) == len(dims) and all(
            DYNAMIC in (d, s) or d == s for d, s in zip(dims, shape, strict=True)
        )
        if tensor.datatype != datatype or not fits:
            told = f"{datatype} {list(dims)}{' (without the batch)' if batched else ''}"
            raise ConfigError(f"{where} should be {told} and is {tensor.datatype} {list(shape)}")
    kept = {state.output for state in sequences.states} - {tensor.name for tensor in config.outputs}
    return ModelSignature(
        tuple(t for t in signature.inputs if t.name not in sequences.own_inputs),
        tuple(t for t in signature.outputs if t.name not in kept),
    )


def check_beside_sequences(config: ModelConfig) -> None:
    """What does not go with sequences: each of these would take requests away from the state they need."""
    if config.sequences is None:
        return
    if kind_of(config.backend).process == "runner":
        raise ConfigError(
            f'{config.name}: sequences are kept for models of the engine, not for backend "{config.backend}";'
            " export it to ONNX, or write a Python model"
        )
    unfit = {
        "a rollout, which sends requests of one sequence to two versions": config.rollout,
        "a registry's candidate, which gets some requests of a sequence": (
            config.registry is not None and config.registry.candidate
        ),
        "a cache: the same request has another response later": config.caching,
        "a task for images, or [image]: its requests bring tensors": config.task or config.image,
        "quality measures of images": config.drift,
    }
    for what, given in unfit.items():
        if given:
            raise ConfigError(f"{config.name}: sequences do not go with {what}")


def _max_batch(config: ModelConfig, signature: ModelSignature) -> int:
    tensors = signature.inputs + signature.outputs
    known = bool(tensors)
    if config.max_batch is None:
        declared = {t.name: len(_model_dims(t)) for t in config.inputs + config.outputs}
        # A declared shape that is as long as the file's includes the first dimension.
        whole = any(declared.get(t.name) == len(t.shape) for t in tensors)
        if known and not (signature.can_batch and not whole):
            return 0
        if known and signature.why_not_rows and not preferred(config.policy):
            return 1 if declared else 0
        return max(DEFAULT_MAX_BATCH, *preferred(config.policy), 1)
    if config.max_batch == 0 or not known or signature.can_batch:
        return config.max_batch
    if config.max_batch == 1 and all(t.shape[:1] in ((1,), (DYNAMIC,)) for t in tensors):
        return 1
    fixed = next(t for t in tensors if t.shape[:1] != (DYNAMIC,) and not t.optional)
    raise ConfigError(
        f"{config.name}: the settings allow batches of {config.max_batch}, but in the model file "
        f'"{fixed.name}" has the shape {list(fixed.shape)}; export the model with a dynamic first dimension, '
        "or set the largest batch to 0"
    )


def _model_dims(tensor: TensorConfig) -> tuple[int, ...]:
    return tensor.dims if tensor.reshape is None else tensor.reshape


def _merge(
    config: ModelConfig,
    kind: str,
    declared: Sequence[TensorConfig],
    found: Sequence[TensorSignature],
    batched: bool,
) -> tuple[TensorConfig, ...]:
    if not found:
        if not declared:
            said = f"{config.name}: the model file does not declare its {kind}s"
            if kind == "input" and kind_of(config.backend).values_on_device:
                raise ConfigError(
                    f"{said}; if it takes images, give their size, as --size 224 or as size in [image], "
                    "else declare them as [[input]] in model.toml"
                )
            python = f", or as {kind.upper()}S in model.py" if config.backend == "python" else ""
            raise ConfigError(
                f"{said}; declare each as [[{kind}]] in model.toml, with name, datatype and shape{python}"
            )
        return tuple(declared)
    if not declared:
        return tuple(
            TensorConfig(t.name, t.datatype, t.shape[1:] if batched else t.shape, optional=t.optional)
            for t in found
        )
    by_name = {t.name: t for t in found}
    return tuple(_agree(config, kind, tensor, by_name, batched) for tensor in declared)


def _agree(
    config: ModelConfig, kind: str, tensor: TensorConfig, found: dict[str, TensorSignature], batched: bool
) -> TensorConfig:
    where = f'{config.name}: {kind} "{tensor.name}"'
    actual = found.get(tensor.name)
    _check_optional(config, tensor, actual, batched)
    if actual is None:
        raise ConfigError(f"{where} is declared but not in the model file; {nearest(tensor.name, found)}")
    if actual.datatype != tensor.datatype:
        raise ConfigError(f"{where} is declared {tensor.datatype} but is {actual.datatype} in the model file")
    shape = actual.shape[1:] if batched else actual.shape
    dims = _model_dims(tensor)
    if len(shape) != len(dims) or any(
        DYNAMIC not in (d, s) and d != s for d, s in zip(dims, shape, strict=True)
    ):
        without = " (without the batch)" if batched else ""
        raise ConfigError(f"{where} is declared {list(dims)} but is {list(shape)}{without} in the model file")
    if tensor.reshape is None:
        dims = tuple(s if d == DYNAMIC else d for d, s in zip(dims, shape, strict=True))
        return replace(tensor, dims=dims)
    return check_tensor(tensor, where, config.max_batch)


def _check_optional(
    config: ModelConfig, tensor: TensorConfig, actual: TensorSignature | None, batched: bool
) -> None:
    """A graph must have something to use in place of what a request leaves out; code can look for itself."""
    if not tensor.optional or actual is None or not kind_of(config.backend).gives_defaults:
        return
    where = f'{config.name}: input "{tensor.name}"'
    if not actual.optional:
        raise ConfigError(
            f"{where} is declared optional, but the model file has no default for it: export the model with"
            " an initializer of the same name, or leave optional out"
        )
    if batched and actual.shape[:1] != (DYNAMIC,):
        raise ConfigError(
            f"{where} is optional, and its default has the shape {list(actual.shape)}, which does not grow"
            " with a batch: set the largest batch to 0"
        )
