"""What runs in the engine's process: the models, behind links to the front ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.config.server import ServerSettings
from carpool.engine.engine import Engine, StartProgress
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_questions import ControlDesk, MemoryRegistry, answer_profile_questions
from carpool.engine.models.loading import ModelHost
from carpool.engine.runner_client import Runner
from carpool.link.door import LoadingStep
from carpool.observe.columns import RESTARTS, UP
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger
from carpool.process.shared_settings import LogSettings, TraceSettings


def engine_for(
    paths: Sequence[str] | Sequence[Path],
    settings: ServerSettings,
    table: Table,
    block: Block | None = None,
    host: ModelHost | None = None,
) -> Engine:
    """With all that the server's settings say about models."""
    return Engine(
        *paths,
        slo_ms=settings.slo_ms,
        table=table,
        block=block,
        cache_dir=settings.cache_dir,
        device_memory_gb=settings.device_memory_gb,
        host=host,
    )


def add_questions(host: EngineHost, settings: ServerSettings) -> None:
    """What front ends can ask of the engine besides inference and models."""
    host.extra["server_name"] = settings.server_name
    MemoryRegistry(host, allowed=settings.allow_client_shm)
    LogSettings(host, settings.log_level)
    TraceSettings(host, settings.trace_file)
    answer_profile_questions(host)


async def engine(
    settings: ServerSettings,
    paths: Sequence[str],
    *,
    table: Table,
    block: int,
    write_gate: Callable[..., None],
    progress: StartProgress,
) -> EngineHost:
    """Front ends can be attached from here on; `open` loads the models."""
    log = logger("engine")
    mine = table.block(block)
    runner = Runner(settings, lambda: mine.server.add(RESTARTS["worker"]))
    served = engine_for(paths, settings, table, mine, runner)
    host = EngineHost(served, write_gate, runner)
    runner.stall_changed = served.look_at_instances
    host.listen(lambda catalog: runner.follow_logging(catalog.logging))
    add_questions(host, settings)

    desk = ControlDesk(host, settings)

    def step_taken(step: LoadingStep) -> None:
        log.debug("loading", model=step.model, step=step.step)
        progress(step)

    async def open_models() -> None:
        await desk.open(step_taken)
        mine.server.set(UP, 1.0)

    host.open = open_models
    host.publish()
    return host
