"""Keeps fetched versions on disk. A version's folder appears by one rename, whole, or not at all.

STORE/sha256/ab/abcd…     contents, each once
STORE/versions/DIGEST     which contents a pinned version is made of
MODEL/.incoming-…         a version that is being fetched
MODEL/7/                  one that is there, with links to the contents
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from carpool.config.regular_file import open_regular, read_regular
from carpool.config.repository import version_folders
from carpool.extensions.registry.source import BadArtifacts, Pin, RegistryError, VersionSource

_MARK = ".pin.json"
_INCOMING = ".incoming-"
LEFT_S = 24 * 3600.0  # what is fetched for so long was left behind
_BLOCK = 1 << 20
_MOST_LIST = 16 << 20
_RESERVE = 256 << 20  # of the disk, for other programs
_KEPT = 2  # versions besides those that are needed: the way back


class VersionStore:
    """Several processes may use one: everything is made under a name of its own and renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, pin: Pin, home: Path) -> bool:
        return _mark(home / str(pin.version)).get("digest") == pin.digest

    def bring(self, source: VersionSource, pin: Pin, home: Path) -> Path:
        """Returns the version's folder in the model's folder `home`, fetched unless it or its contents are
        there."""
        target = home / str(pin.version)
        if self.has(pin, home):
            return target
        if target.exists() and not _mark(target):
            raise RegistryError(f"{target} is there, and is not from the registry: move it away")
        stage = None
        try:
            home.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(home)
            stage = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=home))
            if not self._assemble(pin, stage):
                _check_room(pin, home)
                source.fetch(pin, stage)
                self._keep(pin, stage)
            document = {"digest": pin.digest, "address": pin.address, "version": pin.version}
            write_document(stage / _MARK, document)
            stage.chmod(0o755)
            _sync(stage)
            if target.exists():  # the same number, and not the same files: a registry that was made anew
                target.rename(Path(tempfile.mkdtemp(prefix=_INCOMING, dir=home)) / "old")
            stage.rename(target)
            _sync_folder(home)
        except OSError as error:
            raise BadArtifacts(f"{home}: cannot be written: {error.strerror or error}") from None
        finally:
            if stage is not None:
                shutil.rmtree(stage, ignore_errors=True)
        return target

    def tidy(self, home: Path, needed: Collection[int]) -> None:
        """Remove fetched versions that no model needs, but for the last few, contents of no version, and the
        lists of versions whose contents are gone."""
        with suppress(OSError):
            fetched = {number: path for number, path in version_folders(home).items() if _mark(path)}
            background = sorted(number for number in fetched if number not in needed)
            for number in background[:-_KEPT]:
                shutil.rmtree(fetched[number], ignore_errors=True)
            _remove_abandoned(home)
        for content in (self._root / "sha256").glob("*/*"):
            with suppress(OSError):
                status = content.stat()
                if status.st_nlink == 1 and time.time() - status.st_mtime > LEFT_S:
                    content.unlink()
        for listed in (self._root / "versions").glob("*"):
            with suppress(OSError):
                if time.time() - listed.stat().st_mtime > LEFT_S and not self._is_whole(listed):
                    listed.unlink()

    def _is_whole(self, listed: Path) -> bool:
        """Returns whether a version can be assembled from contents that are here."""
        try:
            contents = json.loads(read_regular(listed, _MOST_LIST))
            return all(self._content(digest).is_file() for _, digest in contents)
        except (ValueError, TypeError):
            return False

    # ---- contents

    def _content(self, digest: str) -> Path:
        return self._root / "sha256" / digest[:2] / digest

    def _assemble(self, pin: Pin, stage: Path) -> bool:
        """From contents that are here, each checked again; False where one is not."""
        try:
            listed = json.loads(read_regular(self._root / "versions" / pin.digest, _MOST_LIST))
            for path, digest in listed:
                content, target = self._content(digest), stage / path
                if _digest(content) != digest:
                    content.unlink()
                    raise ValueError
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(content, target)
        except (OSError, ValueError, TypeError):
            shutil.rmtree(stage, ignore_errors=True)
            stage.mkdir()
            return False
        return True

    def _keep(self, pin: Pin, stage: Path) -> None:
        listed = []
        for path in sorted(_files(stage)):
            digest = _digest(path)
            content = self._content(digest)
            content.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                _link(path, content)
            listed.append([str(path.relative_to(stage)), digest])
        (self._root / "versions").mkdir(parents=True, exist_ok=True)
        write_document(self._root / "versions" / pin.digest, listed)


def _check_room(pin: Pin, home: Path) -> None:
    free = shutil.disk_usage(home).free
    if free < pin.bytes + _RESERVE:
        raise BadArtifacts(
            f"{pin.address}: version {pin.version} has {pin.bytes / 1e6:,.0f} MB, and {home} has room for "
            f"{max(free - _RESERVE, 0) / 1e6:,.0f}"
        )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    digest = sha256()
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _link(path: Path, new: Path) -> None:
    """Makes a second name for the same bytes; on another disk, a copy under a name of its own, renamed."""
    try:
        new.hardlink_to(path)
    except FileExistsError:
        raise
    except OSError:
        part = new.with_name(f"{new.name}.{os.getpid()}.part")
        shutil.copyfile(path, part)
        part.rename(new)


def _mark(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / _MARK, _MOST_LIST))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_document(path: Path, document: object) -> None:
    """Writes a document whole or not at all, also if the machine stops."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _sync(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove_abandoned(home: Path) -> None:
    """Removes what a process that was killed left half fetched."""
    for path in home.glob(f"{_INCOMING}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFT_S:
                shutil.rmtree(path, ignore_errors=True)
