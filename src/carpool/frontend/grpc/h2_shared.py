"""Holds what the connections of one gRPC server share: its handlers and its limits, buffers and turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

from carpool.errors import without_stack
from carpool.frontend.clients.accounts import CONNECTION, Holder, Stake
from carpool.frontend.clients.loop_turns import Clock, Turns
from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.grpc_service import GrpcService, log
from carpool.frontend.grpc.h2_frames import Breach, Code
from carpool.frontend.grpc.h2_outgoing import Outgoing
from carpool.frontend.grpc.rpc import WINDOW, Handler, Rpc
from carpool.frontend.grpc.rpc_heads import ENCODINGS, Status
from carpool.frontend.http.limits import KIB, MIB, Limits

MOST_CALLS: Final = 256
"""Of one connection, at once."""
CONNECTION_WINDOW = 64 * MIB
LARGEST_FRAME: Final = MIB
"""A tensor comes in one piece: about a tenth less work."""

_LONGEST_BLOCK: Final = 256 * KIB  # a head up to this is refused, and its connection goes on
_LOG_EVERY_S: Final = 1.0
_LET_GO_AT_ONCE: Final = 8  # calls


class OpenCalls(Holder, Protocol):
    """Defines a connection as far as the server that it belongs to is concerned."""

    stake: Stake | None
    outgoing: Outgoing[Rpc]

    def check_time(self, now: float) -> None: ...

    def retire(self) -> None:
        """Ends it when what it has begun is answered."""

    def abort(self) -> None: ...


class H2Shared:
    def __init__(
        self,
        service: GrpcService,
        find: Callable[[Rpc], Handler | None],
        limits: Limits,
        clock: Clock = monotonic,
    ) -> None:
        self.service = service
        self._find = find
        self.limits = limits
        self.loop = loop = asyncio.get_running_loop()
        self.turns = Turns(loop, clock)
        self.buffer = bytearray(256 * KIB)  # most messages in one read
        self.less = memoryview(self.buffer)[: 64 * KIB]  # each connection may keep so much that waits
        self.accounts = service.accounts
        self.connections: set[OpenCalls] = set()
        self._abandoned: deque[Rpc] = deque()
        self.stopping = False
        self.emptied = asyncio.Event()
        self.emptied.set()
        self.longest_block = max(2 * limits.max_header_bytes, _LONGEST_BLOCK)
        wanted = {
            h2.MAX_CONCURRENT_STREAMS: MOST_CALLS,
            h2.INITIAL_WINDOW_SIZE: WINDOW,
            h2.MAX_FRAME_SIZE: LARGEST_FRAME,
            h2.MAX_HEADER_LIST: limits.max_header_bytes,
        }
        self.greeting = h2.settings(wanted) + h2.window_update(0, CONNECTION_WINDOW - h2.DEFAULT_WINDOW)
        self._unlogged = 0
        self._log_at = 0.0

    def enter(self, connection: OpenCalls) -> Breach | None:
        """Counts a connection in; returns why it is rejected, if it is."""
        self.connections.add(connection)
        self.emptied.clear()
        if self.stopping:
            return Breach(Code.NO_ERROR, "the server is stopping")
        client = connection.outgoing.client
        connection.stake = self.accounts.open(client, CONNECTION, connection, monotonic())
        return None if connection.stake else Breach(Code.ENHANCE_YOUR_CALM, "too many connections")

    def leave(self, connection: OpenCalls) -> None:
        self.connections.discard(connection)
        self.accounts.close(connection.stake)
        connection.outgoing.disconnect()
        if not self.connections:
            self.emptied.set()

    def begin(self, rpc: Rpc) -> None:
        """The head of a call is here: find who answers it, or refuse it."""
        head = rpc.head
        if head.size > self.limits.max_header_bytes:
            most = self.limits.max_header_bytes
            rpc.end(
                Status.RESOURCE_EXHAUSTED, f"received metadata size exceeds limit ({head.size} vs. {most})"
            )
        elif head.timeout_fault:
            rpc.end(Status.INTERNAL, "grpc-timeout is not a time")
        elif head.encoding not in ENCODINGS:
            rpc.end(Status.UNIMPLEMENTED, f"messages may be {', '.join(ENCODINGS)}")
        else:
            try:
                handler = self._find(rpc)
            except Exception as error:
                log.exception("request-failed", call=head.path[:80])
                rpc.end(Status.INTERNAL, "the server failed on this request")
                without_stack(error)
                return
            if handler is not None:
                rpc.start(handler)
            elif not rpc.over:
                rpc.end(Status.UNIMPLEMENTED, "Method not found!")

    def abandon(self, rpcs: list[Rpc]) -> None:
        """Their connection is gone. Many calls are let go a few in a turn: to end a stream takes a while."""
        if self.stopping or len(rpcs) <= _LET_GO_AT_ONCE:
            for rpc in rpcs:
                rpc.leave()
            return
        if not self._abandoned:
            self.loop.call_soon(self._let_go)
        self._abandoned.extend(rpcs)

    def _let_go(self) -> None:
        for _ in range(min(_LET_GO_AT_ONCE, len(self._abandoned))):
            self._abandoned.popleft().leave()
        if self._abandoned:
            self.loop.call_soon(self._let_go)

    def log_breach(self, breach: Breach) -> None:
        """Logs breaches at intervals, so that a client that repeats them cannot fill the disk."""
        self._unlogged += 1
        now = monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            count, self._unlogged = self._unlogged, 0
            log.info("connection-ended", code=breach.code.name, why=str(breach), count=count)

    def sweep(self) -> None:
        now = monotonic()
        for connection in list(self.connections):
            connection.check_time(now)
        self.service.sweep(now)
