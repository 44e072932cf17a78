"""Defines what the engine and the runner send each other about loading."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from carpool.backends.backend import CompiledSize
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.loading.loading import Ready

_MOST = 256
_DEEP = ("torch._dynamo", "torch._inductor.compile_fx", "torch.export", "triton")
"""Beyond the packages themselves: what torch imports when something is compiled, which takes seconds."""


def imported_packages() -> list[str]:
    """Installed ones only: what lies beside a model belongs to the model, and is read when that is loaded."""
    names = sorted({name.partition(".")[0] for name in list(sys.modules)})
    installed = [name for name in names if name != "carpool" and _is_installed(name)]
    return [*installed[:_MOST], *(name for name in _DEEP if name in sys.modules)]


def _is_installed(name: str) -> bool:
    if name in sys.stdlib_module_names or not name.isidentifier() or name.startswith("_"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def imported_names(said: object) -> list[str]:
    """Returns what another process says that it has imported, as far as it can be passed on."""
    names = said if isinstance(said, list | tuple) else ()
    good = [name for name in names if isinstance(name, str) and name.replace(".", "_").isidentifier()]
    return good[: 2 * _MOST]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Names which version to load."""

    config: ModelConfig
    version: ModelVersion


@dataclass(frozen=True, slots=True)
class Opening:
    """Describes one more instance of what was loaded before, with what was found out then."""

    asked: LoadOrder
    ready: Ready
    threads: int | None  # of an instance


@dataclass(frozen=True, slots=True)
class OpenedAs:
    number: int
    device: str


@dataclass(frozen=True, slots=True)
class Prepared:
    ready: Ready
    threads: int | None
    opened: list[OpenedAs]
    packages: list[str]  # that were imported
    artifact_sizes: list[int] = field(default_factory=list)  # batch sizes that were compiled before
    profile_key: str = ""  # JSON; empty: its profile is not kept


@dataclass(frozen=True, slots=True)
class CompiledInstances:
    """Describes what became of one batch size, for each instance that serves."""

    instances: list[CompiledSize]


@dataclass(frozen=True, slots=True)
class SavedArtifacts:
    """Describes what a compiler process leaves for other processes; no path: nothing."""

    path: str
    key: str  # JSON, of what it was compiled from


@dataclass(frozen=True, slots=True)
class RunnerFailure:
    """Represents it as `link_failures` writes it."""

    status: int
    text: str


class Settles(Protocol):
    """Represents an instance in the runner that serves."""

    number: int

    def settled(self) -> None:
        """Notes that nothing more is written to the memory of the batch's requests."""
