"""Follows a registry with a model's folder: what the addresses of its [registry] table mean now, which of
that lies in the folder, and what is served. The folder remembers it, so that a registry may be down."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from carpool.config.regular_file import read_regular
from carpool.config.repository import TOML, find_places
from carpool.config.rules import MAX_FILE_BYTES, check_name
from carpool.config.toml import read_toml
from carpool.errors import ConfigError
from carpool.extensions.registry.mlflow_source import MlflowServer, MlflowSource
from carpool.extensions.registry.settings import (
    STATE_FILE,
    RegistrySettings,
    is_address,
    read_address,
    read_state,
    registry_settings,
)
from carpool.extensions.registry.source import NotInRegistry, Pin, PinnedFile, VersionSource
from carpool.extensions.registry.version_store import VersionStore, write_document

_FORMAT = 1


class Pointed(NamedTuple):
    """Describes where the addresses point. `candidate` is None where there is none, or where it is the stable
    one."""

    stable: Pin
    candidate: Pin | None = None

    @property
    def digests(self) -> tuple[str, str]:
        return self.stable.digest, "" if self.candidate is None else self.candidate.digest


class WantedVersions(NamedTuple):
    """Names the wanted versions by digest."""

    stable: str = ""
    candidate: str = ""


NOTHING = WantedVersions()


@dataclass(frozen=True, slots=True)
class FollowedState:
    """Describes what a model's folder remembers. `serve`: the versions to load, the stable one first. What
    was decided on holds until an address moves: `judged` are the digests that were rolled out, whatever came
    of it, and `passed_over` is that of the stable address, if another version took its place."""

    pointed: Pointed | None = None
    serve: tuple[int, ...] = ()
    judged: tuple[str, ...] = ()
    passed_over: str = ""
    resolved_at: str = ""
    registry: str = ""

    def seeing(self, pointed: Pointed) -> FollowedState:
        """Returns the state with the addresses where they are now."""
        before = self.pointed
        left = before is not None and before.candidate is not None and pointed.candidate is None
        return replace(
            self,
            pointed=pointed,
            judged=tuple(digest for digest in self.judged if digest in pointed.digests),
            passed_over=self.passed_over if self.passed_over == pointed.stable.digest and not left else "",
        )

    @property
    def wanted(self) -> WantedVersions:
        """Returns what is pointed to and not served, and was not decided on."""
        if self.pointed is None:
            return NOTHING
        stable, candidate = self.pointed
        done = {*self.judged, *(pin.digest for pin in self.pins if pin.version in self.serve[:1])}
        return WantedVersions(
            "" if stable.digest in {*done, self.passed_over} else stable.digest,
            "" if candidate is None or candidate.digest in done else candidate.digest,
        )

    @property
    def pins(self) -> list[Pin]:
        return [pin for pin in self.pointed or () if pin is not None]


class FollowedModel:
    """Represents one of them. All of it blocks. One thread at a time looks, and one at a time remembers."""

    def __init__(self, folder: Path, settings: RegistrySettings, server: MlflowServer, store: VersionStore):
        self.folder = folder
        self.settings = settings
        self._server = server
        self._store = store
        pickles = settings.allow_pickle
        self.stable: VersionSource = MlflowSource(server, settings.stable, allow_pickle=pickles)
        self.candidate: VersionSource | None = None
        if settings.candidate:
            self.candidate = MlflowSource(server, settings.candidate, allow_pickle=pickles)
        self.missing: Sequence[str] = ()  # addresses that the registry did not know at the last look

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def state(self) -> FollowedState:
        return _read(read_state(self.folder))

    def look(self) -> Pointed:
        """Ask the registry; one call for each address while nothing changes. An alias that was deleted is
        noted in `missing`, and what it meant last stays."""
        before = self.state.pointed
        missing = []
        try:
            stable = self.stable.resolve(None if before is None else before.stable)
        except NotInRegistry:
            if before is None:
                raise
            stable = before.stable
            missing.append(self.stable.address)
        candidate = None if before is None else before.candidate
        if self.candidate is not None:
            try:
                candidate = self.candidate.resolve(candidate or stable)
            except NotInRegistry:
                missing.append(self.candidate.address)
        self.missing = missing
        same = candidate is None or candidate.version == stable.version
        return Pointed(stable, None if same else candidate)

    def bring(self, pointed: Pointed) -> None:
        """Brings every version that is pointed to into the folder."""
        self._store.bring(self.stable, pointed.stable, self.folder)
        if pointed.candidate is not None and self.candidate is not None:
            self._store.bring(self.candidate, pointed.candidate, self.folder)

    def pin_of(self, version: int) -> Pin:
        """Returns the pin of one that an address means, or that one meant before."""
        for pin in self.state.pins:
            if pin.version == version:
                return pin
        name = read_address(self.settings.stable).name
        pickles = self.settings.allow_pickle
        return MlflowSource(self._server, f"models:/{name}/{version}", allow_pickle=pickles).resolve()

    def remember(self, state: FollowedState) -> None:
        """Makes its versions what a load takes from here on; what is not needed goes."""
        assert state.pointed is not None
        stable, candidate = state.pointed
        write_document(
            self.folder / STATE_FILE,
            {
                "format": _FORMAT,
                "registry": self._server.url,
                "resolved_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "serve": list(state.serve),
                "stable": asdict(stable),
                "candidate": None if candidate is None else asdict(candidate),
                "judged": list(state.judged),
                "passed_over": state.passed_over,
            },
        )
        self._store.tidy(self.folder, {*state.serve, *(pin.version for pin in state.pins)})

    def prepare(self) -> FollowedState:
        """Before anything is served: fetch what the addresses mean, and serve the stable one.

        What was served before goes on being served if it is there still: the watch sees to a move later,
        which changes versions under load.
        """
        pointed = self.look()
        self.bring(pointed)
        state = self.state.seeing(pointed)
        there = all((self.folder / str(version)).is_dir() for version in state.serve)
        if not (state.serve and there):
            state = FollowedState(pointed, (pointed.stable.version,))
        self.remember(state)
        return self.state


def _read(document: Mapping[str, Any]) -> FollowedState:
    """Reads a document that may have been edited: what is not sound counts as unknown."""
    try:
        stable, candidate = _pin(document["stable"]), document.get("candidate")
        serve = tuple(number for number in document["serve"] if type(number) is int)
        pointed = Pointed(stable, None if candidate is None else _pin(candidate))
        said = (str(document.get(key, "")) for key in ("passed_over", "resolved_at", "registry"))
        return FollowedState(pointed, serve, tuple(map(str, document.get("judged", ()))), *said)
    except (KeyError, TypeError, ValueError):
        return FollowedState()


def _pin(document: Mapping[str, Any]) -> Pin:
    files = tuple(PinnedFile(str(one["path"]), int(one["size"])) for one in document["files"])
    rest = {key: str(document[key]) for key in ("digest", "address", "root", "run", "stamp")}
    return Pin(version=int(document["version"]), files=files, **rest)


# ---- which of the folders that are served follow a registry


class Registries:
    """Holds the registry that a server's settings name, and the store of what came from it."""

    def __init__(self, url: str, cache_dir: Path | None, environ: Mapping[str, str] | None = None) -> None:
        self._url = url
        self._environ = os.environ if environ is None else environ
        self._root = (cache_dir or Path.home() / ".cache" / "carpool") / "registry"

    @property
    def store(self) -> VersionStore:
        return VersionStore(self._root)

    def server(self) -> MlflowServer:
        return MlflowServer.at(self._url, self._environ)

    def follow(self, folder: Path) -> FollowedModel | None:
        """Returns None for a model that no registry has to do with. Raises what is wrong with its
        settings."""
        if not (folder / TOML).is_file():
            return None
        settings = registry_settings(read_toml(folder / TOML))
        if settings is None:
            return None
        return FollowedModel(folder, settings, self.server(), self.store)

    def folder_of(self, address: str) -> Path:
        """Returns the model's folder for an address that was named instead of one, with settings that say
        so."""
        name = check_name(read_address(address).name, address)
        server = self.server()
        place = sha256(server.url.encode()).hexdigest()[:12]
        folder = self._root / "models" / place / re.sub(r"[^\w.-]", "_", name)
        folder.mkdir(parents=True, exist_ok=True)
        toml = folder / TOML
        text = f'[registry]\nstable = "{address}"\n'
        if _content(toml) != text.encode():
            (folder / STATE_FILE).unlink(missing_ok=True)  # it was about another address
            part = toml.with_name(f"{TOML}.{os.getpid()}.part")
            part.write_text(text, "utf-8")
            part.replace(toml)
        return folder

    def folders(self, paths: Sequence[Path]) -> tuple[list[Path], list[FollowedModel], list[str]]:
        """Returns the paths with a folder for each address; those models among them that follow a registry;
        and why others that should cannot."""
        found = [self.folder_of(str(path)) if is_address(str(path)) else path for path in paths]
        followed, complaints = [], []
        for folder in _model_folders(found):
            try:
                model = self.follow(folder)
            except ConfigError as error:
                if error.field == "registry":  # else it is reported when all of its settings are read
                    complaints.append(f"{folder.name}: {error.message}")
                continue
            if model is not None:
                followed.append(model)
        return found, followed, complaints


def _content(file: Path) -> bytes:
    """Returns what the settings that were written here hold; nothing where they cannot be read."""
    try:
        return read_regular(file, MAX_FILE_BYTES)
    except OSError:
        return b""


def _model_folders(paths: Sequence[Path]) -> list[Path]:
    places, _ = find_places(paths)
    return [place for found in places.values() for place in found if place.is_dir()]
