"""Runtimes, one file each, behind one protocol. Each third-party runtime is imported when a model needs it.

Law of this folder: a backend knows its runtime and nothing of queues, requests or time limits.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import cast

from carpool.backends.backend import Backend, Filling, Finish, Loader, Placement
from carpool.backends.declarations import read_declarations
from carpool.config.complete import complete
from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.errors import NotFound, Unsupported

__all__ = ["Backend", "default_threads", "describe", "load", "read_signature"]

_HOMES = ("fake", "onnxruntime", "python")


def load(
    config: ModelConfig,
    version: ModelVersion,
    *,
    instance: int = 0,
    threads: int | None = None,
    gpu: int | None = None,
    fill: Filling | None = None,
    finish: Finish | None = None,
) -> Backend:
    """One more instance of this version, ready to run; `config` should come from `describe`.

    Raises ModelError where the model cannot be loaded, Unsupported where its kind is not served here, and
    ConfigError where a setting of the runtime is wrong.
    """
    return _loader(config, version).load(config, version, Placement(instance, threads, gpu, fill, finish))


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    """What the model file says about its tensors, without making an instance."""
    return _loader(config, version).read_signature(config, version)


def describe(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    """The settings with everything filled in that the model file says: tensors, shapes, largest batch."""
    signature = read_signature(config, version)
    if config.backend == "python" and config.max_batch is None:
        config = replace(config, max_batch=read_declarations(version.file).max_batch)
    return complete(config, signature)


def default_threads(instances: int, cores: int) -> int:
    """Threads for each instance, so that all of them together have one per core."""
    return max(1, cores // max(1, instances))


def _loader(config: ModelConfig, version: ModelVersion) -> Loader:
    if config.backend not in _HOMES:
        raise Unsupported(
            f'{config.name}: there is no backend "{config.backend}" yet; there are {", ".join(_HOMES)}'
        )
    if version.file is not None and not version.file.is_file():
        raise NotFound(f"{config.name}: the model file {version.file} is gone")
    return cast(Loader, importlib.import_module(f"carpool.backends.{config.backend}"))
