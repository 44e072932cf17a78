"""Implements `carpool compile`: a model compiled ahead of its first start, into a file that servers find
beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from carpool.backends.backend import CompiledSize, Compiles
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelSource, ModelVersion
from carpool.engine.loading.loading import Loading, Ready
from carpool.engine.profile.measuring import Point
from carpool.engine.profile.model_profile import key_text, profile_key
from carpool.errors import InvalidInput, ModelError
from carpool.extensions.torch.compiled_file import (
    compiled_key,
    compiled_point,
    saved_artifacts,
    write_compiled,
)


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """Describes the file that was written, and what became of each batch size."""

    name: str
    file: Path
    sizes: tuple[CompiledSize, ...]


def compile_model(source: ModelSource, out: Path | None, tell: Callable[[str], None]) -> CompiledModel:
    """Compiles the newest version, for the device of this machine. Without `out` the file goes beside the
    model."""
    config, version = source.config, source.versions[-1]
    if config.pytorch.compile == "off" or config.asks("text"):
        raise InvalidInput(
            f"{config.name}: its settings do not ask for it; set compile = true in [pytorch] of model.toml"
        )
    if version.file is None:
        raise InvalidInput(f"{config.name}: it has no file")
    if config.pytorch.compile == "before-ready":  # the same code, for servers that compile behind as well
        config = replace(config, pytorch=replace(config.pytorch, compile="default"))
    loading = Loading(config, version, behind=True)  # as the runner loads it
    ready = loading.prepare(tell)
    assert loading.settled is not None
    try:
        return _compile(loading.settled.config, version, ready, out or version.file.parent, tell)
    finally:
        ready.close()


def _compile(
    config: ModelConfig, version: ModelVersion, ready: Ready, out: Path, tell: Callable[[str], None]
) -> CompiledModel:
    """Compiles for each batch size; `config` are the settings before anything was measured: what keys are
    of."""
    found: dict[int, list[CompiledSize]] = {}
    for size in config.pytorch.buckets or (1,):
        tell(f"compiling for batches of {size}")
        found[size] = [cast(Compiles, backend).compile(size) for backend in ready.backends]
    made = {size: each for size, each in found.items() if not any(one.why_not for one in each)}
    artifacts, key = saved_artifacts(), compiled_key(config, version)
    if not made or artifacts is None or key is None:
        whys = {one.why_not for each in found.values() for one in each if one.why_not}
        raise ModelError(f"{config.name}: nothing was compiled: {'; '.join(sorted(whys)) or 'no artifacts'}")
    plain: dict[int, Point] = {point.size: point for point in ready.profile.points}
    points = (compiled_point(plain[size], each) for size, each in made.items() if size in plain)
    profile = replace(ready.profile, compiled=tuple(point for point in points if point is not None))
    text = key_text(profile_key(config, version))
    file = write_compiled(out, key_text(key), sorted(made), [artifacts], profile, text)
    file.chmod(0o644)
    return CompiledModel(config.name, file, tuple(each[0] for each in found.values()))
