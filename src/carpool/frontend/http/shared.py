"""Holds what the connections of one server share: buffers, accounts and turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, time
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from carpool.frontend.clients.accounts import CONNECTION, Accounts, Holder, Shares, Stake
from carpool.frontend.clients.fair_threads import FairThreads
from carpool.frontend.clients.loop_turns import Clock, Turns
from carpool.frontend.http.exchange import App, Fault, date_line
from carpool.frontend.http.fairness import Unread
from carpool.frontend.http.limits import KIB, Limits
from carpool.frontend.http.parsing import KnownHeads
from carpool.memory.free_memory import FreeMemory

if TYPE_CHECKING:
    from carpool.frontend.http.long_answer import LongAnswers

_INFLATERS: Final = 2
_CONNECTION_S: Final = 0.0001  # to take it, and to let it go
BODY_READ: Final = 256 * KIB
"""Of one body at a time: some tenths of a millisecond. Then others have their turn."""


class OpenConnection(Holder, Protocol):
    """Defines a connection as far as the others of its server are concerned."""

    stake: Stake | None

    def seconds_for_body(self, now: float) -> float:
        """Returns how long the body that it is receiving still takes at its pace."""

    def cut_off_body(self) -> None: ...

    def check_time(self, now: float) -> None: ...

    def retire(self) -> None:
        """Ends it when what it has begun is answered."""

    def abort(self) -> None: ...


Charge: TypeAlias = Callable[[str, float], None]
"""Is called with an address, and the seconds of the loop that its connections took beside their requests."""


def _nobody_counts(_address: str, _seconds: float) -> None:
    """Does nothing, where no request is rejected for the load of other clients."""


class Shared:
    """One read buffer serves all connections: the loop fills it and hands it over with nothing in between."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        loop: asyncio.AbstractEventLoop,
        unread: Unread,
        charge: Charge | None = None,
        accounts: Accounts | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.app = app
        self.charge = charge or _nobody_counts
        self.limits = limits
        self.loop = loop
        self.head_buffer = bytearray(16 * KIB)
        self.body_buffer = bytearray(BODY_READ)
        self.heads = KnownHeads(limits)
        if accounts is None:  # one without clients yet is empty, and is shared all the same
            accounts = Accounts(limits.max_connections, most_bytes=limits.max_held_bytes)
        self.accounts = accounts
        self.accounts.patience_s = limits.write_timeout_s
        self.unread = unread
        self.turns = Turns(loop, clock)
        self._long_answers: LongAnswers | None = None
        self.connections: set[OpenConnection] = set()
        self.lingering = 0
        self.stopping = False
        self.emptied = asyncio.Event()
        self.emptied.set()
        self.date = date_line(time())
        self.answered_here: Counter[str] = Counter()
        """Answers that no app has seen, by reason: bad requests, timeouts, rejected connections."""
        self.inflating = Shares(limits.max_inflating)
        """Bodies that are being decompressed, or wait for that, by client."""
        self._inflaters: ThreadPoolExecutor | None = None
        self._free_memory = FreeMemory(self.inflaters, decodes=True)
        self.fair_inflaters = FairThreads(self.accounts, self.inflaters, _INFLATERS)

    @property
    def long_answers(self) -> LongAnswers:
        """Returns those that are being written in pieces."""
        if self._long_answers is None:
            from carpool.frontend.http.long_answer import LongAnswers

            wait = self.turns.wait
            self._long_answers = LongAnswers(self.loop, self.accounts, wait, lambda: self.inflaters)
        return self._long_answers

    @property
    def inflaters(self) -> ThreadPoolExecutor:
        """Returns threads for bodies that are long when decompressed; few, so that bombs leave cores to the
        rest."""
        if self._inflaters is None:
            self._inflaters = ThreadPoolExecutor(_INFLATERS, thread_name_prefix="inflate")
        return self._inflaters

    def enter(self, connection: OpenConnection, peer: str) -> Fault | None:
        """Counts a connection in; returns why it is rejected, if it is."""
        self.charge(peer, _CONNECTION_S)
        self.connections.add(connection)
        self.emptied.clear()
        if self.stopping:
            return Fault(503, "the server is stopping", "stopping")
        connection.stake = self.accounts.open(peer, CONNECTION, connection, monotonic())
        return None if connection.stake else Fault(503, "too many connections", "too-many-connections")

    def leave(self, connection: OpenConnection) -> None:
        self.connections.discard(connection)
        self.accounts.close(connection.stake)
        if not self.connections:
            self.emptied.set()

    def cut_off_slowest(self, besides: OpenConnection) -> bool:
        """Cuts off the slowest of the bodies that come into memory of the app, if it would take long; False
        if none would."""
        now = monotonic()
        others = [connection for connection in self.connections if connection is not besides]
        slowest = max(others, key=lambda connection: connection.seconds_for_body(now), default=None)
        if slowest is None or slowest.seconds_for_body(now) < self.limits.slow_body_s:
            return False
        slowest.cut_off_body()
        return True

    def close(self) -> None:
        if self._inflaters is not None:
            self._inflaters.shutdown(wait=False, cancel_futures=True)
            self._inflaters = None
        self._free_memory.close()

    def sweep(self) -> None:
        self._free_memory.freed(self.accounts.freed())
        self.date = date_line(time())
        now = monotonic()
        self.accounts.sweep(now)
        for connection in list(self.connections):
            connection.check_time(now)
        if self._long_answers is not None:
            self._long_answers.sweep(now)
