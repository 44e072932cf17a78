"""What the engine and the runner say to each other beside batches: documents, which travel as files."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.models.loading import Ready

_MOST = 256
_DEEP = ("torch._dynamo", "torch._inductor.compile_fx", "torch.export", "triton")
"""Beyond the packages themselves: what torch imports when something is compiled, which takes seconds."""

ASIDE, AT_ONCE = "aside", "at-once"
"""When a runner imports: while others work, or as soon as it can, since it is waited for."""


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
    """What another process says that it has imported, as far as it can be passed on."""
    names = said if isinstance(said, list | tuple) else ()
    good = [name for name in names if isinstance(name, str) and name.replace(".", "_").isidentifier()]
    return good[: 2 * _MOST]


def cache_folders(cache_dir: Path | None) -> dict[str, str]:
    """Where compilers keep what they made, so that the next process need not make it again."""
    if cache_dir is None:
        return {}
    kept = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {variable: str(cache_dir / name) for variable, name in kept.items()}


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Which version to load."""

    config: ModelConfig
    version: ModelVersion


@dataclass(frozen=True, slots=True)
class Opening:
    """One more instance of what was loaded before, with what was found out then."""

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


@dataclass(frozen=True, slots=True)
class Failure:
    """As `link_failures` writes it."""

    status: int
    text: str
