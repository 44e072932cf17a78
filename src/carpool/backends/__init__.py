"""This module has runtimes, one file or folder each, behind one protocol. config/backend_kinds.py says which
there are; each third-party runtime is imported when a model needs it.

Law of this folder: a backend knows its runtime and nothing of queues, requests or time limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from carpool.errors import NotFound, Unsupported

if TYPE_CHECKING:
    from carpool.backends.backend import Backend, Loader, Placement
    from carpool.config.backend_kinds import BackendKind
    from carpool.config.model import ModelConfig, ModelSignature
    from carpool.config.repository import ModelVersion

__all__ = ["Backend", "default_threads", "describe", "device_names", "devices", "load", "read_signature"]


# The process of every Python model imports this file on its way to its own, and reads no settings: what does
# is imported where it is used, which saves a third of the time that such a process takes to start.


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module 'carpool.backends' has no attribute {name!r}")
    from carpool.backends.backend import Backend

    return Backend


def load(config: ModelConfig, version: ModelVersion, placement: Placement | None = None) -> Backend:
    """One more instance of this version, ready to run; `config` should come from `describe`.

    Raises ModelError where the model cannot be loaded, Unsupported where its kind is not served here, and
    ConfigError where a setting of the runtime is wrong.
    """
    from carpool.backends.backend import Padded, Placement, reshaped
    from carpool.config.asked_extensions import asked_extensions

    backend = _home(config, version).load(config, version, placement or Placement())
    if config.fixed_batch:
        backend = Padded(backend, config.fixed_batch)
    if _kind(config).reshapes:
        backend = reshaped(backend, config)
    for extension in asked_extensions(config):
        if extension.instance:
            backend = cast("Backend", extension.part(extension.instance)(backend, config))
    return backend


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    """Returns what the model file says about its tensors, without making an instance."""
    from carpool.config.onnx_outputs import as_declared

    found = _home(config, version).read_signature(config, version)
    return as_declared(found, version.file, frozenset(tensor.name for tensor in config.outputs))


def describe(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    """The settings with everything filled in that the model file says: tensors, shapes, largest batch."""
    from carpool.config.completing import complete

    home: Any = _home(config, version)
    if hasattr(home, "describe"):
        return cast("ModelConfig", home.describe(config, version))
    return complete(config, read_signature(config, version))


def asks_for_batches(config: ModelConfig, version: ModelVersion) -> bool:
    """Returns whether the model file says how many requests may share a batch."""
    home = _home_of(config)
    return hasattr(home, "asks_for_batches") and bool(home.asks_for_batches(version))


def default_threads(instances: int, cores: int) -> int:
    """Returns threads for each instance, so that all of them together have one per core."""
    return max(1, cores // max(1, instances))


def devices(config: ModelConfig) -> tuple[int, ...]:
    """Returns the GPUs that this model runs on, with instances on each; none: the CPU, or the runtime's
    choice."""
    home = _home_of(config)
    return home.devices(config) if hasattr(home, "devices") else ()


def device_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns what those GPUs are called: times that were measured on one are not true for another."""
    home = _home_of(config)
    return home.device_names(config) if hasattr(home, "device_names") else ()


def _kind(config: ModelConfig) -> BackendKind:
    from carpool.config.backend_kinds import kind_of

    return kind_of(config.backend)


def _home_of(config: ModelConfig) -> Any:
    from carpool.config.backend_kinds import module_of

    kind = _kind(config)
    return module_of(kind) if kind.home else None


def _home(config: ModelConfig, version: ModelVersion) -> Loader:
    from carpool.config.backend_kinds import module_of

    kind = _kind(config)
    if missing := kind.missing():
        raise Unsupported(f"{config.name}: {missing}")
    try:
        home = module_of(kind)
    except Unsupported as error:
        raise Unsupported(f"{config.name}: {error.message}") from None
    if version.file is not None and not version.file.is_file():
        raise NotFound(f"{config.name}: the model file {version.file} is gone")
    return cast("Loader", home)
