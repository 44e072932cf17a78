"""What runs in the engine's process: the models, behind links to the front ends."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
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
from carpool.extensions import installed
from carpool.link.catalog import LoadingStep
from carpool.link.child_process import Child
from carpool.observe.columns import RESTARTS, UP
from carpool.observe.counters import Table
from carpool.observe.logs import logger
from carpool.process.hosting_process import HostingProcess
from carpool.process.shared_settings import LogSettings

if TYPE_CHECKING:
    pass


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
