"""Everything in one process (`--frontends 0`): the same app and the same engine, without a link between."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import carpool
from carpool.config.server import ServerSettings
from carpool.engine.engine import Engine, Progress
from carpool.observe.columns import UP
from carpool.observe.counters import Table, table_bytes
from carpool.observe.logs import logger
from carpool.observe.prometheus import Exposition
from carpool.servers.advice import Advice
from carpool.servers.door import Catalog
from carpool.servers.host import EngineHost
from carpool.servers.http.app import HttpApp
from carpool.servers.http.metrics_page import MetricsApp
from carpool.servers.http.server import HttpServer, check_free, listen
from carpool.servers.link.gates import GATE_BYTES, GateTable
from carpool.servers.local_door import LocalDoor
from carpool.servers.start import HttpFrontend, limits_of

log = logger("server")


def bound_port(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


async def serve(
    paths: Sequence[Path],
    settings: ServerSettings,
    stop: asyncio.Event,
    *,
    progress: Progress = lambda _model, _step: None,
    ready: Callable[[Catalog, int, int], None] = lambda _catalog, _http, _metrics: None,
) -> int:
    """Serve until `stop` is set, then finish what was accepted. `ready` gets the ports in use.

    Returns how many connections the time to drain was too short for.
    """
    table = Table(bytearray(table_bytes(1)))
    block = table.block(0)
    engine = Engine(*paths, slo_ms=settings.slo_ms, table=table)
    gates = GateTable(bytearray(GATE_BYTES))
    host = EngineHost(engine, gates.write)
    door = LocalDoor(host, max_bytes=settings.slots * settings.slot_bytes)
    door.advice = Advice(gates.read, host.ask)
    metrics = Exposition(table, version=carpool.__version__).page
    app = HttpApp(door, block, metrics, max_body_bytes=settings.max_body_bytes)
    for port in filter(None, (settings.http_port, settings.metrics_port)):
        check_free(settings.host, port)
    http_sockets = listen(settings.host, settings.http_port)
    metrics_sockets = listen(settings.host, settings.metrics_port)
    servers = [HttpServer(a, limits_of(settings)) for a in (app, MetricsApp(metrics))]
    for server, sockets in zip(servers, (http_sockets, metrics_sockets), strict=True):
        await server.start(sockets)
    frontend = HttpFrontend(app, servers, block.server)
    try:
        await engine.start(progress)
        block.server.set(UP, 1.0)
        host.set_ready(True)
        ready(host.catalog, bound_port(http_sockets), bound_port(metrics_sockets))
        await stop.wait()
        log.info("draining", seconds=settings.drain_s)
    finally:
        host.set_ready(False)
        drain_s = settings.drain_s
        cut_off, _ = await asyncio.gather(frontend.stop(drain_s), host.drain(drain_s))
    return cut_off
