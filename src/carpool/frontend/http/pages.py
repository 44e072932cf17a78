"""Pages and files: those known by name from the start, and pages that many ask for at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from time import monotonic
from typing import NamedTuple, TypeAlias

from carpool.console import page_files
from carpool.frontend.http.exchange import Exchange
from carpool.observe.logs import logger

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
log = logger("http")

Tell: TypeAlias = Callable[[bytes | None], None]

_SLICE_S = 0.0005
_EVERY_S = 0.1
_BURST_S = 0.5  # of intervals that nobody used: a person who asks a few times is not kept waiting
_MOST_OF_THE_LOOP = 0.05


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


class SharedPage:
    """What it says is never older than the question. Used in the loop's thread only.

    Whoever asks too often waits for the next page instead of getting an old one: programs that count before
    and after something they do would otherwise count wrongly.
    """

    def __init__(self, write: Callable[[], Iterator[bytes]]) -> None:
        self._write = write
        self._asking: list[Tell] = []
        self._under_way = False
        self._due = 0.0  # when the next page would be due at the steady pace

    def ask(self, tell: Tell) -> None:
        """`tell` is called in the loop: with the page, or with nothing if it could not be written."""
        self._asking.append(tell)
        if not self._under_way:
            self._begin_in_time()

    def _begin_in_time(self) -> None:
        self._under_way = True
        wait = self._due - _BURST_S - monotonic()
        if wait > 0.0:
            asyncio.get_running_loop().call_later(wait, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        asking, self._asking = self._asking, []
        self._go_on(self._write(), [], asking, 0.0)

    def _go_on(self, rest: Iterator[bytes], written: list[bytes], asking: list[Tell], spent: float) -> None:
        began = now = monotonic()
        page: bytes | None = None
        try:
            for piece in rest:
                written.append(piece)
                now = monotonic()
                if now - began >= _SLICE_S:
                    loop = asyncio.get_running_loop()
                    loop.call_soon(self._go_on, rest, written, asking, spent + now - began)
                    return
            page = b"".join(written)
        except Exception:
            log.exception("page-failed")
        spent += now - began
        self._due = max(self._due, now) + max(_EVERY_S, spent / _MOST_OF_THE_LOOP)
        self._under_way = False
        for tell in asking:
            tell(page)
        if self._asking and not self._under_way:
            self._begin_in_time()
