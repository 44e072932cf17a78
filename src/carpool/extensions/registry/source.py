"""Defines what a registry is to the rest: something that resolves an address to a pinned version and fetches
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from carpool.errors import CarpoolError


class RegistryError(CarpoolError):
    reason = "registry"
    exit_code = 1


class RegistryDown(RegistryError):
    """It cannot be asked now: not there, overloaded, refusing our key, or answering nonsense. Asked again."""

    reason = "registry-down"
    retry_after_s: float | None = None


class NotInRegistry(RegistryError):
    """It was asked, and has no such model, alias or version."""

    reason = "not-in-registry"


class NotReady(RegistryError):
    """The version is there, and is being registered: asked again."""

    reason = "not-ready"


class BadArtifacts(RegistryError):
    """What it holds is not taken: a name that leads elsewhere, a wrong size, too much, or nothing to run."""

    reason = "bad-artifacts"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    path: str  # relative, with slashes
    size: int


@dataclass(frozen=True, slots=True)
class Pin:
    """Represents one version, exactly. `digest` differs when anything about it does, wherever it lies."""

    version: int
    digest: str
    files: tuple[PinnedFile, ...]
    address: str = ""
    root: str = ""  # where its files are, in the source's own words
    run: str = ""  # what metrics are written back to
    stamp: str = ""  # when it was made, by the registry's clock

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


class VersionSource(Protocol):
    """Defines one address. All of it blocks, and raises `RegistryError`s."""

    @property
    def address(self) -> str: ...

    def resolve(self, known: Pin | None = None) -> Pin:
        """Returns what the address means now; `known` itself, without listing files, while that is so."""

    def fetch(self, pin: Pin, folder: Path) -> None:
        """Fetches the files that are needed to serve it into an empty folder, with their sizes checked."""

    def write_back(
        self, pin: Pin, state: str, rollout: str = "", metrics: Mapping[str, float] | None = None
    ) -> None:
        """Writes the version's state to the registry: tags carpool.state and carpool.rollout, and metrics."""

    def point(self, pin: Pin) -> None:
        """Let this address mean that version from now on."""
