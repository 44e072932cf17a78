"""Serves in one process, as with `--frontends 0`: the same front ends and engine, and a link between them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from carpool.config.server import ServerSettings
from carpool.engine.engine import StartProgress
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_link import EngineSide
from carpool.extensions import started
from carpool.frontend.http.http_server import check_free, listen
from carpool.frontend.link_client import LinkClient
from carpool.link.advice import GATE_BYTES, GateTable
from carpool.link.catalog import Catalog
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.observe.columns import UP
from carpool.observe.counters import Table, table_bytes
from carpool.observe.history import keep_history
from carpool.observe.logs import logger
from carpool.process import front_ends
from carpool.process.children import Frontend, FrontendParts
from carpool.process.lone_watch import watched
from carpool.process.start import add_questions, engine_for

_LAST_MOMENT_S = 0.25  # the engine answers for those who are cut off, and that must not look like an answer


async def serve(
    paths: Sequence[Path],
    settings: ServerSettings,
    stop: asyncio.Event,
    *,
    progress: StartProgress = lambda _step: None,
    ready: Callable[[Catalog, Mapping[str, int]], None] = lambda _catalog, _ports: None,
) -> int:
    """Serve until `stop` is set, then finish what was accepted. `ready` gets the ports in use.

    Returns how many connections the time to drain was too short for.
    """
    table = Table(bytearray(table_bytes(1)))
    gates = GateTable(bytearray(GATE_BYTES))
    host = EngineHost(partial(engine_for, paths, settings, table), gates.write, settings=settings)
    desk = add_questions(host, settings)
    sockets = _sockets(settings)
    ports = {name: int(bound[0].getsockname()[1]) for name, bound in sockets.items()}
    end_history = keep_history(table)
    side, engine_client = await _joined(host, settings, stop)
    parts = FrontendParts(engine_client, gates, settings, sockets, table, 0, time.monotonic(), apart=False)
    frontends = [await front_ends.http(parts)]
    if "grpc" in sockets:
        frontends.append(await front_ends.grpc(parts))
    frontends += await _of_extensions(parts)
    opening, stopping = asyncio.ensure_future(desk.open(progress)), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            opening.result()
            with watched(settings):
                table.block(0).server.set(UP, 1.0)
                host.set_ready(True)
                await side.everyone_saw(host.catalog.number)
                ready(host.catalog, ports)
                await stopping
                if settings.lame_duck_s:  # not ready for health checks, but still serving every client
                    host.set_ready(False)
                    await asyncio.sleep(settings.lame_duck_s)
        logger("server").info("draining", seconds=settings.drain_s)
    finally:
        engine_client.drain()
        host.set_ready(False)
        host.give_up_loads()
        within = settings.drain_s
        ends = asyncio.gather(*(frontend.stop(within) for frontend in frontends))
        cut_off, _ = await asyncio.gather(ends, host.drain(within + _LAST_MOMENT_S))
        for task in (opening, stopping):
            task.cancel()
        await asyncio.gather(opening, stopping, return_exceptions=True)
        side.close()
        engine_client.close()
        end_history()
    return sum(cut_off)


async def _of_extensions(parts: FrontendParts) -> list[Frontend]:
    """Starts here what has a process of its own elsewhere. The server serves without it."""
    found: list[Frontend] = []
    for extension in started(parts.settings):
        for process in extension.processes:
            try:
                found.append(await extension.part(process.start)(parts))
            except Exception:
                logger("server").exception("process-not-started", role=process.name)
    return found


async def _joined(
    host: EngineHost, settings: ServerSettings, stop: asyncio.Event
) -> tuple[EngineSide, LinkClient]:
    """Returns both ends of a link. One that breaks ends the server: the two sides would not agree on who may
    write to which memory."""

    def broken(*_: object) -> None:
        logger("server").error("link-broken")
        stop.set()

    most = settings.max_body_bytes
    arena = create_memory("carpool-arena", settings.arena_bytes)
    engine_client = LinkClient(Arena(map_memory(arena)), max_answer_bytes=most, broken=broken)
    side = EngineSide(host, max_answer_bytes=most, dropped=broken)
    ours, theirs = socket.socketpair()
    await engine_client.attach(theirs)
    await side.attach(0, ours, arena)
    return side, engine_client


def _sockets(settings: ServerSettings) -> dict[str, list[socket.socket]]:
    """Bound, by the name of their port."""
    wanted = {"http": settings.http_port, "metrics": settings.metrics_port}
    if settings.grpc_frontends:
        wanted["grpc"] = settings.grpc_port
    for extension in started(settings):
        for process in extension.processes:
            wanted |= process.ports
    for port in filter(None, wanted.values()):
        check_free(settings.host, port)
    return {name: listen(settings.host, port) for name, port in wanted.items()}
