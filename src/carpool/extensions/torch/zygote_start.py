"""Starts the zygote of the processes that run PyTorch models: what the engine does first, before it imports
anything else, since importing torch takes longer than all that the engine does until it needs it."""

from __future__ import annotations

from pathlib import Path

from carpool.config.server import ServerSettings
from carpool.config.usable_cores import WAITING
from carpool.link.child_process import Child

RUNNER_MODULE = "carpool.extensions.torch.runner_process"
ZYGOTE, RUNNER, COMPILER = "zygote", "runner", "compiler"
"""The processes of that module: what the others are forked from, what serves, what compiles for it."""

# A GPU takes commands from eight queues by default. Streams that share one wait for each other, although
# nothing makes them: the many short steps of decoding JPEGs waited behind whole batches of the model.
DEVICE_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def cache_folders(cache_dir: Path | None) -> dict[str, str]:
    """Returns where compilers keep what they made, so that the next process need not make it again."""
    if cache_dir is None:
        return {}
    kept = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {variable: str(cache_dir / name) for variable, name in kept.items()}


def runner_environment(settings: ServerSettings) -> dict[str, str]:
    return {**WAITING, **DEVICE_QUEUES, **cache_folders(settings.cache_dir)}


def start_zygote(settings: ServerSettings) -> Child:
    """To be called on a running loop."""
    return Child(RUNNER_MODULE, ZYGOTE, called=ZYGOTE, environment=runner_environment(settings))


def begin_zygote(settings: ServerSettings) -> Child | None:
    """Returns None where it cannot be started, which is tried again when it is needed."""
    try:
        return start_zygote(settings)
    except OSError:
        return None
