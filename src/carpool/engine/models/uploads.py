"""Model files that came with a request to load, in a private folder for as long as the model is in memory.

Its process holds a lock on a file in the folder, which goes with the process however that ends: a folder
whose lock can be had belongs to nobody, and the next engine that starts removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from carpool.config import rules
from carpool.config.repository import VERSION
from carpool.errors import CarpoolError, InvalidInput

MAX_FILES = 1000
_PREFIX = "carpool-model-"
_LOCK = "in-use.lock"
_UNLOCKED_S = 3600.0  # a folder this old without a lock is not about to get one


class Upload:
    """`folder` is the model's folder. It goes with its last user; whoever made it is the first."""

    def __init__(self, model: str, files: Mapping[str, bytes]) -> None:
        check_files(files)
        rules.check_name(model, "the request")
        self._home = Path(tempfile.mkdtemp(prefix=_PREFIX))  # for nobody else to read
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
    """Folders of processes of this user that ended without removing them; how many there were."""
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
