"""Describes what is about to be loaded: its settings and files, also those that came over the network."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from carpool.config import rules
from carpool.config.fingerprint import Fingerprint, take_fingerprint
from carpool.config.model import LatestVersions, ModelConfig
from carpool.config.repository import (
    VERSION,
    ModelSource,
    ModelVersion,
    folder_settings,
    read_place,
    the_place,
)
from carpool.config.settings_part import loaded_with
from carpool.engine.profile.hardware import gpu_count
from carpool.errors import CarpoolError, InvalidInput, Unavailable
from carpool.observe.logs import logger

MAX_FILES = 1000
_PREFIX = "carpool-model-"
_LOCK = "in-use.lock"
_UNLOCKED_S = 3600.0  # a folder this old without a lock is not about to get one


class Upload:
    """Holds an uploaded model in `folder`. It is deleted with its last user; its creator is the first."""

    def __init__(self, model: str, files: Mapping[str, bytes]) -> None:
        check_files(files)
        rules.check_name(model, "the request")
        self._home = Path(tempfile.mkdtemp(prefix=_PREFIX))  # which other users cannot read
        self._lock = -1
        self._users = 1
        self.folder = self._home / model
        try:
            self._lock = os.open(self._home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            for name, content in files.items():
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        except OSError as error:
            self.leave()
            raise InvalidInput(f"the files of the request cannot be written: {error}") from None

    def join(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            shutil.rmtree(self._home, ignore_errors=True)
            if self._lock >= 0:
                os.close(self._lock)


def check_files(files: Mapping[str, bytes]) -> None:
    """Names like 1/model.onnx, and nothing that could end up anywhere else."""
    if len(files) > MAX_FILES:
        raise InvalidInput(f"{len(files)} files are more than the {MAX_FILES} that a model may have")
    for name in files:
        parts = PurePosixPath(name).parts
        if any(len(part.encode(errors="replace")) > rules.MAX_FILE_NAME for part in parts):
            # Triton calls this its own fault, and its clients' examples insist on that.
            raise CarpoolError(
                f"the file {rules.shown(name)} has a name that is too long for any file",
                field=f"file:{name[:64]}",
            )
        clean = name == "/".join(parts) and not any(part.startswith(".") for part in parts)
        long = len(name) > rules.MAX_FILE_NAME or not name.isprintable() or "\\" in name
        if not clean or long or len(parts) < 2 or not VERSION.fullmatch(parts[0]):
            raise InvalidInput(
                f"the file {rules.shown(name)} must be named like 1/model.onnx: a version, then a file",
                field=f"file:{name[:64]}",
            )


def remove_abandoned() -> int:
    """Removes folders of processes of this user that ended without removing them, and returns how many there
    were."""
    try:
        homes = list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    except OSError:
        return 0
    removed = 0
    for home in homes:
        if _is_abandoned(home):
            shutil.rmtree(home, ignore_errors=True)
            removed += 1
    return removed


def _is_abandoned(home: Path) -> bool:
    """Others can write to the temporary folder too: only what is ours, and a folder, is looked at."""
    try:
        seen = home.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
        return False
    try:
        lock = os.open(home / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # it was made this moment, or by a version that knew no locks
        return time.time() - seen.st_mtime > _UNLOCKED_S
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


log = logger("engine")

Pin = Callable[[ModelConfig, Path], ModelConfig]
"""Takes a model's settings and its folder, and may choose other versions; called in any thread."""


@dataclass(frozen=True, slots=True)
class Override:
    """Holds what a request to load says instead of the model's own folder."""

    config: str | None = None  # Triton's JSON form
    files: Mapping[str, bytes] | None = None  # by name, like 1/model.onnx: all that the model has


@dataclass(slots=True)
class Loadable:
    """Read at one moment, and worthless if the files change before all of it is loaded."""

    source: ModelSource
    fingerprint: Fingerprint
    _place: Path
    upload: Upload | None = None

    def identity(self, version: ModelVersion) -> object:
        """Returns a value that is equal for a version that need not be loaded again. Which other versions
        there are is no matter, nor how one takes over from another."""
        config = self.source.config_of(version)
        config = replace(config, versions=LatestVersions(), extra=loaded_with(config))
        return config, self.fingerprint.of(version.number)

    def check_unchanged(self) -> None:
        now, then = take_fingerprint(self._place), self.fingerprint
        used = [version.number for version in self.source.versions]
        if now.settings != then.settings or any(now.of(number) != then.of(number) for number in used):
            raise Unavailable(
                f"{self.source.config.name}: its files changed while it was being loaded; load it again",
                reason="changed-while-loading",
            )

    def explained(self, cause: Exception) -> CarpoolError:
        """Returns why it did not load. Half of a file is no model, but that is not what the user has to
        know."""
        try:
            self.check_unchanged()
        except CarpoolError as change:
            return change
        return as_known(self.source.config.name, cause)

    def close(self) -> None:
        if self.upload is not None:
            self.upload.leave()


def as_known(name: str, cause: Exception) -> CarpoolError:
    if isinstance(cause, CarpoolError):
        return cause
    return CarpoolError(f"{name}: loading it failed: {type(cause).__name__}: {cause}")


def fingerprint_of(places: Sequence[Path]) -> Fingerprint:
    """Returns a fingerprint also of what cannot be loaded, since it was looked at: an empty one where even
    that fails."""
    try:
        return take_fingerprint(places[0]) if places else Fingerprint()
    except CarpoolError:
        return Fingerprint()


def read_loadable(
    name: str,
    places: Sequence[Path],
    override: Override | None,
    with_promise: Callable[[ModelConfig], ModelConfig],
    pin: Pin | None = None,
) -> Loadable:
    """Reads its settings, versions and files; not for the loop's thread. `pin` may choose the versions."""
    upload = Upload(name, override.files) if override is not None and override.files else None
    try:
        place = the_place(name, {name: tuple(places)}) if upload is None else upload.folder
        fingerprint = take_fingerprint(place)
        source, warnings = _read(name, place, None if override is None else override.config, pin)
        for warning in warnings:
            log.warning("config", message=warning)
        source = replace(source, config=with_promise(source.config))
        return Loadable(source, fingerprint, place, upload)
    except BaseException:
        if upload is not None:
            upload.leave()
        raise


def _read(name: str, place: Path, config: str | None, pin: Pin | None) -> tuple[ModelSource, list[str]]:
    def settings(folder: Path, its_name: str) -> tuple[ModelConfig, list[str]]:
        if config is None:
            found, warnings = folder_settings(folder, its_name)
        else:
            from carpool.config.triton import read_override

            found, warnings = read_override(config, folder, name)
        return (found if pin is None else pin(found, folder)), warnings

    return read_place(place, gpus=gpu_count(), settings=settings)
