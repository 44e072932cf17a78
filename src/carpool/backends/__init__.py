"""Runtimes, one file each, behind one protocol. Each third-party runtime is imported when a model needs it.

Law of this folder: a backend knows its runtime and nothing of queues, requests or time limits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from carpool.backends.backend import Backend, Filling, Finish, Loader, Placement
from carpool.backends.declarations import read_declarations
from carpool.backends.reshaping import reshaped
from carpool.config.complete import complete
from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.errors import NotFound, Unsupported

__all__ = ["Backend", "default_threads", "describe", "device_names", "devices", "load", "read_signature"]

_HOMES = ("fake", "onnxruntime", "python", "pytorch")
_THEIR_OWN_SHAPES = ("fake", "pytorch")  # one looks at none, the other takes no `reshape`


def load(
    config: ModelConfig,
    version: ModelVersion,
    *,
    instance: int = 0,
    threads: int | None = None,
    gpu: int | None = None,
    fill: Filling | None = None,
    finish: Finish | None = None,
    tell: Callable[[str], None] = lambda _: None,
    hurry: bool = False,
    plain: bool = False,
) -> Backend:
    """One more instance of this version, ready to run; `config` should come from `describe`.

    Raises ModelError where the model cannot be loaded, Unsupported where its kind is not served here, and
    ConfigError where a setting of the runtime is wrong.
    """
    placement = Placement(instance, threads, gpu, fill, finish, tell, hurry, plain)
    backend = _loader(config, version).load(config, version, placement)
    return backend if config.backend in _THEIR_OWN_SHAPES else reshaped(backend, config)


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    """What the model file says about its tensors, without making an instance."""
    return _loader(config, version).read_signature(config, version)


def describe(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    """The settings with everything filled in that the model file says: tensors, shapes, largest batch."""
    if config.backend == "pytorch":
        return cast(ModelConfig, _home(config, version).describe(config, version))
    signature = read_signature(config, version)
    if config.backend == "python" and config.max_batch is None:
        config = replace(config, max_batch=read_declarations(version.file).max_batch)
    return complete(config, signature)


def default_threads(instances: int, cores: int) -> int:
    """Threads for each instance, so that all of them together have one per core."""
    return max(1, cores // max(1, instances))


def devices(config: ModelConfig) -> tuple[int, ...]:
    """The GPUs that this model runs on, with instances on each; none: the CPU, or the runtime's choice."""
    if config.backend != "pytorch":
        return ()
    return cast(tuple[int, ...], importlib.import_module("carpool.backends.pytorch").devices(config))


def device_names(config: ModelConfig) -> tuple[str, ...]:
    """What those GPUs are called: times that were measured on one are not true for another."""
    if config.backend != "pytorch":
        return ()
    return cast(tuple[str, ...], importlib.import_module("carpool.backends.pytorch").device_names(config))


def _loader(config: ModelConfig, version: ModelVersion) -> Loader:
    return cast(Loader, _home(config, version))


def _home(config: ModelConfig, version: ModelVersion) -> Any:
    if config.backend not in _HOMES:
        raise Unsupported(
            f'{config.name}: there is no backend "{config.backend}" yet; there are {", ".join(_HOMES)}'
        )
    if version.file is not None and not version.file.is_file():
        raise NotFound(f"{config.name}: the model file {version.file} is gone")
    return importlib.import_module(f"carpool.backends.{config.backend}")
