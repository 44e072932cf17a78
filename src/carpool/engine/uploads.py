"""Model files that came with a request to load, in a private folder for as long as the model is in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from carpool.config import rules
from carpool.config.repository import VERSION
from carpool.errors import CarpoolError, InvalidInput

MAX_FILES = 1000


class Upload:
    """`folder` is the model's folder. It goes with its last user; whoever made it is the first."""

    def __init__(self, model: str, files: Mapping[str, bytes]) -> None:
        check_files(files)
        rules.check_name(model, "the request")
        self._home = Path(tempfile.mkdtemp(prefix="carpool-model-"))  # for nobody else to read
        self._users = 1
        self.folder = self._home / model
        try:
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
