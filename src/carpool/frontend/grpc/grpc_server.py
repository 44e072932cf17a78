"""Implements the gRPC server: listening sockets, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from time import monotonic

from carpool.config.server import ServerSettings
from carpool.config.usable_cores import threads_for
from carpool.frontend.access.access import Access
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.front_part import StartedWith
from carpool.frontend.clients.loop_turns import Clock
from carpool.frontend.grpc.grpc_handlers import Handlers
from carpool.frontend.grpc.grpc_service import GrpcService
from carpool.frontend.grpc.h2_connection import H2Connection
from carpool.frontend.grpc.h2_shared import H2Shared
from carpool.frontend.http.http_server import Listeners
from carpool.frontend.http.limits import Limits
from carpool.link.engine_client import EngineClient
from carpool.observe.counters import Block
from carpool.observe.descriptors import Descriptors

_LAST_MOMENT_S = 0.25  # for answers that are written already
_LIMITS = ("max_header_bytes", "max_connections", "header_timeout_s", "body_timeout_s")


class GrpcServer:
    """Serves in front of an engine until it is stopped. To be used from its loop's thread."""

    def __init__(
        self,
        engine: EngineClient,
        block: Block,
        settings: ServerSettings,
        access: Access | None = None,
        started: StartedWith | None = None,
        clock: Clock = monotonic,
    ) -> None:
        threads = threads_for(settings.grpc_frontends)
        hidden = () if access is None else access.guard.proofs
        forward = ForwardedHeaders.of(settings.grpc_header_forward_pattern, hidden)
        self.service = GrpcService(engine, block, settings, threads, forward, started)
        self._access = access
        self._limits = Limits(**{name: getattr(settings, name) for name in _LIMITS})
        self._descriptors = Descriptors()
        self._listeners: Listeners | None = None
        self._shared: H2Shared | None = None
        self._clock = clock  # of the turns that connections take
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Begin to accept; the sockets are the server's from now on."""
        loop = asyncio.get_running_loop()
        access, limits = self._access, self._limits
        handlers = Handlers(self.service, None if access is None else access.guard)
        shared = self._shared = H2Shared(self.service, handlers.find, limits, self._clock)
        self._timer = loop.call_later(limits.sweep_s, self._sweep)

        def accepted() -> H2Connection:
            self._descriptors.connected(len(shared.connections))
            return H2Connection(shared)

        tls = None if access is None else access.context
        self._listeners = Listeners(accepted, limits, tls)
        await self._listeners.open(sockets)

    async def help(self, other: int, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        if self._listeners is not None:
            await self._listeners.help(other, sockets["grpc"])

    async def stop(self, within_s: float) -> int:
        """Refuse what is new, finish what has begun, cut off the rest; returns how many were cut off."""
        service, shared = self.service, self._shared
        service.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.idle.wait(), within_s)
        cut_off = service.running
        if self._listeners is not None:
            self._listeners.close()
        if shared is not None:
            await self._part_with_clients(shared)
        if self._timer is not None:
            self._timer.cancel()
        service.close()
        return cut_off

    async def _part_with_clients(self, shared: H2Shared) -> None:
        shared.stopping = True
        for connection in list(shared.connections):
            connection.retire()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(shared.emptied.wait(), _LAST_MOMENT_S)
        for connection in list(shared.connections):
            connection.abort()
        await shared.emptied.wait()

    def _sweep(self) -> None:
        shared = self._shared
        assert shared is not None
        shared.sweep()
        self._timer = shared.loop.call_later(self._limits.sweep_s, self._sweep)
