"""Starts what runs in each front end: its protocol's server in front of an engine. Nothing of the
engine is loaded here."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import carpool
from carpool.config.control_groups import within_limit
from carpool.config.server import ServerSettings
from carpool.config.usable_cores import threads_for
from carpool.frontend.access.access import Access, all_loopback
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.front_part import StartedWith
from carpool.frontend.clients.accounts import MOST_BYTES, Accounts
from carpool.frontend.http.app import MetricsApp
from carpool.frontend.http.fairness import Fairness, Unread
from carpool.frontend.http.http_server import HttpServer
from carpool.frontend.http.http_service import SharedPage
from carpool.frontend.http.limits import Limits
from carpool.link.advice import Advice
from carpool.observe.columns import CONNECTIONS
from carpool.observe.counters import Row
from carpool.observe.host_reading import Host
from carpool.process.children import Frontend, FrontendParts

if TYPE_CHECKING:
    from carpool.frontend.http.app import HttpApp
    from carpool.observe.prometheus import Exposition

_COUNT_EVERY_S = 1.0
_LIMITS = (
    *("max_header_bytes", "max_body_bytes", "max_connections"),
    *("header_timeout_s", "body_timeout_s", "idle_timeout_s"),
)


class HttpFrontend:
    """Runs the protocol's port and the metrics' port, stopped together."""

    def __init__(self, app: HttpApp, servers: Mapping[str, HttpServer], row: Row, access: Access) -> None:
        self._app = app
        self._access = access
        access.watch()
        self._servers = servers
        self._row = row
        self._counting: asyncio.Handle = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self._row.set(CONNECTIONS, sum(server.connections for server in self._servers.values()))
        self._counting = asyncio.get_running_loop().call_later(_COUNT_EVERY_S, self._count)

    async def help(self, other: int, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        for name, server in self._servers.items():
            await server.help(other, sockets[name])

    async def stop(self, within_s: float) -> int:
        self._counting.cancel()
        self._access.close()
        cut_off = await asyncio.gather(*(server.stop(within_s) for server in self._servers.values()))
        self._app.close()
        return sum(cut_off)


def http_limits(settings: ServerSettings) -> Limits:
    given = {name: getattr(settings, name) for name in _LIMITS}
    return Limits(**given, max_held_bytes=within_limit(MOST_BYTES) // settings.front_ends)


def started(parts: FrontendParts) -> StartedWith:
    return StartedWith(parts.settings, parts.table.block_exemplars(parts.block), parts.began)


def _metrics_page(parts: FrontendParts) -> SharedPage:
    """Returns the page, whose writer is made for the first scrape."""
    host = Host()  # what it reports of processors is since now

    @cache
    def exposition() -> Exposition:
        from carpool.observe.prometheus import Exposition, chosen

        catalog = parts.engine_client
        return Exposition(
            parts.table,
            version=carpool.__version__,
            host=host,
            families=chosen(parts.settings.metrics),
            states=lambda extension, what: catalog.catalog.extra.get(extension, {}).get(what, {}),
            index=lambda: ((line.name, line.version, line.word) for line in catalog.catalog.index),
        )

    return SharedPage(lambda: exposition().pieces(), lambda: exposition().pieces(openmetrics=True))


async def http(parts: FrontendParts) -> Frontend:
    from carpool.frontend.http.app import HttpApp  # those for gRPC run this file too

    settings = parts.settings
    advice = Advice(parts.gates.read, parts.engine_client.ask)
    parts.engine_client.advise(advice)
    unread, gate_status = Unread(), int(settings.gate_status)
    # Where the loop is the engine's too, how long requests lie unread says little.
    fair = Fairness(unread, advice.behind, gate_status) if parts.apart else Fairness(gate_status=gate_status)
    page = _metrics_page(parts)
    block = parts.table.block(parts.block)
    access = Access(settings, loopback=all_loopback(parts.sockets["http"]))
    app = HttpApp(
        parts.engine_client,
        block,
        page,
        table=parts.table,
        max_body_bytes=settings.max_body_bytes,
        picture_threads=threads_for(settings.frontends),
        fair=fair,
        guard=access.guard,
        picture_hosts=settings.picture_hosts,
        load_report=settings.load_report,
        forward=ForwardedHeaders.of(settings.http_header_forward_pattern, access.guard.proofs),
        started=started(parts),
    )
    limits = http_limits(settings)
    accounts = Accounts(limits.max_connections, most_bytes=limits.max_held_bytes)
    app.charge_to(accounts)
    metrics = HttpServer(MetricsApp(page, fair, access.guard), limits, charge=fair.charge, accounts=accounts)
    servers = {"http": HttpServer(app, limits, unread, fair.charge, accounts), "metrics": metrics}
    await parts.until_catalogued()
    for name, server in servers.items():
        await server.start(parts.sockets[name], access.context)
    return HttpFrontend(app, servers, block.server, access)


async def grpc(parts: FrontendParts) -> Frontend:
    from carpool.frontend.grpc.grpc_server import GrpcServer  # those for HTTP do without

    parts.engine_client.advise(Advice(parts.gates.read, parts.engine_client.ask))
    access = Access(parts.settings, loopback=all_loopback(parts.sockets["grpc"]), over_grpc=True)
    block = parts.table.block(parts.block)
    server = GrpcServer(parts.engine_client, block, parts.settings, access, started(parts))
    await parts.until_catalogued()
    await server.start(parts.sockets["grpc"])
    access.watch()
    return server
