"""Reads key files: who holds a key, and what for.

One key a line, `name key [priority=N] [models=a,b*] [weight=W]`; lines that start with # are remarks. Each
line has an end, also the last: a file that is being written shows the beginning of a key, which is none. No
part of a key is ever in an error or in the log: lines are named by number.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from carpool.config.regular_file import open_regular
from carpool.errors import ConfigError
from carpool.frontend.access.keys import Keys, Principal, digest_of
from carpool.types import HEAVIEST, LIGHTEST

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_KEY = re.compile(r"[!-~]{1,512}")
_MODELS = re.compile(r"[!-+\--~]{1,256}")  # printable, and no comma
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_MOST_BYTES = 1 << 20
_HIGHEST_PRIORITY, _LOWEST_PRIORITY = 1, 1 << 31
_WEAK = 16  # characters: shorter than this, a key can be tried out over the network


def read_keys(api_file: str, admin_file: str) -> Keys:
    """Raises `ConfigError` that names the file and the line; "" is no file."""
    found: list[Principal] = []
    for file, admin in ((api_file, False), (admin_file, True)):
        if file:
            principals = list(_parsed(file, _text(file), admin))
            if not principals:
                raise ConfigError(f"{file}: it has no key; write one 'name key' per line")
            found += principals
            _check_unique(found, file)
    return Keys(found)


def _text(file: str) -> str:
    try:
        with open_regular(Path(file)) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                raise ConfigError(
                    f"{file}: every user of this machine can read or write it: chmod o-rw {file} (for a "
                    "Kubernetes Secret: defaultMode 0440)"
                )
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{file}: over {_MOST_BYTES} bytes is too large for a key file")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: holds bytes that are not ASCII") from None


def _is_published_whole(file: Path) -> bool:
    """Returns whether no reader ever sees it half written: a Kubernetes volume publishes all of its files at
    once, by a link that is replaced. A Secret made of a literal has no end of line."""
    return file.parent.joinpath("..data").is_symlink()


def _parsed(file: str, text: str, admin: bool) -> Iterator[Principal]:
    if text and not text.endswith("\n") and not _is_published_whole(Path(file)):
        raise ConfigError(
            f"{file}: its last line has no end, so it may be half written: end it with a newline"
        )
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(words) < 2:
            raise ConfigError(f"{where}: must be 'name key [priority=N] [models=a,b*] [weight=W]'")
        name, key, *options = words
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: a name has up to 64 letters, digits and . _ @ -")
        if not _KEY.fullmatch(key) or len(key) < _WEAK:
            raise ConfigError(f"{where}: the key of {name} must have {_WEAK} to 512 printable characters")
        given = _options(where, options)
        yield Principal(
            name,
            digest_of(key.encode()),
            admin,
            _priority(where, given["priority"]) if "priority" in given else 0,
            _models(where, given["models"]) if "models" in given else (),
            _weight(where, given["weight"]) if "weight" in given else 1.0,
        )


def _options(where: str, words: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if option not in ("priority", "models", "weight") or not equals or option in given:
            raise ConfigError(
                f"{where}: after the key, priority=N, models=a,b* and weight=W may follow, once each"
            )
        given[option] = value
    return given


def _priority(where: str, value: str) -> int:
    priority = int(value) if value.isdigit() and len(value) < 11 else 0
    if not _HIGHEST_PRIORITY <= priority < _LOWEST_PRIORITY:
        raise ConfigError(f"{where}: priority must be a whole number from 1, the most urgent")
    return priority


def _models(where: str, value: str) -> tuple[str, ...]:
    models = tuple(value.split(","))
    if not all(map(_MODELS.fullmatch, models)):
        raise ConfigError(f"{where}: models must be names or patterns like yolo*, with commas between")
    return models


def _weight(where: str, value: str) -> float:
    weight = float(value) if _NUMBER.fullmatch(value) else 0.0
    if not LIGHTEST <= weight <= HEAVIEST:
        raise ConfigError(f"{where}: weight must be a number from {LIGHTEST:g} to {HEAVIEST:g}; 1 is usual")
    return weight


def _check_unique(principals: Iterable[Principal], file: str) -> None:
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for principal in principals:
        if principal.name in names:
            raise ConfigError(f"{file}: the name {principal.name} is given twice")
        if principal.digest in digests:
            both = f"{digests[principal.digest]} and {principal.name}"
            raise ConfigError(f"{file}: {both} have the same key: give each its own")
        names.add(principal.name)
        digests[principal.digest] = principal.name
