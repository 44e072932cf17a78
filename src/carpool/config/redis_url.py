"""Reads where a Redis server is: `redis://`, `rediss://` and `unix://`, as its own clients write it."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from carpool.config.rules import nearest
from carpool.errors import ConfigError

_FORMS = "like redis://HOST:6379/0, rediss://:PASSWORD@HOST or unix:///run/redis.sock"
_FOLDER = "file:/mnt/rollouts"  # where a folder would do as well
_SCHEMES = ("redis", "rediss", "unix")
_PORT = 6379
_DATABASE = re.compile(r"[0-9]{1,5}")
_HIDDEN = re.compile(r"[\x00-\x20\x7f]")


class RedisUrl(NamedTuple):
    """What is secret in it is shown nowhere: say `where`."""

    host: str  # or the path of a Unix socket, which has no port
    port: int
    tls: bool
    user: str
    password: str
    database: int
    ca: str  # the file of the authority that signed the server's certificate; the system's without

    @property
    def where(self) -> str:
        if not self.port:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"RedisUrl({self.where})"


def read_redis_url(text: str, field: str, *, folders: bool = True) -> RedisUrl:
    """Reads the setting `field`, which may name a folder in its place (`folders`). No message repeats what
    was given: there may be a password in it."""
    forms = f"like {_FOLDER} or {_FORMS.removeprefix('like ')}" if folders else _FORMS
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{field} must be an address {forms}", field=field) from None
    local = parts.scheme == "unix"
    named = parts.path.startswith("/") if local else bool(parts.hostname)
    if parts.scheme not in _SCHEMES or not named or parts.fragment or _HIDDEN.search(text):
        raise ConfigError(f"{field} must be an address {forms}", field=field)
    options = _options(parts, field)
    database = options.get("db", "0") if local else parts.path.strip("/") or options.get("db", "0")
    if not _DATABASE.fullmatch(database):
        raise ConfigError(f"{field}: the database is a number, {_FORMS}", field=field)
    return RedisUrl(
        unquote(parts.path) if local else parts.hostname or "",
        0 if local else port or _PORT,
        parts.scheme == "rediss",
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        int(database),
        options.get("ssl_ca_certs", ""),
    )


def _options(parts: SplitResult, field: str) -> dict[str, str]:
    """Returns those after the question mark, by the names that redis-py has for them."""
    known = ("db", "ssl_ca_certs") if parts.scheme == "rediss" else ("db",)
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in found:
        if name not in known:
            raise ConfigError(f"{field} has an unknown option; {nearest(name, known)}", field=field)
    return found
