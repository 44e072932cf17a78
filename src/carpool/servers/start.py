"""What runs in each process: the engine behind its links, the front ends behind their doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import carpool
from carpool.config.server import ServerSettings
from carpool.engine.elsewhere import Elsewhere
from carpool.engine.engine import Engine
from carpool.observe.columns import CONNECTIONS, RESTARTS, UP
from carpool.observe.counters import Block, Row, Table
from carpool.observe.logs import logger
from carpool.observe.prometheus import Exposition
from carpool.servers.advice import Advice
from carpool.servers.host import EngineHost
from carpool.servers.http.limits import Limits
from carpool.servers.http.metrics_page import MetricsApp
from carpool.servers.http.server import HttpServer
from carpool.servers.http.unread import Unread
from carpool.servers.log_settings import LogSettings
from carpool.servers.memory_registry import MemoryRegistry
from carpool.servers.model_control import ControlDesk
from carpool.servers.pictures.workers import threads_for
from carpool.servers.processes import Frontend, FrontendParts
from carpool.servers.profiles import teach_profiles
from carpool.servers.recording import Recording
from carpool.servers.runner.client import Runner
from carpool.servers.trace_settings import TraceSettings

if TYPE_CHECKING:
    from carpool.servers.http.app import HttpApp

_COUNT_EVERY_S = 1.0


def engine_for(
    paths: Sequence[str] | Sequence[Path],
    settings: ServerSettings,
    table: Table,
    block: Block | None = None,
    elsewhere: Elsewhere | None = None,
) -> Engine:
    """With all that the server's settings say about models."""
    return Engine(
        *paths,
        slo_ms=settings.slo_ms,
        table=table,
        block=block,
        cache_dir=settings.cache_dir,
        device_memory_gb=settings.device_memory_gb,
        elsewhere=elsewhere,
    )


def limits_of(settings: ServerSettings) -> Limits:
    return Limits(
        max_header_bytes=settings.max_header_bytes,
        max_body_bytes=settings.max_body_bytes,
        max_connections=settings.max_connections,
        header_timeout_s=settings.header_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


def teach(host: EngineHost, settings: ServerSettings) -> None:
    """What front ends can ask of the engine besides inference and models."""
    MemoryRegistry(host, allowed=settings.allow_client_shm)
    LogSettings(host, settings.log_level)
    TraceSettings(host, settings.trace_file)
    teach_profiles(host)


async def engine(
    settings: ServerSettings,
    paths: Sequence[str],
    *,
    table: Table,
    block: int,
    write_gate: Callable[..., None],
) -> EngineHost:
    """Load the models; the front ends answer that they are alive, but not ready, until this returns."""
    log = logger("engine")
    mine = table.block(block)
    runner = Runner(settings, lambda: mine.server.add(RESTARTS["worker"]))
    served = engine_for(paths, settings, table, mine, runner)
    host = EngineHost(served, write_gate, runner)
    host.listen(lambda catalog: runner.follow_logging(catalog.logging))
    teach(host, settings)
    await ControlDesk(host, settings).open(lambda model, step: log.debug("loading", model=model, step=step))
    mine.server.set(UP, 1.0)
    host.set_ready(True)
    return host


class HttpFrontend:
    """The protocol's port and the metrics' port, stopped together."""

    def __init__(self, app: HttpApp, servers: Sequence[HttpServer], row: Row) -> None:
        self._app = app
        self._servers = servers
        self._row = row
        self._counting: asyncio.Handle = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self._row.set(CONNECTIONS, sum(server.connections for server in self._servers))
        self._counting = asyncio.get_running_loop().call_later(_COUNT_EVERY_S, self._count)

    async def stop(self, within_s: float) -> int:
        self._counting.cancel()
        cut_off = await asyncio.gather(*(server.stop(within_s) for server in self._servers))
        self._app.close()
        return sum(cut_off)


async def http(parts: FrontendParts) -> Frontend:
    from carpool.servers.http.app import HttpApp  # the engine runs this file too, without opencv

    unread = Unread()
    parts.door.advise(Advice(parts.gates.read, parts.door.ask, unread))
    recording = Recording(parts.settings, parts.began)
    page = Exposition(parts.table, version=carpool.__version__).page
    block = parts.table.block(parts.block)
    app = HttpApp(
        recording.door(parts.door),
        block,
        page,
        table=parts.table,
        max_body_bytes=parts.settings.max_body_bytes,
        picture_threads=threads_for(parts.settings.frontends),
    )
    limits = limits_of(parts.settings)
    servers = {"http": HttpServer(app, limits, unread), "metrics": HttpServer(MetricsApp(page), limits)}
    for name, server in servers.items():
        await server.start(parts.sockets[name])
    return recording.frontend(HttpFrontend(app, list(servers.values()), block.server))


async def grpc(parts: FrontendParts) -> Frontend:
    from carpool.servers.grpc.server import GrpcServer  # the engine runs this file too, without grpcio

    parts.door.advise(Advice(parts.gates.read, parts.door.ask))
    recording = Recording(parts.settings, parts.began)
    server = GrpcServer(recording.door(parts.door), parts.table.block(parts.block), parts.settings)
    await server.start(parts.sockets["grpc"])
    return recording.frontend(server)
