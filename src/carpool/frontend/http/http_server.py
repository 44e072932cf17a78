"""Opens listening sockets, and runs the server that lives on them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from errno import EADDRINUSE
from typing import Protocol, cast

from carpool.config.server import LOCALHOST
from carpool.errors import ConfigError
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.http.exchange import App
from carpool.frontend.http.fairness import Unread
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.protocol import Connection
from carpool.frontend.http.shared import Charge, Shared
from carpool.observe.descriptors import Descriptors

BACKLOG = 1024
_ATTEMPTS = 16


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns sockets bound to every address of `host`, all on one port, which other processes can share.

    Port 0 picks a free one. `::` takes IPv4 as well. Raises `ConfigError` when an address cannot be had.
    """
    for attempt in range(_ATTEMPTS):
        sockets: list[socket.socket] = []
        try:
            for family, address in _addresses(host, port):
                if port == 0 and sockets:
                    address = (address[0], sockets[0].getsockname()[1], *address[2:])
                sockets.append(_bound(family, address, shared=True))
            return sockets
        except OSError as error:
            for opened in sockets:
                opened.close()
            # The port is free on one address, and taken on the other: try another one.
            if port or not sockets or attempt == _ATTEMPTS - 1:
                raise _cannot_listen(host, port, error) from error
    raise AssertionError("the last attempt returns or raises")


def check_free(host: str, port: int) -> None:
    """Raise `ConfigError` if someone listens there: sharing the port would silently split the traffic."""
    try:
        for family, address in _addresses(host, port):
            _bound(family, address, shared=False).close()
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    taken = "; --http-port, --grpc-port and --metrics-port set others" if error.errno == EADDRINUSE else ""
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}{taken}")


def _addresses(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    if host == LOCALHOST:  # both, whatever the machine's own table says
        found_here: list[tuple[int, tuple[object, ...]]] = [(socket.AF_INET, ("127.0.0.1", port))]
        if _has_ipv6():
            found_here.append((socket.AF_INET6, ("::1", port, 0, 0)))
        return found_here
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _has_ipv6() -> bool:
    """Returns whether there is IPv6: containers often go without."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


def _bound(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        bound.setblocking(False)
        bound.bind(address)
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


class Accepted(Protocol):
    """Defines a connection that brings the buffer for what it is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, exc: Exception | None, /) -> None: ...
    def get_buffer(self, sizehint: int, /) -> bytearray | memoryview: ...
    def buffer_updated(self, nbytes: int) -> None: ...
    def eof_received(self) -> bool: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


_TOLD_BY_A_LOOP = [name for name in vars(Accepted) if not name.startswith("_")]


class KnownByClass(asyncio.BufferedProtocol):
    """Helps asyncio's own loop, which asks for a class, where uvloop looks for methods. Connections are of no
    class of asyncio's: such a base would keep them from being compiled."""

    def __init__(self, connection: Accepted) -> None:
        for name in _TOLD_BY_A_LOOP:
            setattr(self, name, getattr(connection, name))


async def accept(
    sockets: Sequence[socket.socket],
    accepted: Callable[[], Accepted],
    limits: Limits,
    tls: ssl.SSLContext | None,
) -> list[asyncio.Server]:
    """Begin to accept, for any protocol; the sockets are the servers' from now on."""
    loop = asyncio.get_running_loop()
    by_class = isinstance(loop, asyncio.BaseEventLoop)

    def protocol() -> asyncio.BaseProtocol:
        made = accepted()
        return KnownByClass(made) if by_class else cast(asyncio.BaseProtocol, made)

    return [
        await loop.create_server(
            protocol,
            sock=listening,
            backlog=BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else limits.header_timeout_s,
            ssl_shutdown_timeout=None if tls is None else limits.linger_timeout_s,
        )
        for listening in sockets
    ]


class Listeners:
    """Accepts on a server's own sockets, and on those of other front ends while they stand still."""

    def __init__(
        self, accepted: Callable[[], Accepted], limits: Limits, tls: ssl.SSLContext | None = None
    ) -> None:
        self._accepted = accepted
        self._limits = limits
        self._tls = tls
        self._own: list[asyncio.Server] = []
        self._of_others: dict[int, list[asyncio.Server]] = {}

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        self._own = await accept(sockets, self._accepted, self._limits, self._tls)

    async def help(self, other: int, sockets: Sequence[socket.socket]) -> None:
        """Accepts for another front end, too. Without sockets, not any more."""
        for listener in self._of_others.pop(other, ()):
            listener.close()
        self._of_others[other] = await accept(sockets, self._accepted, self._limits, self._tls)

    def close(self) -> None:
        for listener in (*self._own, *(one for some in self._of_others.values() for one in some)):
            listener.close()
        self._own, self._of_others = [], {}


class HttpServer:
    """Serves one app on some sockets until it is stopped. To be used from its loop's thread."""

    def __init__(
        self,
        app: App,
        limits: Limits | None = None,
        unread: Unread | None = None,
        charge: Charge | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        """`unread` collects how long requests wait to be read, for other components; `charge`, what
        connections take. `accounts` are those of its clients, where others charge them, too."""
        self._accounts = accounts
        self._app = app
        self._charge = charge
        self._unread = unread or Unread()
        self._limits = limits or Limits()
        self._descriptors = Descriptors()
        self._listeners: Listeners
        self._shared: Shared
        self._timer: asyncio.TimerHandle

    async def start(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        """Begin to accept; the sockets are the server's from now on."""
        loop = asyncio.get_running_loop()
        shared = self._shared = Shared(
            self._app, self._limits, loop, self._unread, self._charge, self._accounts
        )
        self._timer = loop.call_later(self._limits.sweep_s, self._sweep)

        def accepted() -> Connection:
            self._descriptors.connected(len(shared.connections))
            return Connection(shared)

        self._listeners = Listeners(accepted, self._limits, tls)
        await self._listeners.open(sockets)

    async def help(self, other: int, sockets: Sequence[socket.socket]) -> None:
        await self._listeners.help(other, sockets)

    @property
    def connections(self) -> int:
        """Open ones, with those that only linger."""
        return len(self._shared.connections)

    @property
    def answered_here(self) -> dict[str, int]:
        """Answers that the app has not seen, by reason: bad requests, timeouts, rejected connections."""
        return dict(self._shared.answered_here)

    def stop_accepting(self) -> None:
        """Refuse new connections, close idle ones, and let the others finish what they have begun."""
        self._listeners.close()
        self._shared.stopping = True
        for connection in list(self._shared.connections):
            connection.retire()

    async def stop(self, within_s: float) -> int:
        """Stop accepting, wait for what is in flight, cut off the rest; returns how many were cut off."""
        self.stop_accepting()
        shared = self._shared
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(shared.emptied.wait(), within_s)
        left = list(shared.connections)
        for connection in left:
            connection.abort()
        await shared.emptied.wait()
        self._timer.cancel()
        shared.close()
        return len(left)

    def _sweep(self) -> None:
        self._shared.sweep()
        self._timer = self._shared.loop.call_later(self._limits.sweep_s, self._sweep)
