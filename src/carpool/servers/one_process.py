"""Everything in one process (`--frontends 0`): the same app and the same engine, without a link between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import carpool
from carpool.config.server import ServerSettings
from carpool.engine.engine import Engine, Progress
from carpool.observe.columns import UP
from carpool.observe.counters import Table, table_bytes
from carpool.observe.logs import logger
from carpool.observe.prometheus import Exposition
from carpool.servers.door import Catalog
from carpool.servers.host import EngineHost
from carpool.servers.http.app import HttpApp
from carpool.servers.http.limits import Limits
from carpool.servers.http.server import HttpServer, listen
from carpool.servers.local_door import LocalDoor

log = logger("server")


def limits_of(settings: ServerSettings) -> Limits:
    return Limits(
        max_header_bytes=settings.max_header_bytes,
        max_body_bytes=settings.max_body_bytes,
        max_connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


def bound_port(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


async def serve(
    paths: Sequence[Path],
    settings: ServerSettings,
    stop: asyncio.Event,
    *,
    progress: Progress = lambda _model, _step: None,
    ready: Callable[[Catalog, int, int], None] = lambda _catalog, _http, _metrics: None,
) -> None:
    """Serve until `stop` is set, then finish what was accepted. `ready` gets the ports in use."""
    table = Table(bytearray(table_bytes(1)))
    block = table.block(0)
    engine = Engine(*paths, slo_ms=settings.slo_ms, table=table)
    host = EngineHost(engine)
    door = LocalDoor(host, max_bytes=settings.slots * settings.slot_bytes)
    metrics = Exposition(table, version=carpool.__version__).page
    app = HttpApp(door, block, metrics, max_body_bytes=settings.max_body_bytes)
    async with AsyncExitStack() as stack:
        stack.callback(app.close)
        http_sockets = listen(settings.host, settings.http_port)
        metrics_sockets = listen(settings.host, settings.metrics_port)
        servers = [HttpServer(app, limits_of(settings)) for _ in range(2)]
        for server, sockets in zip(servers, (http_sockets, metrics_sockets), strict=True):
            await server.start(sockets)
            stack.push_async_callback(server.stop, settings.drain_s)
        stack.push_async_callback(host.drain, settings.drain_s)
        await engine.start(progress)
        block.server.set(UP, 1.0)
        host.set_ready(True)
        ready(host.catalog, bound_port(http_sockets), bound_port(metrics_sockets))
        await stop.wait()
        host.set_ready(False)
        log.info("draining", seconds=settings.drain_s)
