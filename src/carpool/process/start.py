"""What runs in the engine's process: the models, behind links to the front ends. With `--frontends 0` all
runs in one process: the same front ends and engine, and a link between them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from carpool.config.server import ServerSettings
from carpool.engine.control.engine_questions import (
    ClientRegions,
    ControlDesk,
    answer_profile_questions,
)
from carpool.engine.engine import Engine, StartProgress
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_link import EngineSide
from carpool.engine.load_gauges import LoadGauges
from carpool.engine.models.runtime import ModelProcess
from carpool.engine.profile.model_profile import ProfileStore
from carpool.extension import Extension
from carpool.extensions import installed, started
from carpool.frontend.http.http_server import check_free, listen
from carpool.frontend.link_client import LinkClient
from carpool.link.advice import GATE_BYTES, GateTable
from carpool.link.catalog import Catalog, LoadingStep
from carpool.link.child_process import Child
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.observe.columns import RESTARTS, UP
from carpool.observe.counters import Table, table_bytes
from carpool.observe.history import keep_history
from carpool.observe.logs import logger
from carpool.process.hosting_process import HostingProcess
from carpool.process.shared_settings import LogSettings

if TYPE_CHECKING:
    from carpool.process.children import Frontend, FrontendParts


def engine_for(
    paths: Sequence[str] | Sequence[Path],
    settings: ServerSettings,
    table: Table,
    *,
    restarted: bool = False,
    **given: Any,
) -> Engine:
    """Returns an engine with all that the server's settings say about models. One that was `restarted` takes
    the place of another, which died."""
    return Engine(
        *paths,
        slo_ms=settings.slo_ms,
        pictures=settings.pictures,
        table=table,
        profiles=ProfileStore.of(
            settings.cache_dir,
            settings.shared_profiles,
            settings.cache_secret,
            looks_again=True,
            restarted=restarted,
        ),
        device_memory_gb=settings.device_memory_gb,
        on_demand=settings.on_demand,
        memory_gb=settings.memory_gb,
        **given,
    )


def add_questions(host: EngineHost, settings: ServerSettings) -> ControlDesk:
    """Adds what front ends can ask of the engine besides inference. The desk returned starts the models."""
    host.published = replace(host.published, name=settings.server_name)
    ClientRegions(host, allowed=settings.allow_client_shm)
    LogSettings(host, settings.log_level)
    host.start_parts()
    answer_profile_questions(host)
    gauges = LoadGauges(host.engine.table, lambda: host.engine.served)
    gauges.start()
    host.on_stop(gauges.stop)
    return ControlDesk(host, settings)


async def engine(
    settings: ServerSettings,
    paths: Sequence[str],
    *,
    table: Table,
    block: int,
    write_gate: Callable[..., None],
    progress: StartProgress,
    dropped: Callable[[int], None],
    begun: Child | None = None,
    restarted: bool = False,
) -> tuple[EngineSide, Callable[[], Coroutine[Any, Any, None]]]:
    """Front ends can be attached from here on; the function loads the models. `begun` is what was started
    before: the zygote."""
    log = logger("engine")
    mine = table.block(block)
    process = _beside_the_engine(
        settings,
        restarted=lambda: mine.server.add(RESTARTS["worker"]),
        stall_changed=lambda: host.engine.look_at_instances(),
        zygote=begun,
    )
    make = partial(engine_for, paths, settings, table, restarted=restarted, block=mine, host=process)
    host = EngineHost(make, write_gate, process, settings)
    if process is not None:
        host.listen(lambda catalog: process.follow_logging(catalog.server.logging))
    desk = add_questions(host, settings)

    def step_taken(step: LoadingStep) -> None:
        log.debug("loading", model=step.model, step=step.step)
        progress(step)

    async def open_models() -> None:
        await desk.open(step_taken)
        mine.server.set(UP, 1.0)

    host.publish()
    side = EngineSide(host, max_answer_bytes=settings.max_body_bytes, dropped=dropped)
    return side, open_models


def _beside_the_engine(
    settings: ServerSettings,
    restarted: Callable[[], None],
    stall_changed: Callable[[], None],
    zygote: Child | None,
) -> ModelProcess | None:
    """Returns the process that an extension brings; None: all models run in the engine's own."""
    for extension in installed().values():
        if extension.model_process:
            given = settings, restarted, stall_changed, zygote
            make: Callable[[], ModelProcess] = partial(_made, extension, *given)
            return HostingProcess(make, settings.max_body_bytes)
    return None


def _made(extension: Extension, *given: object) -> ModelProcess:
    return cast(ModelProcess, extension.part(extension.model_process)(*given))


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
    from carpool.process import front_ends  # an engine with a process of its own never needs these
    from carpool.process.children import FrontendParts
    from carpool.process.lone_watch import watched

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
