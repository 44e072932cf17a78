"""Sentences for clients: what the log may say of this machine's files is not for everybody."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from carpool.errors import CarpoolError

_PATH = re.compile(r"(?<![\w.:/…])/(?:[^\s/'\"<>|:;,()\[\]{}]+/)*[^\s/'\"<>|:;,()\[\]{}]*")
_VERSION = re.compile(r"[0-9]{1,18}")


def without_paths(sentence: str, folders: tuple[str, ...] = ()) -> str:
    """Absolute paths keep their last part, and a version's number before it. `folders` are known ones, whose
    names may hold anything."""
    for folder in folders:
        sentence = sentence.replace(folder.rstrip("/") + "/", "…/") if folder.strip("/") else sentence
    return _PATH.sub(lambda found: _shortened(found[0]), sentence)


def hide_paths(error: CarpoolError, folders: tuple[str, ...] = ()) -> CarpoolError:
    """The same error, with a sentence for clients."""
    error.message = without_paths(error.message, folders)
    error.args = (error.message, *error.args[1:])
    return error


def _shortened(path: str) -> str:
    parts = path.strip("/").split("/")
    if parts[0] not in _top():  # /v2/models and its like are addresses of this server
        return path
    kept = parts[-2:] if len(parts) > 2 and _VERSION.fullmatch(parts[-2]) else parts[-1:]
    return "…/" + "/".join(kept)


@cache
def _top() -> frozenset[str]:
    return frozenset(found.name for found in Path("/").iterdir())
