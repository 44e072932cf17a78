"""Sends spans to a collector from a thread of its own: OTLP over HTTP.

The caller that passes a request never waits: what does not fit the queue is dropped, and counted. A collector
that is dead, slow or talks nonsense costs spans and nothing else: a message is given up seconds after it was
first tried, with all that came meanwhile, and counted then; the next ones are tried once each, ever more
rarely.
"""

from __future__ import annotations

import gzip
import http.client
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from carpool.extensions.tracing.settings import OtelSettings
from carpool.observe.columns import by_word
from carpool.observe.counters import Row
from carpool.observe.logs import logger

Record = TypeVar("Record")

_AGAIN_S = (1.0, 4.0)  # after which a message is tried again, where the one before it was taken
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 5.0  # between messages to a collector that takes none
_PATIENCE_S = 6.0  # with a message that is tried again
_LAST_MOMENT_S = 0.25  # that a stopping server gives a collector which took what came before
_MOST_ANSWER = 64 << 10
_WORTH_TRYING_AGAIN = (429, 502, 503, 504)

_SPANS = by_word("tracing", "spans")
"""Of a front end. The loop's thread counts what is dropped, the one that exports the others."""

_log = logger("trace")


class _NotTaken(Exception):
    """The collector will not take this, however often it is asked."""


class SpanExporter(Generic[Record]):
    """`put` and `close` are for the loop's thread; `encode` makes a message of records in the exporter's."""

    def __init__(
        self,
        settings: OtelSettings,
        row: Row,
        encode: Callable[[Sequence[Record]], tuple[bytes, int]],
        spans_each: int,
    ) -> None:
        """`encode` also says how many spans they are; a record counts as `spans_each` before."""
        self._settings = settings
        self._row = row
        self._encode = encode
        self._spans_each = spans_each
        self._most_waiting = max(1, settings.most_waiting // spans_each)
        self._most_at_once = min(self._most_waiting, max(1, settings.most_at_once // spans_each))
        # The loop's thread adds at the right, the exporter's takes from the left: deques are made for that,
        # and its length may be out of date by what the other is doing, which does no harm.
        self._waiting: deque[Record] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._fails = False  # written by the exporter's thread alone
        self._pause = _FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._serve, name="spans", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        waiting = self._waiting
        if len(waiting) >= self._most_waiting:
            self._row.add(_SPANS["dropped"], self._spans_each)
            return
        waiting.append(record)
        if len(waiting) == self._most_at_once:
            self._wake.set()

    def close(self) -> None:
        """Send what is there if the collector is quick. The thread is a daemon: whatever it does then, the
        process ends."""
        self._closing.set()
        self._wake.set()
        if not self._fails:
            self._thread.join(_LAST_MOMENT_S)

    # ── in the exporter's thread ──

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._settings.delay_s)
            self._wake.clear()
            while waiting := min(len(self._waiting), self._most_at_once):
                self._export([self._waiting.popleft() for _ in range(waiting)])
                if self._fails and self._closing.is_set():
                    return

    def _export(self, records: Sequence[Record]) -> None:
        """Never raises: there are others to come."""
        why, spans, reached = "", len(records) * self._spans_each, True
        try:
            body, spans = self._encode(records)
            why = self._try_again(body)
            reached = not why
        except _NotTaken as error:
            why = str(error)
        except Exception as error:  # a fault of ours
            why = f"{type(error).__name__}: {error}"
        if why:
            self._failed(why)
        elif self._fails:
            self._fails = False
            _log.info("span-export-recovered")
        self._row.add(_SPANS["failed" if why else "exported"], spans)
        if reached:
            self._pause = _FIRST_PAUSE_S
        else:
            self._give_up_waiting()
            self._closing.wait(self._pause)
            self._pause = min(2.0 * self._pause, _LONGEST_PAUSE_S)

    def _give_up_waiting(self) -> None:
        """What came while a message was tried in vain is as lost as that one, and counted at once."""
        lost = len(self._waiting)
        for _ in range(lost):
            self._waiting.popleft()
        if lost:
            self._row.add(_SPANS["failed"], lost * self._spans_each)

    def _try_again(self, body: bytes) -> str:
        """Tries as often as it is worth it: what went wrong the last time."""
        patient, began = not self._fails, monotonic()
        why = self._try(body)
        for wait in _AGAIN_S if patient else ():
            if not why or monotonic() - began + wait > _PATIENCE_S or self._closing.wait(wait):
                break
            why = self._try(body)
        return why

    def _try(self, body: bytes) -> str:
        """Returns what went wrong, and may go well the next time. Raises `_NotTaken` for what will not."""
        try:
            status = self._send(body)
        except (OSError, http.client.HTTPException) as error:
            return self._failed(f"{type(error).__name__}: {error}")
        if status in _WORTH_TRYING_AGAIN:
            return self._failed(f"the collector answered {status}")
        if not 200 <= status < 300:
            raise _NotTaken(f"the collector answered {status}")
        return ""

    def _failed(self, why: str) -> str:
        """Logs an error at the first try, since the last is seconds later: a server that stops in between
        does not wait for that."""
        if not self._fails:
            self._fails = True
            _log.warning("spans-not-exported", error=why)
        return why

    def _send(self, body: bytes) -> int:
        settings = self._settings
        parts = urlsplit(settings.url)
        assert parts.hostname is not None
        headers = {"content-type": "application/x-protobuf", "user-agent": "carpool", **settings.headers}
        if settings.gzip:
            body = gzip.compress(body, 1)
            headers["content-encoding"] = "gzip"
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=settings.timeout_s, context=_tls(settings)
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=settings.timeout_s)
        try:
            connection.request("POST", parts.path, body, headers)
            response = connection.getresponse()
            response.read(_MOST_ANSWER)  # which spans it did not like is its own affair
            return response.status
        finally:
            connection.close()


def _tls(settings: OtelSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.certificate or None)
    if settings.client_certificate:
        context.load_cert_chain(settings.client_certificate, settings.client_key or None)
    return context
