"""Holds what all handlers of the HTTP front end share, besides what every front end has; and pages: files
known by name from the start, and those that many ask for at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import orjson

from carpool.console import page_files
from carpool.errors import CarpoolError
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.front_part import FrontPart, StartedWith
from carpool.frontend.documents import LivePage, ProfileWatch
from carpool.frontend.front_service import FrontService
from carpool.frontend.http.exchange import (
    JSON_FIELDS,
    BodyPlan,
    Exchange,
    HttpHead,
    Start,
    answer_error,
    compress,
)
from carpool.frontend.http.fairness import Fairness
from carpool.link.catalog import Catalog
from carpool.link.engine_client import EngineClient
from carpool.observe.columns import BYTES_SENT
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.frontend.http.picture_fetch import PictureFetcher

log = logger("http")

Variables: TypeAlias = Mapping[str, str]
Handler: TypeAlias = "Callable[[HttpService, Exchange, Variables], BodyPlan]"
Starter: TypeAlias = "Callable[[HttpService, HttpHead, Variables], Start]"
"""Works out once, for all requests whose heads differ at most in length, what each of them starts with."""

WORTH_COMPRESSING = 1024
"""Bytes; less fits into one packet anyway."""

_COMPRESSED_AT_ONCE = 16 * 1024
_LEVEL = 1  # three times as fast as the usual 6, and little worse on tensors

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
Tell: TypeAlias = Callable[[bytes | None], None]

_SLICE_S = 0.0005
_EVERY_S = 0.1
_BURST_S = 0.5  # of unused intervals: a person who asks a few times is not kept waiting
_MOST_OF_THE_LOOP = 0.05


class Asset(NamedTuple):
    fields: bytes
    body: bytes
    tag: bytes


@cache
def site() -> Mapping[str, Asset]:
    """Returns the console's files, and the sample picture where the demo brings one."""
    files = page_files()
    sample = resources.files("carpool.demo") / "pictures" / "astronaut.jpg"
    if sample.is_file():
        files[SAMPLE] = sample.read_bytes()
    return {name: _asset(name, body) for name, body in files.items() if _type_of(name)}


def answer_asset(exchange: Exchange, asset: Asset, more_fields: bytes = b"") -> None:
    """Always asked for again and rarely sent again: a new version of the server is seen at once."""
    known = exchange.head.headers.get(b"if-none-match", b"")
    tags = {tag.strip(b" \t").removeprefix(b"W/") for tag in known.split(b",")}
    status = 304 if asset.tag in tags else 200
    exchange.respond(status, asset.fields + more_fields, asset.body)


def _asset(name: str, body: bytes) -> Asset:
    tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:20].encode()
    fields = b"content-type: %b\r\netag: %b\r\ncache-control: no-cache\r\n" % (_type_of(name), tag)
    return Asset(fields + _SAFETY, body, tag)


def _type_of(name: str) -> bytes:
    return _TYPES.get(name.rpartition(".")[2], b"")


class SharedPage:
    """What it says is never older than the question. Used in the loop's thread only.

    A client that asks too often waits for the next page and never gets an old one: programs that count before
    and after something they do would otherwise count wrongly.
    """

    def __init__(
        self, write: Callable[[], Iterator[bytes]], openmetrics: Callable[[], Iterator[bytes]] | None = None
    ) -> None:
        """`openmetrics` writes the same page for those who ask for that form."""
        self.openmetrics = None if openmetrics is None else SharedPage(openmetrics)
        self._write = write
        self._asking: list[Tell] = []
        self._under_way = False
        self._due = 0.0  # when the next page would be due at the steady pace

    def ask(self, tell: Tell) -> None:
        """Calls back in the loop: with the page, or with None if it could not be written."""
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
        began = monotonic()
        worked = thread_time()  # who was kept from running by others has not taken the loop's time
        page: bytes | None = None
        try:
            for piece in rest:
                written.append(piece)
                if monotonic() - began >= _SLICE_S:
                    loop = asyncio.get_running_loop()
                    loop.call_soon(self._go_on, rest, written, asking, spent + thread_time() - worked)
                    return
            page = b"".join(written)
        except Exception:
            log.exception("page-failed")
        spent += thread_time() - worked
        self._due = max(self._due, monotonic()) + max(_EVERY_S, spent / _MOST_OF_THE_LOOP)
        self._under_way = False
        for tell in asking:
            tell(page)
        if self._asking and not self._under_way:
            self._begin_in_time()


class HttpService(FrontService):
    def __init__(
        self,
        engine: EngineClient,
        block: Block,
        metrics: SharedPage,
        table: Table,
        max_body_bytes: int,
        picture_threads: int,
        fair: Fairness,
        picture_hosts: Collection[str] = (),
        forward: ForwardedHeaders | None = None,
        parts: Sequence[FrontPart] = (),
        started: StartedWith | None = None,
    ) -> None:
        super().__init__("http", engine, block, max_body_bytes, picture_threads, forward, parts, started)
        self.table = table
        self.metrics = metrics
        self.fair = fair
        self.described: tuple[Catalog | None, bytes] = None, b""  # /openapi.json, of the catalogue asked last
        self.live = LivePage(table, self.parts.shown)
        self.profiles = ProfileWatch(engine)
        self.asks_for_keys = False
        self.check_site: Callable[[Mapping[bytes, bytes], str], None] = _any_site
        self._picture_hosts = picture_hosts
        self._fetcher: PictureFetcher | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        return self.engine.serving and self.engine.catalog.ready and self.engine.catalog.able

    @property
    def fetcher(self) -> PictureFetcher:
        """Returns what fetches images by their addresses, which most servers never do."""
        if self._fetcher is None:
            from carpool.frontend.http.picture_fetch import PictureFetcher

            self._fetcher = PictureFetcher(self._picture_hosts, self.max_body_bytes)
        return self._fetcher

    def answer_later(self, exchange: Exchange, document: Coroutine[Any, Any, object]) -> None:
        """Answer with the document once it is there."""
        self.later(_answer(exchange, document))

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
        return task

    def answer_compressed(self, exchange: Exchange, fields: bytes, body: bytes, encoding: bytes) -> None:
        """Answer 200 with `body` in the given encoding, or as it is when that is shorter: long ones by way of
        a thread."""

        def answer(smaller: bytes) -> None:
            shorter = len(smaller) < len(body)
            more = b"Content-Encoding: %b\r\n" % encoding if shorter else b""
            sent = smaller if shorter else body
            self.server_row.add(BYTES_SENT, len(sent))
            exchange.respond(200, fields + more, sent)

        if len(body) <= _COMPRESSED_AT_ONCE:
            answer(compress(body, encoding, _LEVEL))
            return
        exchange.on_disconnect = None  # the model's work is done: there is nothing left to save
        work = self.fair_threads.begin(exchange.payer, lambda _: compress(body, encoding, _LEVEL)).done

        def answer_then(done: asyncio.Future[bytes]) -> None:
            if not done.cancelled():  # without memory for that it is sent as it is
                answer(body if done.exception() else done.result())

        work.add_done_callback(answer_then)

    def close(self) -> None:
        super().close()
        self.fair.close()
        if self._fetcher is not None:
            self._fetcher.close()
        self.profiles.close()
        for task in self._tasks:
            task.cancel()


def _any_site(_headers: Mapping[bytes, bytes], _what: str) -> None:
    """Does nothing, where there is no guard."""


def answer_document(exchange: Exchange, document: object, status: int = 200) -> None:
    exchange.respond(status, JSON_FIELDS, orjson.dumps(document))


async def _answer(exchange: Exchange, document: Coroutine[Any, Any, object]) -> None:
    try:
        answer_document(exchange, await document)
    except CarpoolError as error:
        answer_error(exchange, error)
    except Exception:
        log.exception("request-failed", path=exchange.head.path)
        answer_error(exchange, CarpoolError("the server failed on this request"))
