"""Files that a browser may ask for, known by name from the start: no path ever reaches the file system."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

from carpool.console import page_files
from carpool.frontend.http.exchange import Exchange

SAMPLE = "sample.jpg"

_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "jpg": b"image/jpeg",
}
_POLICY = (
    b"default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_SAFETY = (
    b"content-security-policy: %b\r\n"
    b"x-content-type-options: nosniff\r\n"
    b"referrer-policy: no-referrer\r\n"
    b"cross-origin-opener-policy: same-origin\r\n" % _POLICY
)


class Asset(NamedTuple):
    fields: bytes
    body: bytes
    tag: bytes


@cache
def site() -> Mapping[str, Asset]:
    """The console's files, and the sample picture where the demo brings one."""
    files = page_files()
    sample = resources.files("carpool.demo") / "pictures" / "astronaut.jpg"
    if sample.is_file():
        files[SAMPLE] = sample.read_bytes()
    return {name: _asset(name, body) for name, body in files.items() if _type_of(name)}


def answer_asset(exchange: Exchange, asset: Asset, more_fields: bytes = b"") -> None:
    """Always asked for again and rarely sent again: a new version of the server is seen at once."""
    known = exchange.head.headers.get(b"if-none-match", b"")
    status = 304 if asset.tag in _tags(known) else 200
    exchange.respond(status, asset.fields + more_fields, asset.body)


def _asset(name: str, body: bytes) -> Asset:
    tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:20].encode()
    fields = b"content-type: %b\r\netag: %b\r\ncache-control: no-cache\r\n" % (_type_of(name), tag)
    return Asset(fields + _SAFETY, body, tag)


def _type_of(name: str) -> bytes:
    return _TYPES.get(name.rpartition(".")[2], b"")


def _tags(field: bytes) -> set[bytes]:
    return {tag.strip(b" \t").removeprefix(b"W/") for tag in field.split(b",")}
