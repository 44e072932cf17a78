"""Describes one model of a repository: where it is, what of it serves, and how its last load ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from carpool.config.fingerprint import Fingerprint
from carpool.engine.models.served import Served, VersionState
from carpool.link.catalog import UNLOADED, IndexEntry

_MOST_UNLOADED = 16
_WHOLE = 0  # among the versions: the model as such


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """Holds settings that a request to load brought. As in Triton they hold for later loads that bring none,
    until the files in the model's folder change."""

    config: str
    files: Fingerprint


@dataclass(slots=True, eq=False)
class ModelState:
    name: str
    places: tuple[Path, ...] = ()  # where it was found; none for one that came with a request, or is gone
    serving: dict[int, Served] = field(default_factory=dict)  # by version
    loading: Collection[int] = ()
    tried: Fingerprint | None = None  # what the last load, good or bad, began with
    kept: KeptConfig | None = None  # settings that came with a request
    missed: int = 0  # looks in a row at which it was not found
    _failed: dict[int, str] = field(default_factory=dict)
    _unloaded: set[int] = field(default_factory=set)

    def failed(self, reason: str, versions: Collection[int] = ()) -> None:
        """Notes that the last load failed; what served before goes on."""
        self._failed = dict.fromkeys(versions or (_WHOLE,), reason)

    def now_serves(self, serving: dict[int, Served]) -> None:
        self._failed = {}
        self._unloaded |= self.serving.keys() - serving.keys()
        self._unloaded -= serving.keys()
        self._unloaded = set(sorted(self._unloaded)[-_MOST_UNLOADED:])
        self.serving = serving

    def lines(self, leaving: Collection[int]) -> list[IndexEntry]:
        """Returns one entry for each version; `leaving` are withdrawn versions that still have requests."""
        versions = {*self.serving, *self.loading, *leaving, *self._failed, *self._unloaded} - {_WHOLE}
        lines = [self._line(version, version in leaving) for version in sorted(versions)]
        if lines:
            return lines
        whole = self._failed.get(_WHOLE)
        return [
            IndexEntry(self.name, "", VersionState.UNAVAILABLE.value, whole)
            if whole
            else IndexEntry(self.name)
        ]

    def _line(self, version: int, leaving: bool) -> IndexEntry:
        reason = self._failed.get(version) or self._failed.get(_WHOLE) or ""
        if version in self.serving:
            state = VersionState.READY
        elif version in self.loading:
            state, reason = VersionState.LOADING, ""
        elif leaving:
            state, reason = VersionState.UNLOADING, ""
        else:
            state, reason = VersionState.UNAVAILABLE, reason or UNLOADED
        return IndexEntry(self.name, str(version), state.value, reason)
