"""Finds out whether a model's files have changed, and whether two models are made of the same."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from carpool.config.model import ModelConfig
from carpool.config.regular_file import open_regular
from carpool.config.repository import PBTXT, TOML, version_folders
from carpool.config.settings_part import other_files, part_of
from carpool.errors import ConfigError
from carpool.extensions import installed

MAX_FILES = 20_000
_MAX_DEPTH = 16
_BLOCK = 1 << 20

Stamp = tuple[str, int, int, int]
"""Name, size, time of the last change, inode."""

Stamps = tuple[Stamp, ...]

PROVISIONAL = "carpool_provisional"
"""The parameter that says what disturbed the machine while a model was measured."""

UNBATCHED = "carpool_unbatched"
"""The parameter that says why requests never share a batch, where no setting says so."""

COMPILED = ".compiled"
"""What a compiler made of a model may lie beside it: that changes nothing of the model."""

CHANGES_NO_ANSWER = (
    *("path", "versions", "mode", "policy", "slo_may_grow", "instances", "execution_timeout", "max_open"),
    *("device_weight",),
    *("onnxruntime", "steps", "unbatched"),
)
"""Fields of a model's settings that say where it lies, when it runs and what is kept of it. Of instances and
of onnxruntime the devices count."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Describes the files of one model. Settings are compared by what they say; their stamp only shows that
    they were touched."""

    settings: Stamps = ()
    shared: Stamps = ()  # files of all versions: labels, modules beside them
    versions: Mapping[int, Stamps] = field(default_factory=dict)

    def of(self, version: int) -> tuple[Stamps, Stamps]:
        return self.shared, self.versions.get(version, ())


def take_fingerprint(place: Path) -> Fingerprint:
    """Returns the fingerprint of the model in this folder or file; an empty one where there is none. Links
    are followed."""
    if place.is_dir():
        return Fingerprint(
            _stamps(place, _settings(place)),
            _stamps(place, _shared(place)),
            {number: _stamps(folder, _files(folder)) for number, folder in _versions(place).items()},
        )
    folder = place.parent
    homes = {folder, folder.parent} if folder.name.isdigit() else {folder}
    settings = [home / name for home in sorted(homes) for name in (PBTXT, TOML)]
    return Fingerprint(_stamps(folder, settings), _stamps(folder, _named_like(place)))


def beside(file: Path) -> Stamps:
    """Returns a file and its neighbours: all that a model which is opened by this file can be made of."""
    others = (path for path in _listed(file.parent) if path.suffix != COMPILED)
    return _stamps(file.parent, (path for path in others if path.is_file()))


def content_digest(file: Path) -> str:
    """Returns the digest of everything that the model opened by this file is likely made of, by content: the
    same model has the same one wherever it lies. A version's folder counts as a whole, else only files named
    like this one."""
    home = file.parent
    return _digest(home, _files(home) if home.name.isdigit() else _named_like(file))


def whole_digest(file: Path, folder: Path) -> str:
    """Returns the same of all that its answers can follow from: also files in the model's folder that all
    versions share, as labels are. Where that folder has no settings, any files may lie in it: those beside
    the model count by their stamps."""
    if not any(path.is_file() for path in _settings(folder)):
        return f"{content_digest(file)} {beside(file)}"
    home = file.parent
    own = _files(home) if home != folder else ()
    return _digest(folder, (*own, *_shared(folder)))


def settings_of_answers(config: ModelConfig) -> dict[str, Any]:
    """Returns, of a model's settings, what its answers can follow from: equal for replicas that were measured
    to run best with other instances or threads."""
    said = {each.name: getattr(config, each.name) for each in fields(config)}
    for name in CHANGES_NO_ANSWER:
        del said[name]
    del said["extra"]
    said |= {name: own for name, own in config.extra.items() if part_of(name).changes_answers}
    said["parameters"] = {k: v for k, v in config.parameters.items() if k not in (PROVISIONAL, UNBATCHED)}
    said["devices"] = sorted({group.kind for group in config.instances}), config.onnxruntime.providers
    return said


def _digest(home: Path, files: Iterable[Path]) -> str:
    parts = sorted(files)
    digest = blake2b(digest_size=20)
    for path in parts[:MAX_FILES]:
        digest.update(f"{os.path.relpath(path, home)}\0{path.stat().st_size}\0".encode())
        with open_regular(path) as opened:
            while block := opened.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _settings(folder: Path) -> list[Path]:
    beside = [extension.beside for extension in installed().values() if extension.beside]
    return [folder / name for name in (PBTXT, TOML, *other_files(), *beside)]


def _shared(folder: Path) -> Iterator[Path]:
    """Yields the files of all versions."""
    return _files(folder, leave_out={*_versions(folder).values(), *_settings(folder)})


def _named_like(file: Path) -> list[Path]:
    named = (path for path in _listed(file.parent) if path.name.startswith(file.stem))
    return [path for path in named if path.suffix != COMPILED and path.is_file()]


def _stamps(home: Path, paths: Iterable[Path]) -> Stamps:
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # gone since it was listed, or a link to nothing
        found.append((os.path.relpath(path, home), status.st_size, status.st_mtime_ns, status.st_ino))
        if len(found) > MAX_FILES:
            raise ConfigError(f"{home}: more than {MAX_FILES} files, too many for a model")
    return tuple(sorted(found))


def _files(folder: Path, depth: int = 0, leave_out: Collection[Path] = ()) -> Iterator[Path]:
    """Yields every file below, without hidden ones and what Python leaves behind when it imports."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{folder}: more than {_MAX_DEPTH} folders deep, too deep for a model")
    for path in _listed(folder):
        if path in leave_out or path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.suffix == COMPILED:
            continue
        if path.is_dir():
            yield from _files(path, depth + 1)
        elif path.is_file():  # what is no file would hold its reader
            yield path


def _versions(folder: Path) -> dict[int, Path]:
    try:
        return version_folders(folder)
    except OSError:
        return {}


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
