"""The gRPC server: its limits, its ports, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.frontend.access.access import Access, Pair, Tls
from carpool.frontend.front_caches import CacheParts
from carpool.frontend.grpc.grpc_handlers import Handlers
from carpool.frontend.grpc.grpc_service import Service, log
from carpool.frontend.http.infer_route import LargestBody
from carpool.frontend.pictures.workers import threads_for
from carpool.link.door import Catalog, Door
from carpool.observe.counters import Block

_SHORT_MESSAGE = 4 << 20  # gRPC's own default
_LONGEST_MESSAGE = 2**31 - 1  # what a message's length can be
_STREAMS_PER_CONNECTION = 256  # what a connection can open and reset before it is closed grows with it
_AHEAD = 1 << 20  # a tensor comes in one piece, without a pause for permission: about a tenth less work
_KEEPALIVE_MS = 60_000  # a client that is gone is noticed within this and the next
_KEEPALIVE_TIMEOUT_MS = 20_000
_CLIENT_PINGS_MS = 10_000  # clients may ask as often whether we are there
_LAST_MOMENT_S = 0.25  # for answers that are written already
_AGE_S = 30.0  # of a connection, where another server may take its place; the library makes it a tenth more
_LOOK_S = 1.0  # between two looks at who is still connected to a server that takes nobody new


def options(settings: ServerSettings, largest: int) -> list[tuple[str, int]]:
    return [
        *([("grpc.max_connection_age_ms", int(_AGE_S * 1e3))] if is_polling(settings) else []),
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", -1),  # answers are bounded where they are made
        ("grpc.max_metadata_size", settings.max_header_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.http2.lookahead_bytes", _AHEAD),
        ("grpc.http2.max_frame_size", _AHEAD),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _CLIENT_PINGS_MS),
    ]


def is_polling(settings: ServerSettings) -> bool:
    """Whether larger models may come while clients are served."""
    return settings.model_control_mode == "poll"


def largest_message(catalog: Catalog, settings: ServerSettings) -> int:
    """How long a message may be: no more than the models that are loaded can take.

    gRPC learns it when a server is made, and refuses longer ones at their first bytes. A power of two, so
    that another model seldom needs another server, or the limit of all bodies.
    """
    limit = min(settings.max_body_bytes + settings.max_header_bytes, _LONGEST_MESSAGE)
    if settings.model_control_mode == "explicit":
        return limit  # models come with a request, too
    entries = (*catalog.entries.values(), *catalog.leaving)
    needed = max((LargestBody(entry, settings.max_body_bytes).gathered() for entry in entries), default=0)
    if needed >= settings.max_body_bytes:
        return limit
    return min(limit, 1 << (max(needed, _SHORT_MESSAGE) - 1).bit_length())


class GrpcServer:
    """Serves from behind a door until it is stopped. To be used from its loop's thread.

    A model that takes longer messages than those before it needs another server of the library. To stop the
    first would cancel what its clients send before they hear of it. So it only takes no new connections, and
    those that it has are asked to go one by one, as their age ends: this the library does without losing a
    call. Until then a client that was here before can send the new model no longer messages than it could.
    It is stopped when nobody is connected who was then: no clock says when the last of them has heard of it.
    Before all models are there, where nothing comes later, the first is stopped at once.
    """

    def __init__(
        self,
        door: Door,
        block: Block,
        settings: ServerSettings,
        access: Access | None = None,
        cache: CacheParts | None = None,
    ) -> None:
        threads = threads_for(settings.grpc_frontends)
        self.service = Service(door, block, settings.max_body_bytes, threads, cache)
        self._access = access
        self._door = door
        self._settings = settings
        self._addresses: Sequence[str] = ()
        self._largest = 0
        self._servers: list[Any] = []  # the last one is in service
        self._renewing: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self, reserved: Sequence[socket.socket]) -> None:
        """Listen where these sockets are bound. They only held the port: gRPC makes its own."""
        self._addresses = addresses(reserved)
        await self._listen()
        for sock in reserved:
            sock.close()
        self._door.watch(self._look)

    async def _listen(self) -> None:
        largest = largest_message(self._door.catalog, self._settings)
        server = grpc.aio.server(
            handlers=[Handlers(self.service, None if self._access is None else self._access.guard)],
            options=options(self._settings, largest),
            maximum_concurrent_rpcs=self._settings.max_connections,
        )
        for address in self._addresses:
            try:
                if self._access is None or self._access.tls is None:
                    server.add_insecure_port(address)
                else:
                    server.add_secure_port(address, credentials(self._access.tls))
            except RuntimeError as error:
                raise ConfigError(f"cannot listen on {address}: {error}") from error
        await server.start()
        self._largest = largest
        self._servers.append(server)

    def _look(self, catalog: Catalog) -> None:
        """Another catalogue: its models may take more. What they take less than before stays allowed."""
        if largest_message(catalog, self._settings) > self._largest and self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        try:
            while largest_message(self._door.catalog, self._settings) > self._largest:
                before = listening(self._addresses)
                await self._listen()
                self._retire(self._servers[-2], before)
        except ConfigError as error:
            log.error("messages-stay-limited", bytes=self._largest, error=error.message)
        finally:
            self._renewing = None

    def _retire(self, server: Any, sockets: Iterable[socket.socket]) -> None:
        """It takes no new connections; its calls have time to end."""
        polling = is_polling(self._settings)
        for sock in sockets:
            with sock:
                if polling:
                    sock.shutdown(socket.SHUT_RDWR)
        task = asyncio.get_running_loop().create_task(self._stop_later(server, polling))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _stop_later(self, server: Any, polling: bool) -> None:
        if polling:
            await asyncio.sleep(_LOOK_S)  # whom it was just about to take is connected by now
            left = await asyncio.to_thread(connections, self._addresses)
            while left:  # some may be its successor's: these age as well
                await asyncio.sleep(_LOOK_S)
                left = await asyncio.to_thread(still_open, left)
        await server.stop(self._settings.drain_s)
        self._servers.remove(server)

    async def stop(self, within_s: float) -> int:
        """Refuse what is new, finish what has begun, cut off the rest; returns how many were cut off."""
        service = self.service
        service.stopping.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.idle.wait(), within_s)
        cut_off = service.running
        if self._renewing is not None:
            self._renewing.cancel()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*(server.stop(_LAST_MOMENT_S) for server in self._servers))
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


def listening(where: Sequence[str]) -> list[socket.socket]:
    """The sockets of this process that listen there, which the library does not show: each once more.

    Told by their ports: the library listens at an address of IPv4 with a socket of IPv6.
    """
    found = []
    ports = ports_of(where)
    for _, sock in own_sockets():
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and sock.getsockname()[1] in ports:
            found.append(sock)
        else:
            sock.close()
    return found


Connections = Mapping[int, int]
"""Descriptors of this process, each with the number of its socket: a descriptor soon is another's."""


def connections(where: Sequence[str]) -> Connections:
    """All that somebody made to these ports."""
    found = {}
    ports = ports_of(where)
    for descriptor, sock in own_sockets():
        with sock, contextlib.suppress(OSError):  # it listens or did, or its other end is gone
            sock.getpeername()
            if sock.getsockname()[1] in ports:
                found[descriptor] = os.fstat(sock.fileno()).st_ino
    return found


def still_open(known: Connections) -> Connections:
    left = {}
    for descriptor, number in known.items():
        with contextlib.suppress(OSError):  # closed
            if os.fstat(descriptor).st_ino == number:
                left[descriptor] = number
    return left


def ports_of(where: Iterable[str]) -> set[int]:
    return {int(address.rpartition(":")[2]) for address in where}


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Of this process, over IP: each once more, to be closed, with the descriptor that its owner has."""
    made = set()  # they may take a number that was listed: that of the list itself
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        try:
            if descriptor in made or not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # gone by now
            continue
        made.add(sock.fileno())
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            yield descriptor, sock
        else:
            sock.close()


def addresses(sockets: Iterable[socket.socket]) -> list[str]:
    """Of each, as gRPC writes it."""
    found = []
    for sock in sockets:
        host, port = sock.getsockname()[:2]
        found.append(f"[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{host}:{port}")
    return found
