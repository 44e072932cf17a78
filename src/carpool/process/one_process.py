"""Everything in one process (`--frontends 0`): the same app and the same engine, without a link between."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import carpool
from carpool.config.server import ServerSettings
from carpool.engine.engine_host import EngineHost
from carpool.engine.model_control import ControlDesk
from carpool.engine.models.control import Progress
from carpool.frontend.access.access import Access, all_loopback
from carpool.frontend.http.app import HttpApp
from carpool.frontend.http.exchange import App
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_server import HttpServer, check_free, listen
from carpool.frontend.http.metrics_page import MetricsApp
from carpool.frontend.http.shared_page import SharedPage
from carpool.frontend.pictures.workers import threads_for
from carpool.link.advice import Advice
from carpool.link.door import Catalog, Door
from carpool.memory.gates import GATE_BYTES, GateTable
from carpool.observe.columns import UP
from carpool.observe.counters import Block, Table, table_bytes
from carpool.observe.logs import logger
from carpool.observe.prometheus import Exposition, chosen
from carpool.process.front_ends import HttpFrontend, limits_of
from carpool.process.local_door import LocalDoor
from carpool.process.processes import Frontend
from carpool.process.recording import Recording
from carpool.process.start import engine_for, teach

log = logger("server")

_LAST_MOMENT_S = 0.25  # the engine answers for those who are cut off, and that must not look like an answer


async def serve(
    paths: Sequence[Path],
    settings: ServerSettings,
    stop: asyncio.Event,
    *,
    progress: Progress = lambda _model, _step: None,
    ready: Callable[[Catalog, Mapping[str, int]], None] = lambda _catalog, _ports: None,
) -> int:
    """Serve until `stop` is set, then finish what was accepted. `ready` gets the ports in use.

    Returns how many connections the time to drain was too short for.
    """
    table = Table(bytearray(table_bytes(1)))
    block = table.block(0)
    engine = engine_for(paths, settings, table)
    gates = GateTable(bytearray(GATE_BYTES))
    host = EngineHost(engine, gates.write)
    teach(host, settings)
    desk = ControlDesk(host, settings)
    local = LocalDoor(host, max_bytes=settings.slots * settings.slot_bytes)
    local.advice = Advice(gates.read, host.ask)
    recording = Recording(settings, began=time.monotonic())
    door = recording.door(local)
    families = chosen(settings.metrics)
    metrics = SharedPage(Exposition(table, version=carpool.__version__, families=families).pieces)
    fair = Fairness()  # its loop is the engine's too: how long requests lie unread says little here
    sockets = _sockets(settings)
    access = Access(settings, loopback=all_loopback(sockets["http"]))
    app = HttpApp(
        door,
        block,
        metrics,
        table=table,
        max_body_bytes=settings.max_body_bytes,
        picture_threads=threads_for(1),
        fair=fair,
        guard=access.guard,
    )
    ports = {name: int(bound[0].getsockname()[1]) for name, bound in sockets.items()}
    apps: dict[str, App] = {"http": app, "metrics": MetricsApp(metrics, fair, access.guard)}
    servers = {name: HttpServer(served, limits_of(settings)) for name, served in apps.items()}
    for name, server in servers.items():
        await server.start(sockets[name], access.context)
    frontends: list[Frontend] = [HttpFrontend(app, list(servers.values()), block.server, access)]
    if "grpc" in sockets:
        frontends.append(await _grpc(door, block, settings, sockets["grpc"]))
    try:
        await desk.open(progress)
        block.server.set(UP, 1.0)
        host.set_ready(True)
        ready(host.catalog, ports)
        await stop.wait()
        log.info("draining", seconds=settings.drain_s)
    finally:
        host.set_ready(False)
        within = settings.drain_s
        stopping = asyncio.gather(*(frontend.stop(within) for frontend in frontends))
        cut_off, _ = await asyncio.gather(stopping, host.drain(within + _LAST_MOMENT_S))
        await recording.close()
    return sum(cut_off)


def _sockets(settings: ServerSettings) -> dict[str, list[socket.socket]]:
    """Bound, by the name of their port. Those of gRPC only hold theirs."""
    wanted = {"http": settings.http_port, "metrics": settings.metrics_port}
    if settings.grpc_frontends:
        wanted["grpc"] = settings.grpc_port
    for port in filter(None, wanted.values()):
        check_free(settings.host, port)
    return {name: listen(settings.host, port, accepting=name != "grpc") for name, port in wanted.items()}


async def _grpc(
    door: Door, block: Block, settings: ServerSettings, reserved: Sequence[socket.socket]
) -> Frontend:
    from carpool.frontend.grpc.grpc_server import GrpcServer  # only for those who want it

    access = Access(settings, loopback=all_loopback(reserved), over_grpc=True)
    server = GrpcServer(door, block, settings, access)
    await server.start(reserved)
    access.watch()
    return server
