"""Holds images that were uploaded for tools, for ten minutes: language models cannot type base64.

They are files, because several processes answer on one port. Who has a handle may use its image: a handle is
random.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from carpool.config.server import ServerSettings
from carpool.errors import InvalidInput, Refused, TooLarge
from carpool.extensions.mcp.mcp_messages import UPLOAD

_HANDLE = re.compile(r"upload:([0-9a-f]{32})")
_KEPT_S = 600.0
_MOST_BYTES = 16 << 20  # of one
_MOST_HELD = 256 << 20
_MOST_FILES = 256


class Uploads:
    """Keeps the uploads of one server. All of this is called in threads."""

    def __init__(self, settings: ServerSettings) -> None:
        home = settings.cache_dir or Path(tempfile.gettempdir()) / f"carpool-{os.getuid()}"
        self._folder = home / "uploads"

    def put(self, data: bytes) -> str:
        """Returns the handle of an image."""
        if len(data) > _MOST_BYTES:
            raise TooLarge(f"an uploaded image may have {_MOST_BYTES >> 20} MiB")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        count, held = self._forget(time.time() - _KEPT_S)
        if count >= _MOST_FILES or held + len(data) > _MOST_HELD:
            raise Refused("too many uploaded images are held", reason="queue-full", retry_after_s=60.0)
        name = secrets.token_hex(16)
        part = self._folder / f"{name}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.rename(self._folder / name)
        return f"{UPLOAD}{name}"

    def get(self, handle: str) -> bytes:
        found = _HANDLE.fullmatch(handle)
        path = None if found is None else self._folder / found[1]
        try:
            if path is not None and path.stat().st_mtime >= time.time() - _KEPT_S:
                return path.read_bytes()
        except OSError:
            pass
        raise InvalidInput("no image is held under this handle: handles last for 10 minutes", field="image")

    def _forget(self, before: float) -> tuple[int, int]:
        """Removes what is older; returns how many files and bytes are left."""
        count = held = 0
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process was faster
                seen = path.stat()
                if seen.st_mtime < before:
                    path.unlink()
                else:
                    count, held = count + 1, held + seen.st_size
        return count, held
