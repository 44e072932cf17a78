"""What the connections of one server share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from carpool.frontend.http.body import Ledger
from carpool.frontend.http.exchange import App
from carpool.frontend.http.known_heads import KnownHeads
from carpool.frontend.http.limits import KIB, Limits
from carpool.frontend.http.responses import Fault, date_line
from carpool.frontend.http.turns import Turns
from carpool.frontend.http.unread import Unread

if TYPE_CHECKING:
    from carpool.frontend.http.answering import Outgoing
    from carpool.frontend.http.connection import Connection

BODY_READ = 256 * KIB
"""Of one body at a time: some tenths of a millisecond. Then others have their turn."""


class Shared:
    """One read buffer serves all connections: the loop fills it and hands it over with nothing in between."""

    def __init__(self, app: App, limits: Limits, loop: asyncio.AbstractEventLoop, unread: Unread) -> None:
        self.app = app
        self.limits = limits
        self.loop = loop
        self.head_buffer = bytearray(16 * KIB)
        self.body_buffer = bytearray(BODY_READ)
        self.heads = KnownHeads(limits)
        self.ledger = Ledger(limits.max_gathered_bytes)
        self.unread = unread
        self.turns = Turns(loop)
        self.connections: set[Connection] = set()
        self.stalled: set[Outgoing] = set()
        self.lingering = 0
        self.stopping = False
        self.emptied = asyncio.Event()
        self.emptied.set()
        self.date = date_line(time.time())
        self.answered_here: Counter[str] = Counter()
        """Answers that no app has seen, by reason: bad requests, timeouts, connections turned away."""
        self.inflating = 0  # bodies that are being decompressed, or wait for that
        self._inflaters: ThreadPoolExecutor | None = None

    @property
    def inflaters(self) -> ThreadPoolExecutor:
        """Threads for bodies that are long when decompressed; few, so that bombs leave cores to the rest."""
        if self._inflaters is None:
            self._inflaters = ThreadPoolExecutor(2, thread_name_prefix="inflate")
        return self._inflaters

    def enter(self, connection: Connection) -> Fault | None:
        """Count it in; returns why it is to be turned away, if it is."""
        self.connections.add(connection)
        self.emptied.clear()
        if self.stopping:
            return Fault(503, "the server is stopping", "stopping")
        if len(self.connections) - self.lingering > self.limits.max_connections:
            return Fault(503, "too many connections", "too-many-connections")
        return None

    def leave(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.stalled.discard(connection)
        if not self.connections:
            self.emptied.set()

    def cut_off_slowest(self, besides: Outgoing) -> bool:
        """Of the bodies that come into memory of the app, if it would take long; False if none would."""
        now = time.monotonic()
        others = [connection for connection in self.connections if connection is not besides]
        slowest = max(others, key=lambda connection: connection.seconds_for_body(now), default=None)
        if slowest is None or slowest.seconds_for_body(now) < self.limits.slow_body_s:
            return False
        slowest.cut_off_body()
        return True

    def may_linger(self) -> bool:
        return self.lingering < self.limits.max_lingering

    def close(self) -> None:
        if self._inflaters is not None:
            self._inflaters.shutdown(wait=False, cancel_futures=True)
            self._inflaters = None

    def sweep(self) -> None:
        """Look once at every connection's clock."""
        self.date = date_line(time.time())
        now = time.monotonic()
        for connection in list(self.connections):
            connection.check_time(now)
