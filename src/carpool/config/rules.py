"""Checks the rules that hold for every source of settings: what Triton and model.toml must both obey."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path, PurePosixPath
from unicodedata import category

from carpool.config.model import (
    DYNAMIC,
    ModelConfig,
    TensorConfig,
)
from carpool.config.regular_file import open_regular
from carpool.core.objectives import FixedBatching, Promise, TimeoutAction
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


def check_fixed(fixed: FixedBatching, where: str) -> FixedBatching:
    levels = fixed.priority_levels
    if levels and not 1 <= fixed.default_priority <= levels:
        raise ConfigError(
            f"{where}: the default priority must be 1 to {levels}, not {fixed.default_priority}"
        )
    for level in fixed.level_limits:
        if not 1 <= level <= levels:
            raise ConfigError(
                f"{where}: priority level {level} has queue limits, but levels run from 1 to {levels}"
            )
    if fixed.preserve_ordering and levels > 1:
        raise ConfigError(f"{where}: preserve_ordering allows one priority level, not {levels}")
    delays = (
        limits.timeout and limits.action is TimeoutAction.DELAY
        for limits in (fixed.limits, *fixed.level_limits.values())
    )
    if fixed.preserve_ordering and any(delays):
        raise ConfigError(f"{where}: preserve_ordering and the timeout action DELAY contradict each other")
    return fixed


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
    if isinstance(policy, FixedBatching):
        policy = replace(policy, preferred=())
    buckets = config.pytorch.buckets[:1] and (1,)
    pytorch = replace(config.pytorch, buckets=buckets)
    return replace(config, max_batch=1, policy=policy, pytorch=pytorch, unbatched=why)


def preferred(policy: Promise | FixedBatching) -> tuple[int, ...]:
    return policy.preferred if isinstance(policy, FixedBatching) else ()
