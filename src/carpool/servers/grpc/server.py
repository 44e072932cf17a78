"""The gRPC server: its limits, its ports, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence

import grpc

from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.observe.counters import Block
from carpool.servers.access.access import Access
from carpool.servers.access.tls import Pair, Tls
from carpool.servers.door import Door
from carpool.servers.grpc.handlers import Handlers
from carpool.servers.grpc.service import Service
from carpool.servers.pictures.workers import threads_for

_LARGEST_MESSAGE = 2**31 - 1  # what a message's length can be
_STREAMS_PER_CONNECTION = 1024
_AHEAD = 1 << 20  # a tensor comes in one piece, without a pause for permission: about a tenth less work
_KEEPALIVE_MS = 60_000  # a client that is gone is noticed within this and the next
_KEEPALIVE_TIMEOUT_MS = 20_000
_CLIENT_PINGS_MS = 10_000  # clients may ask as often whether we are there
_LAST_MOMENT_S = 0.25  # for answers that are written already


def options(settings: ServerSettings) -> list[tuple[str, int]]:
    largest = min(settings.max_body_bytes + settings.max_header_bytes, _LARGEST_MESSAGE)
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),  # answers are bounded where they are made
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.http2.lookahead_bytes", _AHEAD),
        ("grpc.http2.max_frame_size", _AHEAD),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _CLIENT_PINGS_MS),
    ]


class GrpcServer:
    """Serves from behind a door until it is stopped. To be used from its loop's thread."""

    def __init__(
        self, door: Door, block: Block, settings: ServerSettings, access: Access | None = None
    ) -> None:
        threads = threads_for(settings.grpc_frontends)
        self.service = Service(door, block, settings.max_body_bytes, threads)
        self._tls = None if access is None else access.tls
        self._server = grpc.aio.server(
            handlers=[Handlers(self.service, None if access is None else access.guard)],
            options=options(settings),
            maximum_concurrent_rpcs=settings.max_connections,
        )

    async def start(self, reserved: Sequence[socket.socket]) -> None:
        """Listen where these sockets are bound. They only held the port: gRPC makes its own."""
        for address in addresses(reserved):
            try:
                if self._tls is None:
                    self._server.add_insecure_port(address)
                else:
                    self._server.add_secure_port(address, credentials(self._tls))
            except RuntimeError as error:
                raise ConfigError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        for sock in reserved:
            sock.close()

    async def stop(self, within_s: float) -> int:
        """Refuse what is new, finish what has begun, cut off the rest; returns how many were cut off."""
        service = self.service
        service.stopping.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.idle.wait(), within_s)
        cut_off = service.running
        await self._server.stop(_LAST_MOMENT_S)
        service.close()
        return cut_off


def credentials(tls: Tls) -> grpc.ServerCredentials:
    """Asked for the pair in force at every handshake, in threads of the library."""
    pair = tls.pair

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal pair
        if tls.pair is pair:
            return None
        pair = tls.pair
        return _configuration(pair)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(pair), changed, require_client_authentication=bool(pair.client_ca)
    )


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.cert)], pair.client_ca or None)


def addresses(sockets: Iterable[socket.socket]) -> list[str]:
    """Of each, as gRPC writes it."""
    found = []
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        found.append(f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}")
    return found
