"""Finds the extensions that the files of models' folders ask for, without reading the models' settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from carpool.config.known_keys import owners
from carpool.config.regular_file import read_regular
from carpool.config.repository import TOML, find_places
from carpool.config.rules import MAX_FILE_BYTES
from carpool.extensions import installed


def asked_under(paths: Sequence[Path]) -> set[str]:
    """Returns the same of all models' folders under these paths, as `find_places` finds them."""
    places, _ = find_places(paths)
    return asked_in_folders(place for found in places.values() for place in found)


def asked_in_folders(folders: Iterable[Path]) -> set[str]:
    """Returns the names of extensions that the files in these models' folders ask for, by a key of model.toml
    or by their presence; also where the settings have mistakes. A key of the same name in another table
    counts, too: what is not asked for after all is only loaded in vain. Not for the loop's thread."""
    found: set[str] = set()
    for folder in folders:
        found.update(name for name, file in _files().items() if (folder / file).is_file())
        try:
            text = read_regular(folder / TOML, MAX_FILE_BYTES)
        except OSError:
            continue
        found.update(owners()[key.decode()].name for key in _keys().findall(text))
    return found


@cache
def _files() -> dict[str, str]:
    return {one.name: one.beside for one in installed().values() if one.beside}


@cache
def _keys() -> re.Pattern[bytes]:
    """Returns what finds a key that an extension owns at the beginning of a line, or the header of its
    table."""
    names = "|".join(map(re.escape, owners()))
    return re.compile(rf"^[ \t]*\[?[ \t]*[\"']?({names})\b".encode(), re.MULTILINE)
